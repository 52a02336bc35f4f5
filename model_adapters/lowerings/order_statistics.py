"""Lowerings of medians, modes, smallest and cumulative largest elements, exact for integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from model_adapters import ops
from model_adapters.bridge.views import get_lowering, set_lowering
from model_adapters.errors import InvalidArgumentError
from model_adapters.lowerings.integers import long_dtype
from model_adapters.lowerings.torchax_fixes import _ordered_integers


def install() -> None:
    """Registers the lowerings in torchax's table."""
    aten = torch.ops.aten
    set_lowering(aten.topk, _topk(get_lowering(aten.topk)))
    set_lowering(aten.mode, _mode(get_lowering(aten.mode)))
    set_lowering(aten.kthvalue, _kthvalue)
    set_lowering(aten.cummax, _cumulative_extreme(lambda x, before: x >= before))
    set_lowering(aten.cummin, _cumulative_extreme(lambda x, before: x <= before))
    set_lowering(aten.median, lambda x, dim=None, keepdim=False: _median(x, dim, keepdim, skips_nan=False))
    set_lowering(aten.nanmedian, lambda x, dim=None, keepdim=False: _median(x, dim, keepdim, skips_nan=True))
    for function in (torch.cov, torch.Tensor.cov, aten.cov):
        set_lowering(function, _cov)


def _cov(
    x: jax.Array, *, correction: int = 1, fweights: jax.Array | None = None, aweights: jax.Array | None = None
) -> jax.Array:
    """Computes ``torch.cov``, whose weights PyTorch compares with zero."""
    rows = jnp.atleast_2d(x)
    if x.ndim > 2:
        raise InvalidArgumentError(f"cov: expected at most two axes, got the shape {x.shape}")
    given = {"fweights": (fweights, jnp.integer), "aweights": (aweights, jnp.floating)}
    for name, (weights, kind) in given.items():
        if weights is None:
            continue
        if weights.shape != rows.shape[1:] or not jnp.issubdtype(weights.dtype, kind):
            raise InvalidArgumentError(
                f"cov: expected {name} of {'integers' if name == 'fweights' else 'floats'} and the shape "
                f"{rows.shape[1:]}, got {weights.dtype} {weights.shape}"
            )
        if not isinstance(weights, jax.core.Tracer) and (np.asarray(weights) < 0).any():
            raise InvalidArgumentError(f"cov: expected {name} of at least 0, got {np.asarray(weights).min()}")
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    rows = rows if jnp.issubdtype(rows.dtype, jnp.inexact) else rows.astype(jnp.float32)
    num = rows.shape[1] if weights is None else weights.sum()
    if weights is None or aweights is None or correction == 0:
        degrees = num - correction
    else:
        degrees = num - correction * (weights * aweights).sum() / num
    weighted = rows if weights is None else rows * weights
    rows = rows - weighted.sum(1, keepdims=True) / num
    weighted = rows if weights is None else rows * weights
    return (ops.matmul(rows, weighted.conj().T) / jnp.maximum(degrees, 0)).squeeze()


def _topk(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def topk(x: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        if largest or not x.ndim:
            values, places = theirs(x, k, dim, largest, sorted)
            return values, places.astype(long_dtype())
        rows = jnp.moveaxis(x, dim, -1)
        keys = _ordered_integers(rows.astype(jnp.int32) if x.dtype == bool else rows)
        places = jax.lax.top_k(~keys, k)[1]
        taken = jnp.take_along_axis(rows, places, -1)
        return jnp.moveaxis(taken, -1, dim), jnp.moveaxis(places, -1, dim).astype(long_dtype())

    return topk


def _mode(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the lowering of ``torch.mode``, which gives the last place of the value."""

    def mode(x: jax.Array, dim: int = -1, keepdim: bool = False) -> Any:
        if not x.ndim:
            return x, jnp.zeros((), jnp.int32)
        values, _ = theirs(x, dim, True)
        places = x.shape[dim] - 1 - jnp.argmax(jnp.flip(x == values, dim), axis=dim, keepdims=True)
        return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))

    return mode


def _median(x: jax.Array, dim: int | None, keepdim: bool, *, skips_nan: bool) -> Any:
    """Computes ``torch.median`` or ``nanmedian``: the lower middle one, and its place."""
    rows = x.reshape(-1) if dim is None or not x.ndim else jnp.moveaxis(x, dim, -1)
    if dim is None and not x.size:
        return jnp.full((), jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min, x.dtype)
    order = jnp.argsort(rows, -1)
    is_missing = jnp.isnan(rows) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(rows.shape, bool)
    num_missing = is_missing.sum(-1, keepdims=True)
    middle = jnp.maximum(rows.shape[-1] - (num_missing if skips_nan else 0 * num_missing) - 1, 0) // 2
    places = jnp.take_along_axis(order, middle, -1)
    if not skips_nan:
        places = jnp.where(num_missing > 0, jnp.argmax(is_missing, -1, keepdims=True), places)
    values = jnp.take_along_axis(rows, places, -1)
    if dim is None:
        return values[0]
    if not x.ndim:
        return values[0], places[0]
    values, places = (jnp.moveaxis(each, -1, dim) for each in (values, places))
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _kthvalue(x: jax.Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Computes ``torch.kthvalue``: the `k`-th smallest and its place; NaN is the largest."""
    if not x.ndim:
        return x, jnp.zeros((), long_dtype())
    if not 1 <= k <= x.shape[dim]:
        raise IndexError(f"kthvalue: expected k from 1 to {x.shape[dim]}, got {k}")
    places = jax.lax.slice_in_dim(jnp.argsort(x, dim), k - 1, k, axis=dim).astype(long_dtype())
    values = jnp.take_along_axis(x, places, dim)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _cumulative_extreme(replaces: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Returns the lowering of ``cummax`` or ``cummin``: the last of equal ones counts."""

    def cumulative(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
        if not x.ndim:
            return x, jnp.zeros((), long_dtype())

        def later(one: Any, other: Any) -> Any:
            is_taken = replaces(other[0], one[0])
            if jnp.issubdtype(x.dtype, jnp.floating):
                is_taken = jnp.isnan(other[0]) | (~jnp.isnan(one[0]) & is_taken)
            return jax.tree.map(lambda first, second: jnp.where(is_taken, second, first), one, other)

        places = jax.lax.broadcasted_iota(long_dtype(), x.shape, dim % x.ndim)
        found: tuple[jax.Array, jax.Array] = jax.lax.associative_scan(later, (x, places), axis=dim % x.ndim)
        return found

    return cumulative
