"""The pipelines of diffusers, built tiny by diffusers' own tests, next to eager PyTorch."""
