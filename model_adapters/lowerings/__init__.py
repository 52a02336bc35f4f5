"""Lowerings of torch operators to JAX: replacements of torchax's own, and new operators."""
