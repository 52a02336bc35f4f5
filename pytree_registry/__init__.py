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

import importlib
from typing import TYPE_CHECKING, Any

from pytree_registry import torchax_import
from pytree_registry.errors import RegistrationError, TracedCountError

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


def __getattr__(name: str) -> Any:
    # jax takes half a second to import; the command line's help must not wait for it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "counts" if name in ("TracedCount", "exact_counts") else "registry"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
