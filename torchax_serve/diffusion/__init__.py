"""Diffusion pipelines of diffusers whose models run on JAX."""
