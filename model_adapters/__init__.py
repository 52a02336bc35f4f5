"""From Hugging Face modules to JAX functions: loading, the bridge, caches, attention interception, ops."""

from model_adapters import compat

compat.install()
