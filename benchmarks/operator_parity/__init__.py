"""PyTorch's operators by `extract_jax` beside PyTorch, over PyTorch's own samples of their arguments."""
