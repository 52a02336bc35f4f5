"""Compiled programs: their storage on disk, and its size."""
