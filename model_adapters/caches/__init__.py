"""KV caches as transformers' cache classes over JAX arrays: contiguous, paged, compressed, native."""
