"""Lowerings of operators that torchax 0.0.13 computes otherwise for some arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from model_adapters.bridge.views import DEVICE, default_env, get_lowering, set_lowering
from model_adapters.errors import UnsupportedModelError
from model_adapters.lowerings.narrow_floats import in_float32
from model_adapters.lowerings.reductions import jax_dtype
from model_adapters.ops.linear import accumulator


def install() -> None:
    """Registers the lowerings in torchax's table."""
    set_lowering(torch.ops.aten.polygamma.default, _polygamma)
    set_lowering(torch.ops.aten.digamma, lambda x: _digamma(x if jnp.issubdtype(x.dtype, jnp.inexact) else x * 1.0))
    set_lowering(torch.ops.aten.ldexp, _ldexp)
    set_lowering(torch.ops.aten._safe_softmax, _safe_softmax)
    set_lowering(torch.ops.aten.max_unpool2d, _max_unpool)
    set_lowering(torch.ops.aten.max_unpool3d, _max_unpool)
    for search in (torch.ops.aten.searchsorted.Tensor, torch.ops.aten.searchsorted.Scalar):
        set_lowering(search, _searchsorted)
    set_lowering(torch.ops.aten.as_strided_scatter, _as_strided_scatter)
    for clamp in (torch.ops.aten.clamp.default, torch.ops.aten.clamp.Tensor):
        set_lowering(clamp, _clamp)
    set_lowering(torch.ops.aten.clamp_min, lambda x, min: _clamp(x, min))
    set_lowering(torch.ops.aten.atan2, _atan2)
    for angle in (torch.angle, torch.ops.aten.angle):
        set_lowering(angle, _angle)
    set_lowering(torch.ops.aten.special_erfcx, _erfcx)
    for operator in (torch.ops.aten.igamma, torch.ops.aten.igammac):
        is_upper = operator is torch.ops.aten.igammac
        set_lowering(operator, in_float32(_incomplete_gamma(get_lowering(operator), is_upper=is_upper)))
    set_lowering(torch.ops.aten.special_zeta, _zeta(get_lowering(torch.ops.aten.special_zeta)))
    _group_norm_of_nothing()


def _clamp(x: jax.Array, min: Any = None, max: Any = None) -> jax.Array:
    """Computes ``torch.clamp``; at a bound `x` has all of the gradient, in JAX a half of it."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.clip(x, min, max)
    if min is not None:
        x = jnp.where((x < min) | jnp.isnan(min), min, x)
    return x if max is None else jnp.where((x > max) | jnp.isnan(max), max, x)


def _atan2(y: Any, x: Any) -> jax.Array:
    """Computes ``torch.atan2``, whose gradient is 0 for two zeros, as PyTorch has it."""
    y, x = jnp.asarray(y) * 1.0, jnp.asarray(x) * 1.0
    is_zero = (x == 0) & (y == 0)
    fixed = jax.lax.stop_gradient(jnp.arctan2(y, x))
    return jnp.where(is_zero, fixed, jnp.arctan2(y, jnp.where(is_zero, 1, x)))


def _ldexp(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Computes ``torch.ldexp``: `x` times a power of 2, in float32 and rounded once."""
    dtype = jnp.result_type(x, exponent)
    dtype = dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.dtype(jnp.float32)
    wide = accumulator(dtype)
    return (x.astype(wide) * jnp.exp2(exponent.astype(wide))).astype(dtype)


def _angle(x: jax.Array) -> jax.Array:
    """Computes ``torch.angle``: of a real number 0 or pi; JAX has pi for the negative zero."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.angle(x)
    wide = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
    return jnp.where(jnp.isnan(wide), wide, jnp.where(wide < 0, jnp.pi, 0)).astype(wide.dtype)


def _erfcx(x: jax.Array) -> jax.Array:
    """Computes ``torch.special.erfcx``, for large `x` by its asymptotic series."""
    x = x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
    near, far = jnp.minimum(x, 8), jnp.maximum(x, 8)
    rest = 0.5 / (far * far)
    series = (1 - rest * (1 - 3 * rest * (1 - 5 * rest))) / (far * math.sqrt(math.pi))
    return jnp.where(x > 8, series, jnp.exp(near * near) * jax.lax.erfc(near))


def _incomplete_gamma(theirs: Callable[..., Any], *, is_upper: bool) -> Callable[..., Any]:
    """Returns the lowering of ``torch.igamma`` or ``igammac``.

    At 0 and infinity it has PyTorch's values.
    """
    least, most, sign = (1.0, 0.0, 1.0) if is_upper else (0.0, 1.0, -1.0)

    def computed(a: jax.Array, x: jax.Array) -> jax.Array:
        is_edge = (a <= 0) | (x <= 0) | jnp.isinf(a) | jnp.isinf(x)
        is_wide = (a > 200) & (jnp.abs(x - a) < 4.5 * jnp.sqrt(a)) & ~is_edge  # JAX's loops end too early there
        inner = theirs(jnp.where(is_edge | is_wide, 1.0, a), jnp.where(is_edge | is_wide, 1.0, x))
        wide_a, wide_x = (jnp.where(is_wide, each, 300.0) for each in (a, x))
        inner = jnp.where(is_wide, _of_large_numbers(wide_a, wide_x, sign), inner)
        edge = jnp.where(a == 0, jnp.where(x > 0, most, jnp.nan), jnp.where(x == 0, least, most))
        edge = jnp.where(jnp.isinf(a) & (x != 0), jnp.where(jnp.isinf(x), jnp.nan, least), edge)
        edge = jnp.where((a < 0) | (x < 0), jnp.nan, edge)
        return jnp.where(is_edge, edge, inner).astype(inner.dtype)

    return computed


def _of_large_numbers(a: jax.Array, x: jax.Array, sign: float) -> jax.Array:
    """Returns the incomplete gamma function for `x` near a large `a`, by Temme's series.

    It is the upper one with a `sign` of 1, the lower one with -1.
    """
    mu = (x - a) / a
    small = mu * (1 + mu * (-1 / 3 + mu * (7 / 36 + mu * (-73 / 540 + mu * (1331 / 12960)))))
    far = jnp.where(jnp.abs(mu) < 0.1, 0.5, mu)
    eta = jnp.where(jnp.abs(mu) < 0.1, small, jnp.sign(far) * jnp.sqrt(2 * (far - jnp.log1p(far))))
    rest = -1 / 3 + eta * (1 / 12 + eta * (-2 / 135 + eta / 864))
    rest = rest * jnp.exp(-a * eta * eta / 2) / jnp.sqrt(2 * math.pi * a)
    return 0.5 * jax.lax.erfc(sign * eta * jnp.sqrt(a / 2)) + sign * rest


def _zeta(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the lowering of ``torch.special.zeta``, with PyTorch's values at poles."""

    def zeta(x: Any, q: Any) -> jax.Array:
        x, q = (jnp.asarray(each) * 1.0 for each in (x, q))
        found = theirs(x, q)
        of_infinity = jnp.where(q < 1, jnp.inf, jnp.where(q == 1, 1.0, jnp.nan))
        found = jnp.where(jnp.isposinf(x), of_infinity, found)
        is_pole = (q <= 0) & (q == jnp.floor(q)) & jnp.isfinite(q)
        return jnp.where(x < 1, jnp.nan, jnp.where(is_pole, jnp.inf, found)).astype(found.dtype)

    return zeta


@jax.custom_jvp
def _digamma(x: jax.Array) -> jax.Array:
    """Computes ``torch.digamma``; JAX's derivative of it is another one for negative numbers."""
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x).astype(x.dtype), jax.scipy.special.digamma(x))


@_digamma.defjvp
def _digamma_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    mirrored = jnp.where(x < 0, 1 - x, x)
    slope = jax.scipy.special.polygamma(1, mirrored)
    rest = x - jnp.round(x)  # a period of the sine, in which it is exact
    slope = jnp.where(x < 0, (jnp.pi / jnp.sin(jnp.pi * jnp.where(x < 0, rest, 0.5))) ** 2 - slope, slope)
    return _digamma(x), slope * tangent


def _polygamma(n: int, x: jax.Array) -> jax.Array:
    """Computes ``torch.polygamma`` for `n` of 0; JAX has the others for positive numbers alone."""
    if n:
        raise UnsupportedModelError(f"polygamma: expected n=0, got {n}, which JAX does not have for negative numbers")
    return _digamma(x)


def _safe_softmax(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    """Computes ``torch._safe_softmax``: rows of nothing but -inf are zero."""
    x = x if dtype is None else x.astype(str(dtype).removeprefix("torch."))
    is_hidden = jnp.all(x == -jnp.inf, axis=dim, keepdims=True)
    return jnp.where(is_hidden, 0, jax.nn.softmax(jnp.where(is_hidden, 0, x), axis=dim))


def _max_unpool(
    x: jax.Array, indices: jax.Array, output_size: Sequence[int], stride: Any = None, padding: Any = 0
) -> jax.Array:
    """Computes ``max_unpool2d`` and ``3d`` of `x` [..., *space] by `indices`.

    Where windows overlap, several numbers go to one place: one of them stays, and all have its gradient.
    """
    lead = x.shape[: x.ndim - len(output_size)]
    rows, places = (each.reshape(*lead, -1) for each in (x, indices))
    size = 1
    for length in output_size:
        size *= length
    at = jnp.zeros((*lead, size), x.dtype)
    axes = [jnp.arange(length).reshape(-1, *(1,) * (len(lead) - axis)) for axis, length in enumerate(lead)]
    sums = at.at[(*axes, places)].add(rows)
    kept = at.at[(*axes, places)].set(rows)
    return (sums + jax.lax.stop_gradient(kept - sums)).reshape(*lead, *output_size)


def _as_strided_scatter(
    x: jax.Array, source: jax.Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> jax.Array:
    """Computes ``torch.as_strided_scatter`` into `x`, which is in C order.

    Where the view has an element several times, one number of `source` stays, and all have its gradient.
    """
    places = np.full((1,) * len(size), storage_offset or 0)
    for axis, (length, step) in enumerate(zip(size, stride, strict=True)):
        places = places + (np.arange(length) * step).reshape(-1, *(1,) * (len(size) - axis - 1))
    flat = x.reshape(-1)
    if x.dtype == bool:
        return flat.at[places].set(source).reshape(x.shape)
    kept, sums = flat.at[places].set(source), flat.at[places].set(0).at[places].add(source)
    return (sums + jax.lax.stop_gradient(kept - sums)).reshape(x.shape)


def _searchsorted(
    table: jax.Array,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:
    """Computes ``torch.searchsorted`` of `values` in the rows of `table` [..., n]."""
    wanted: Any = side or ("right" if right else "left")
    dtype: Any = jnp.int32 if out_int32 else jax_dtype(torch.int64)
    values = jnp.asarray(values)
    if sorter is not None:
        table = jnp.take_along_axis(table, sorter, -1)
    if table.ndim == 1:
        return jnp.searchsorted(table, values, side=wanted).astype(dtype)
    if not values.size:
        return jnp.zeros(values.shape, dtype)
    num_rows = values.size // values.shape[-1]
    rows, parts = table.reshape(num_rows, table.shape[-1]), values.reshape(num_rows, values.shape[-1])
    found = jax.vmap(lambda row, part: jnp.searchsorted(row, part, side=wanted))(rows, parts)
    return found.reshape(values.shape).astype(dtype)


def _group_norm_of_nothing() -> None:
    """Gives means and deviations of arrays without elements their shapes."""
    theirs = get_lowering(torch.ops.aten.native_group_norm)

    def group_norm(
        x: jax.Array, weight: Any, bias: Any, num_rows: int, channels: int, size: int, groups: int, eps: float
    ) -> Any:
        if x.size:
            return theirs(x, weight, bias, num_rows, channels, size, groups, eps)
        none = jnp.zeros((num_rows, groups), x.dtype)
        return x, none, none

    set_lowering(torch.ops.aten.native_group_norm, group_norm)


def refuse_autocast() -> None:
    """Makes operators inside of an enabled ``torch.autocast`` an error."""
    env = default_env()
    theirs, is_enabled = env.dispatch, torch.is_autocast_enabled

    def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if is_enabled("cpu") or is_enabled(DEVICE.type):
            raise UnsupportedModelError(
                "torch.autocast: expected code outside of it, since a program on JAX computes in the dtypes of its "
                "tensors; convert them by .to(dtype), or load the model in that dtype"
            )
        return theirs(func, types, args, kwargs)

    env.dispatch = dispatch
