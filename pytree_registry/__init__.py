"""Makes the output and cache classes of transformers JAX pytree nodes.

Tensors are leaves, sizes and flags static, and nothing static changes from token to token, so that a function over
these objects can be jitted::

    import pytree_registry

    pytree_registry.register_all()
    step = jax.jit(function)          # caches and outputs go in and come out

See :mod:`pytree_registry.flatten_attributes` for what is a leaf, :mod:`pytree_registry.traced_counts` for the token
counts of sliding windows, :mod:`pytree_registry.registry` for which classes and when. Importing this package imports
neither jax nor transformers; importing its modules does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytree_registry import torchax_import
from pytree_registry.errors import RegistrationError, TracedCountError
from pytree_registry.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pytree_registry.registry import is_registered, owner_of, register, register_all, registered_classes
    from pytree_registry.traced_counts import TracedCount, exact_counts

__all__ = [
    "RegistrationError",
    "TracedCount",
    "TracedCountError",
    "exact_counts",
    "is_registered",
    "owner_of",
    "register",
    "register_all",
    "registered_classes",
]

torchax_import.install()  # `import torchax` works from here on, on every torch

# jax takes half a second to import; the help of the command line must not wait for it.
__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "TracedCount": ".traced_counts",
        "exact_counts": ".traced_counts",
        "is_registered": ".registry",
        "owner_of": ".registry",
        "register": ".registry",
        "register_all": ".registry",
        "registered_classes": ".registry",
    },
)
