"""Checks every architecture of transformers, tiny and random, on JAX against eager PyTorch."""
