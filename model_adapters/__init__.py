"""The path from Hugging Face modules to JAX functions.

It covers loading, the bridge, caches, attention interception and ops.
"""

import pytree_registry  # noqa: F401  # after which `import torchax` works on every torch
