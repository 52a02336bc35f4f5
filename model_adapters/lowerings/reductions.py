"""Lowerings of sums, softmax and layer norm to this project's own ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters import ops
from model_adapters.ops.linear import accumulator


def jax_dtype(dtype: Any) -> Any:
    """Returns JAX's dtype for one of torch, of 32 bits for 64; None for None."""
    return dtype if dtype is None else jax.dtypes.canonicalize_dtype(str(dtype).removeprefix("torch."))


def _is_last(dim: Any, x: jax.Array) -> bool:
    """Tells whether `dim` is only the last of two or more dimensions of a float array.

    `dim` is a number or a sequence.
    """
    dims = dim if isinstance(dim, Sequence) else (dim,)
    return x.ndim > 1 and len(dims) == 1 and dims[0] in (-1, x.ndim - 1) and jnp.issubdtype(x.dtype, jnp.floating)


def _dims(dim: Any) -> Any:
    """Returns dimensions as jnp takes them: None for all, which is an empty list in torch, too."""
    if isinstance(dim, Sequence):
        return tuple(dim) or None
    return dim


def _sum(x: jax.Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> jax.Array:
    """Computes ``torch.sum``; torchax 0.0.13 ignores `dtype`."""
    x = x if dtype is None else x.astype(jax_dtype(dtype))
    if _is_last(dim, x):
        return _with_kept_dim(ops.row_sum(x), keepdim).astype(x.dtype)
    if dtype is None and jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        x = x.astype(jax_dtype(torch.int64))
    return jnp.sum(x, _dims(dim) if x.ndim else None, keepdims=keepdim)


def _mean(x: jax.Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> jax.Array:
    """Computes ``torch.mean``."""
    x = x if dtype is None else x.astype(jax_dtype(dtype))
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise RuntimeError(f"mean: expected floats or complex numbers, got {x.dtype}; convert them by .float()")
    if _is_last(dim, x):
        return _with_kept_dim(ops.row_sum(x) / x.shape[-1], keepdim).astype(x.dtype)
    return jnp.mean(x, _dims(dim) if x.ndim else None, keepdims=keepdim)


def _with_kept_dim(x: jax.Array, keepdim: bool) -> jax.Array:
    return x[..., None] if keepdim else x


def _softmax(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    """Computes ``torch.softmax``.

    The third argument is a dtype; for the inner operator it is a bool: whether half becomes float.
    """
    if dtype is True:
        x = x.astype(jnp.float32)
    elif dtype is not None and dtype is not False:
        x = x.astype(jax_dtype(dtype))
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise RuntimeError(f"softmax: expected floats, got {x.dtype}; convert them by .float()")
    # Scores [batch, heads, query, key] are left to XLA, which fuses the parts; rows of a router's are few and short.
    if _is_last(dim, x) and x.ndim == 2:
        return ops.softmax(x)
    return jax.nn.softmax(x.astype(accumulator(x.dtype)), dim).astype(x.dtype) if x.ndim else jnp.ones_like(x)


def _layer_norm(
    x: jax.Array,
    normalized_shape: Sequence[int],
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes ``torch.native_layer_norm``: result, means, reciprocal deviations."""
    size = len(normalized_shape)
    rows = x.reshape(*x.shape[: x.ndim - size], math.prod(normalized_shape))
    weight, bias = (None if array is None else array.reshape(-1) for array in (weight, bias))
    out, mean, scale = ops.layer_norm(rows, weight, bias, eps)
    reduced_shape = (*x.shape[: x.ndim - size], *[1] * size)
    kept = x.dtype if weight is None or weight.dtype == x.dtype else mean.dtype
    mean, scale = (each.reshape(reduced_shape).astype(kept) for each in (mean, scale))
    return out.reshape(x.shape), mean, scale
