"""KV caches as transformers' cache classes over JAX arrays.

They are contiguous, paged, compressed or native.
"""
