"""How torch operators become JAX: replacements of torchax's own, and operators of this project."""
