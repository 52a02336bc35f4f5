"""Lowerings of pooling by maxima with indices, adaptive or not, and its gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from model_adapters.bridge.views import get_lowering, set_lowering

_Windows = list[tuple[np.ndarray, np.ndarray]]
"""Of each axis, the places in its windows, int[out, size], and which of them are inside of the array."""


def install() -> None:
    """Registers the lowerings in torchax's table."""
    aten = torch.ops.aten
    for operator in (aten.max_pool2d_with_indices, aten.max_pool3d_with_indices):
        set_lowering(operator, functools.partial(_max_pool, get_lowering(operator)))
    set_lowering(aten.max_pool2d_with_indices_backward, functools.partial(_backward, 2))
    set_lowering(aten.max_pool3d_with_indices_backward, functools.partial(_backward, 3))
    set_lowering(aten.adaptive_max_pool2d_backward, functools.partial(_backward, 2))
    set_lowering(aten.adaptive_max_pool3d_backward, functools.partial(_backward, 3))
    for operator in (aten.adaptive_max_pool2d, aten.adaptive_max_pool3d):
        set_lowering(operator, _adaptive_max_pool)


def _each(value: Any, count: int) -> list[int]:
    values = list(value) if isinstance(value, Sequence) else [value]
    return values * count if len(values) == 1 else values


def _max_pool(
    theirs: Callable[..., Any],
    x: jax.Array,
    kernel_size: Sequence[int],
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes maxima of windows and the places of the first of them."""
    axes = len(kernel_size)
    sizes, steps, wide = (_each(each, axes) for each in (kernel_size, stride or kernel_size, dilation))
    before = _each(padding, axes)
    values = theirs(x, sizes, steps, before, wide, ceil_mode)[0]
    windows: _Windows = []
    for axis in range(axes):
        length, num = x.shape[axis - axes], values.shape[axis - axes]
        places = np.arange(num)[:, None] * steps[axis] - before[axis] + np.arange(sizes[axis]) * wide[axis]
        windows.append((places, (places >= 0) & (places < length)))
    return values, _first_of_largest(jax.lax.stop_gradient(x), windows)[1]


def _adaptive_max_pool(x: jax.Array, output_size: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Computes maxima of `output_size` windows that cover each axis, and their places."""
    windows: _Windows = []
    for length, num in zip(x.shape[x.ndim - len(output_size) :], output_size, strict=True):
        starts = np.arange(num) * length // num
        ends = -(-(np.arange(1, num + 1) * length) // num)
        places = starts[:, None] + np.arange(int((ends - starts).max(initial=0)))
        windows.append((places, places < ends[:, None]))
    return _first_of_largest(x, windows)


def _first_of_largest(x: jax.Array, windows: _Windows) -> tuple[jax.Array, jax.Array]:
    """Returns the largest elements of windows over the last axes of `x`, and their places.

    Of equal ones the first counts.
    """
    axes = len(windows)
    lengths = x.shape[x.ndim - axes :]
    num_windows, sizes = zip(*(places.shape for places, _ in windows), strict=True)
    all_numbers, all_inside = np.zeros((), int), np.ones((), bool)
    for axis, (places, inside) in enumerate(windows):
        shape = [1] * (2 * axes)
        shape[axis], shape[axes + axis] = places.shape
        all_numbers = all_numbers * lengths[axis] + np.where(inside, places, 0).reshape(shape)
        all_inside = all_inside & inside.reshape(shape)
    numbers, is_inside = (
        np.broadcast_to(each, (*num_windows, *sizes)).reshape(*num_windows, math.prod(sizes))
        for each in (all_numbers, all_inside)
    )
    taken = x.reshape(*x.shape[: x.ndim - axes], -1)[..., numbers]
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    least = -jnp.inf if is_float else jnp.iinfo(x.dtype).min
    ranks = jnp.where(is_inside, taken, least)
    # A window of nothing but the least number has the place of its first element inside of the array.
    is_largest: Any = is_inside & (ranks == ranks.max(-1, keepdims=True))
    if is_float:
        is_missing = is_inside & jnp.isnan(taken)
        is_largest = jnp.where(is_missing.any(-1, keepdims=True), is_missing, is_largest)
    first = jnp.argmax(is_largest, -1)[..., None]
    values = jnp.take_along_axis(taken, first, -1)[..., 0]
    chosen = jnp.take_along_axis(jnp.broadcast_to(numbers, taken.shape), first, -1)[..., 0]
    return values, chosen


def _backward(axes: int, grad: jax.Array, x: jax.Array, *args: Any, indices: Any = None, **kwargs: Any) -> jax.Array:
    """Computes the gradient of `x` from that of maxima over its last `axes`."""
    indices = args[-1] if indices is None else indices
    lead, size = x.shape[: x.ndim - axes], math.prod(x.shape[x.ndim - axes :])
    rows, places = (each.reshape(math.prod(lead), -1) for each in (grad, indices))
    sums = jnp.zeros((math.prod(lead), size), grad.dtype)
    return sums.at[jnp.arange(math.prod(lead))[:, None], places].add(rows).reshape(x.shape)
