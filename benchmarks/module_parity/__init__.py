"""Modules of other libraries on JAX and in eager PyTorch: outputs and gradients for random weights."""
