"""Writes by boolean masks: ``tensor[mask] = rows``, ``index_put`` and ``masked_scatter``."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from model_adapters.bridge.views import get_lowering, set_lowering
from model_adapters.errors import InvalidArgumentError
from model_adapters.lowerings import index_checks


def install() -> None:
    """Registers the lowerings in torchax's table."""
    theirs = get_lowering(torch.ops.aten.index_put)

    def index_put(x: jax.Array, indices: Any, values: Any, accumulate: bool = False) -> jax.Array:
        if len(indices) == 1 and is_mask(indices[0]):
            return put(x, indices[0], jnp.asarray(values, x.dtype), accumulate)
        if not any(is_mask(part) for part in indices):
            for axis, part in enumerate(indices):
                index_checks.check_known("index_put", x.shape[axis], part, from_end=True)
        placed: jax.Array = theirs(x, indices, values, accumulate)
        return placed

    set_lowering(torch.ops.aten.index_put, index_put)
    set_lowering(torch.ops.aten.masked_scatter, _masked_scatter)


def is_mask(index: Any) -> bool:
    """Tells whether `index` is an array of truth values."""
    return isinstance(index, jax.Array | np.ndarray) and index.dtype == bool and index.ndim > 0


def put(x: jax.Array, mask: Any, values: jax.Array, accumulate: bool = False) -> jax.Array:
    """Returns `x` [*dims, *rest] with `values` at `mask` bool[*dims].

    `values` are [num_set, *rest], or what is broadcast to that.
    """
    mask_shape, rest = mask.shape, x.shape[mask.ndim :]
    if x.shape[: len(mask_shape)] != mask_shape:
        raise IndexError(f"The shape of the mask {list(mask_shape)} does not match the tensor's {list(x.shape)}")
    while values.ndim > len(rest) + 1 and values.shape[0] == 1:
        values = values[0]
    if not isinstance(mask, jax.core.Tracer):
        at = x.at[np.asarray(mask)]  # jnp would compute the places in the program
        return at.add(values) if accumulate else at.set(values)
    if values.ndim == len(rest) + 1 and values.shape[0] != 1:
        values = jnp.broadcast_to(values, (values.shape[0], *rest))
        values = values[_numbers(mask.reshape(-1), values.shape[0])].reshape(x.shape)
    return jnp.where(mask.reshape(*mask_shape, *[1] * len(rest)), x + values if accumulate else values, x)


def _numbers(mask: jax.Array, num_rows: int) -> jax.Array:
    """Returns how many elements of `mask` bool[n] are set before each, at most `num_rows` - 1.

    A scan, since the program of a cumulative sum of a long mask on CPUs has a window of its length.
    """
    counts = jax.lax.associative_scan(jnp.add, mask.astype(jnp.int32))
    return jnp.clip(counts - 1, 0, max(num_rows - 1, 0))


def _masked_scatter(x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    """Computes ``torch.masked_scatter``: elements of `source`, in order, where `mask` is set."""
    shape = jnp.broadcast_shapes(x.shape, mask.shape)
    x, mask = jnp.broadcast_to(x, shape), jnp.broadcast_to(mask, shape)
    if not isinstance(mask, jax.core.Tracer) and (num_set := int(np.asarray(mask).sum())) > math.prod(source.shape):
        raise InvalidArgumentError(
            f"masked_scatter: expected a source of at least {num_set} elements, as many as the mask has set, got "
            f"{math.prod(source.shape)}"
        )
    if not math.prod(source.shape):
        return x
    rows = source.reshape(-1).astype(x.dtype)
    return jnp.where(mask, rows[_numbers(mask.reshape(-1), rows.size)].reshape(shape), x)
