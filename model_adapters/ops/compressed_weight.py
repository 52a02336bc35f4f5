"""Weights that lie packed, as model code's products take them: three quarters of the bytes, every bit kept.

Decoding waits for memory, so on a CPU it goes faster by what the weights are smaller. A `CompressedWeight` stands among
a model's weights in the place of an array. In a trace model code holds the weight as it was, by :func:`substituted`;
where it multiplies by it, the op `linear` takes the packed one instead, and XLA leaves out what nobody reads then.
Other code reads the weight unpacked, which is right and slow.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.ops.cpu import compress, ffi


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressedWeight:
    """A matrix bfloat16[n, k].

    Attributes:
        groups: uint8[n / 16, k / 8, 192], its numbers, 8 of 16 rows together.
        index: int32[...], the table of high bytes and the groups that do not go by it.
        plain: the array itself, where other code reads it as well, such as the table of a tied head.
    """

    groups: jax.Array
    index: jax.Array
    plain: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return self.groups.shape[0] * ffi.GROUP_ROWS, self.groups.shape[1] * ffi.GROUP_COLUMNS

    @property
    def ndim(self) -> int:
        """Of the matrix."""
        return 2

    @property
    def dtype(self) -> Any:
        """Of the matrix."""
        return jnp.dtype(jnp.bfloat16)

    @property
    def nbytes(self) -> int:
        """That a product reads."""
        return int(self.groups.nbytes + self.index.nbytes)

    def unpacked(self) -> jax.Array:
        """The matrix, to the last bit as it was."""
        return ffi.unpack(self.groups, self.index) if self.plain is None else self.plain


Weight = jax.Array | CompressedWeight
Weights = Mapping[str, Weight]
"""Of a model, by qualified name."""


def compress_weight(
    weight: jax.Array, place: np.ndarray | None = None, *, keeps_plain: bool = False
) -> CompressedWeight | None:
    """`weight` packed, or None where it is left as it is: see `packing.refuses`, or little would be gained."""
    if compress.unsupported_reason(weight) is not None or (packed := compress.pack(np.asarray(weight), place)) is None:
        return None
    groups, index = (jax.device_put(part, may_alias=True) for part in packed)
    return CompressedWeight(groups, index, weight if keeps_plain else None)


def unpacked(weight: Weight) -> jax.Array:
    """`weight` as an array."""
    return weight.unpacked() if isinstance(weight, CompressedWeight) else weight


_IN_TRACE: contextvars.ContextVar[dict[int, CompressedWeight]] = contextvars.ContextVar("packed", default={})  # noqa: B039 never mutated


@contextlib.contextmanager
def substituted(weights: Weights) -> Iterator[dict[str, jax.Array]]:
    """`weights` as arrays; inside, :func:`compressed_of` knows those that lie packed."""
    arrays = {name: unpacked(weight) for name, weight in weights.items()}
    known = {id(arrays[name]): weight for name, weight in weights.items() if isinstance(weight, CompressedWeight)}
    before = _IN_TRACE.set(known)
    try:
        yield arrays
    finally:
        _IN_TRACE.reset(before)


def compressed_of(weight: jax.Array) -> CompressedWeight | None:
    """The packed form of a weight that model code has in its hand, unchanged."""
    return _IN_TRACE.get().get(id(weight))
