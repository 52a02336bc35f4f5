"""Writes into parts of arrays, such as ``x[:, 3:] = value``, on CPUs."""

from __future__ import annotations

from typing import Any

import jax

from model_adapters.bridge.views import NarrowInfo, TorchTensor, jax_view
from model_adapters.ops import registry


def keep_writes_apart() -> None:
    """Ends a fusion behind each write into a part of an array, in programs for CPUs.

    XLA of jaxlib 0.10.2 fuses a write in place with what its value is made of, and computes wrong numbers where that
    value reads other elements of the same array: ``q[:, :, n:] = rotate(q[:, :, n:])`` behind a norm and before the
    product of attention.
    """
    update, assign = NarrowInfo.update_tensor, TorchTensor.__setitem__

    def update_tensor(self: Any, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
        return _apart(update(self, new_value, jax_array))

    def set_item(self: Any, key: Any, value: Any) -> None:
        assign(self, key, value)
        self._elem = _apart(jax_view(self))

    NarrowInfo.update_tensor = update_tensor
    TorchTensor.__setitem__ = set_item


def _apart(written: jax.Array) -> jax.Array:
    is_traced = isinstance(written, jax.core.Tracer)  # known values stay known
    return jax.lax.optimization_barrier(written) if is_traced and registry.platform() == "cpu" else written
