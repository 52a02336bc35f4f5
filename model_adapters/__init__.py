"""From Hugging Face modules to JAX functions: loading, the bridge, caches, attention interception, ops."""

import pytree_registry  # noqa: F401  # after which `import torchax` works on every torch
