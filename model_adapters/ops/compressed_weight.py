"""Losslessly compressed bfloat16 weights of three quarters of the bytes, for CPUs.

Decoding is bound by memory bandwidth, so that smaller weights make it faster. A `CompressedWeight` takes the place of
an array among a model's weights. While a model is traced, :func:`substituted` gives model code the decompressed array;
the op `linear` finds the compressed form by it and multiplies with that, and XLA removes the unused decompression.
Other code reads the decompressed array, which is correct and slow.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.ops.cpu import compress, ffi
from model_adapters.ops.lora_weight import LoraWeight
from model_adapters.ops.quantized_weight import QuantizedWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressedWeight:
    """A compressed matrix bfloat16[n, k], or a stack of them, [matrices, n, k].

    Attributes:
        groups: Compressed numbers, uint8[..., n / 16, k / 8, 192]: 8 columns of 16 rows form a group.
        index: Table of high bytes, and the groups that are stored uncompressed, int32[...].
        plain: Uncompressed bfloat16[..., n, k], if other code than products and lookups reads it as well; else None.
        num_rows: The n of a matrix whose last 16 rows are padded; else None.
    """

    groups: jax.Array
    index: jax.Array
    plain: jax.Array | None = None
    num_rows: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape ``(..., n, k)`` of the weight."""
        *matrices, blocks, columns, _ = self.groups.shape
        return *matrices, self.num_rows or blocks * ffi.GROUP_ROWS, columns * ffi.GROUP_COLUMNS

    @property
    def ndim(self) -> int:
        """Number of axes of the weight: two, or three of a stack."""
        return self.groups.ndim - 1

    @property
    def dtype(self) -> Any:
        """Dtype of the matrix."""
        return jnp.dtype(jnp.bfloat16)

    @property
    def nbytes(self) -> int:
        """Number of bytes that a product reads."""
        return int(self.groups.nbytes + self.index.nbytes)

    def unpacked(self) -> jax.Array:
        """Returns the weight bfloat16[..., n, k], bit for bit."""
        if self.plain is not None:
            return self.plain
        padded = ffi.unpack(self.groups, self.index)
        return padded if self.num_rows is None else padded[: self.num_rows]


def take_compressed_rows(weight: CompressedWeight, indices: jax.Array) -> jax.Array:
    """Returns the rows `indices` int[...] of a compressed weight ``[n, k]``: bfloat16[..., k].

    Indices outside of the weight are clamped.
    """
    ids = indices.reshape(-1).astype(jnp.int32)
    if weight.num_rows is not None:  # what is behind them is no padding's
        ids = jnp.minimum(ids, weight.num_rows - 1)
    return ffi.unpack_rows(ids, weight.groups, weight.index).reshape(*indices.shape, weight.shape[1])


Stored = CompressedWeight | QuantizedWeight | LoraWeight
"""A form of a weight that is not an array."""
Weight = jax.Array | Stored
Weights = Mapping[str, Weight]
"""Weights of a model by qualified name."""


def compress_weight(
    weight: jax.Array, place: np.ndarray | None = None, *, keeps_plain: bool = False
) -> CompressedWeight | None:
    """Returns ``weight[..., n, k]`` compressed, or None if that is unsupported or saves little.

    Args:
        weight: bfloat16[n, k], or a stack [matrices, n, k].
        place: Memory for the groups, uint8[`compress.group_bytes`], or None for new memory.
        keeps_plain: Keep the uncompressed array as well.
    """
    if compress.unsupported_reason(weight) is not None or (packed := compress.pack(np.asarray(weight), place)) is None:
        return None
    groups, index = (jax.device_put(part, may_alias=True) for part in packed)
    num_rows = weight.shape[0] if weight.ndim == 2 and weight.shape[0] % ffi.GROUP_ROWS else None
    return CompressedWeight(groups, index, weight if keeps_plain else None, num_rows)


def unpacked(weight: Weight) -> jax.Array:
    """Returns `weight` as an array."""
    return weight.unpacked() if isinstance(weight, Stored) else weight


@dataclasses.dataclass(frozen=True)
class _Known:
    """An array of the trace that represents a stored weight.

    `array` is referenced, so that its ``id`` stays unique.

    Attributes:
        array: ``weight.unpacked()``, or that with its last two axes exchanged.
        weight: The stored form.
        is_turned: Whether the axes are exchanged.
    """

    array: jax.Array
    weight: Stored
    is_turned: bool = False

    @property
    def form(self) -> Any:
        """The stored form without adapters."""
        return self.weight.base if isinstance(self.weight, LoraWeight) else self.weight


_TURNED: contextvars.ContextVar[dict[int, tuple[jax.Array, jax.Array]] | None] = contextvars.ContextVar(
    "turned", default=None
)
"""Arrays of the trace with exchanged last axes, by id, and what they were made of."""

_IN_TRACE: contextvars.ContextVar[dict[int, _Known]] = contextvars.ContextVar("packed", default={})  # noqa: B039 set anew


@contextlib.contextmanager
def substituted(weights: Weights) -> Iterator[dict[str, jax.Array]]:
    """Yields `weights` as arrays, from which the stored forms can be looked up.

    :func:`compressed_of` and :func:`quantized_of` do so. Names that share a stored form share an array.
    """
    dense = {id(weight): unpacked(weight) for weight in weights.values()}
    arrays = {name: dense[id(weight)] for name, weight in weights.items()}
    known = {
        id(arrays[name]): _Known(arrays[name], weight) for name, weight in weights.items() if isinstance(weight, Stored)
    }
    before, turned_before = _IN_TRACE.set(known), _TURNED.set({})
    try:
        yield arrays
    finally:
        _IN_TRACE.reset(before)
        _TURNED.reset(turned_before)


@contextlib.contextmanager
def also_stored(pairs: Iterable[tuple[jax.Array, Weight]]) -> Iterator[None]:
    """Makes stored forms be found by other arrays as well, inside the context.

    Each of `pairs` is an array and its form, or the array itself.
    """
    found = {id(array): _Known(array, form) for array, form in pairs if isinstance(form, Stored)}
    before = _IN_TRACE.set({**_IN_TRACE.get(), **found})
    try:
        yield
    finally:
        _IN_TRACE.reset(before)


def stored_form(array: jax.Array) -> Weight:
    """Returns the stored form of a weight of the traced model; the array itself if it has none."""
    known = _IN_TRACE.get().get(id(array))
    return array if known is None or known.is_turned else known.weight


def compressed_of(weight: jax.Array) -> CompressedWeight | None:
    """Returns the compressed form of a weight ``[..., n, k]`` of the traced model, or None."""
    known = _IN_TRACE.get().get(id(weight))
    return known.form if known and isinstance(known.form, CompressedWeight) and not known.is_turned else None


def lora_of(weight: jax.Array) -> LoraWeight | None:
    """Returns the adapters of a weight of the traced model, in any order of its axes, or None."""
    known = _IN_TRACE.get().get(id(weight))
    return known.weight if known and isinstance(known.weight, LoraWeight) else None


def quantized_of(weight: jax.Array) -> QuantizedWeight | None:
    """Returns the quantized form of a weight of the traced model, in its axes' order, or None."""
    known = _IN_TRACE.get().get(id(weight))
    if known is None or not isinstance(known.form, QuantizedWeight):
        return None
    return known.form.turned() if known.is_turned else known.form


def note_turned(weight: jax.Array, turned: jax.Array) -> None:
    """Records `turned`, so that :func:`quantized_of` and :func:`before_turn` find it.

    `turned` is `weight` with its last two axes exchanged.
    """
    if (made := _TURNED.get()) is not None:
        made[id(turned)] = turned, weight
    known = _IN_TRACE.get()
    if (found := known.get(id(weight))) is not None:
        known[id(turned)] = _Known(turned, found.weight, not found.is_turned)


def before_turn(array: jax.Array) -> jax.Array | None:
    """Returns the array that `array` is with its last two axes exchanged, or None.

    It is None as well if model code has not exchanged them in the trace.
    """
    found = (_TURNED.get() or {}).get(id(array))
    return None if found is None else found[1]
