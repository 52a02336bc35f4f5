"""Modules of any library on JAX: their methods as programs."""
