"""Tiny models to check parity with."""
