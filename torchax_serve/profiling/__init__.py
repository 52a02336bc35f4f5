"""Profiles of a model: where the time of its programs goes, by the model's own modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytree_registry.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from torchax_serve.profiling.profile import Profile
    from torchax_serve.profiling.session import ProfileSession
    from torchax_serve.profiling.tables import ProfileRow, ProfileTable

__all__ = ["Profile", "ProfileRow", "ProfileSession", "ProfileTable"]

# Benchmarks take the bandwidth alone.
__getattr__, __dir__ = lazy_exports(
    __name__,
    {"Profile": ".profile", "ProfileRow": ".tables", "ProfileSession": ".session", "ProfileTable": ".tables"},
)
