"""Low-rank adapters beside a weight, one for each token (LoRA, 2021; Punica, 2023).

A `LoraWeight` takes the place of a weight among a model's. The product `linear` with it adds, for each token, the
product with the matrices of the token's adapter. Tokens without an adapter have the product of the weight alone, bit
for bit.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.errors import UnsupportedModelError
from model_adapters.ops import registry

OP = "lora"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraWeight:
    """A weight and the matrices of its adapters.

    Attributes:
        base: The weight: an array ``[out, in]`` or ``[in, out]``, or a stored form of one.
        a: Matrices of all adapters, ``[adapters, rank, in]`` in the weight's dtype; zeros behind an adapter's own rank.
        b: ``[adapters, rank, out]``, with the scale.
    """

    base: Any
    a: jax.Array
    b: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(self.base.shape)

    @property
    def ndim(self) -> int:
        """Number of axes of the weight."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the weight."""
        return self.base.dtype

    @property
    def nbytes(self) -> int:
        """Number of bytes of the weight and of the matrices of all adapters."""
        return int(self.base.nbytes + self.a.nbytes + self.b.nbytes)

    def unpacked(self) -> jax.Array:
        """Returns the weight without adapters as an array."""
        array: jax.Array = self.base if isinstance(self.base, jax.Array) else self.base.unpacked()
        return array


_ADAPTERS: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("adapters", default=None)


@contextlib.contextmanager
def adapters_told(ids: jax.Array | None) -> Iterator[None]:
    """Makes products traced inside add the adapter of each token.

    Args:
        ids: int32[tokens], or int32[] for all tokens: 0 for none, else one more than an adapter's index. None: none.
    """
    before = _ADAPTERS.set(ids)
    try:
        yield
    finally:
        _ADAPTERS.reset(before)


def add_adapters(sums: jax.Array, x: jax.Array, lora: LoraWeight | None) -> jax.Array:
    """Returns a product with a weight plus that with the adapter of each token.

    Args:
        sums: Product with the weight, ``[..., out]``.
        x: Its operand, ``[..., in]``.
        lora: The adapters; None if the weight has none.

    Raises:
        UnsupportedModelError: the operand has no row for each token.
    """
    ids = _ADAPTERS.get()
    if lora is None or ids is None:
        return sums
    lead = x.shape[:-1]
    num_rows = math.prod(lead)
    out: jax.Array = registry.call(
        OP,
        x.reshape(num_rows, x.shape[-1]),
        sums.reshape(num_rows, sums.shape[-1]),
        _ids_of_rows(ids, lead),
        lora.a,
        lora.b,
    )
    return out.reshape(sums.shape)


def _ids_of_rows(ids: jax.Array, lead: Sequence[int]) -> jax.Array:
    """Returns the adapter of each row, int32[rows], of an operand.

    It has the axes `lead` in front of its last one.
    """
    num_rows = math.prod(lead)
    if ids.ndim == 0 or ids.shape[0] == 1:
        return jnp.broadcast_to(ids.reshape(-1), (num_rows,))
    num_tokens = ids.shape[0]
    axes = [size for size in lead if size != 1]
    if num_rows == num_tokens:
        return ids
    if not axes or axes[0] != num_tokens:
        raise UnsupportedModelError(
            f"adapters: expected layers whose input has a row for each of {num_tokens} tokens, got one of shape "
            f"{[*lead]}; merge the adapter: serve(model, adapter=...)"
        )
    return jnp.repeat(ids, num_rows // num_tokens)
