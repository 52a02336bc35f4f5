"""Makes the output and cache classes of transformers JAX pytree nodes.

Tensors are leaves, sizes and flags static, and nothing static changes from token to token, so that a function over
these objects can be jitted::

    import pytree_registry

    pytree_registry.register_all()
    step = jax.jit(function)          # caches and outputs go in and come out

See :mod:`pytree_registry.attributes` for what is a leaf, :mod:`pytree_registry.counts` for the token counts of sliding
windows, :mod:`pytree_registry.registry` for which classes and when. Importing this package imports no transformers.
"""

from pytree_registry import torchax_import
from pytree_registry.counts import StepCount, exact_counts
from pytree_registry.errors import RegistrationError, TracedCountError
from pytree_registry.registry import is_registered, owner_of, register, register_all, registered_classes

__all__ = [
    "RegistrationError",
    "StepCount",
    "TracedCountError",
    "exact_counts",
    "is_registered",
    "owner_of",
    "register",
    "register_all",
    "registered_classes",
]

torchax_import.install()  # `import torchax` works from here on, on every torch
