"""Every architecture of transformers, tiny and random, on JAX beside eager PyTorch."""
