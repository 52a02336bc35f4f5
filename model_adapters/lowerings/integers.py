"""Lowerings of exact arithmetic: of integers, remainders and signs.

torchax 0.0.13 computes it in float32 or in a narrow dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from model_adapters.bridge.views import get_lowering, set_lowering
from model_adapters.errors import UnsupportedModelError
from model_adapters.lowerings.index_checks import check_known
from model_adapters.lowerings.narrow_floats import in_float32
from model_adapters.lowerings.reductions import jax_dtype

_OF_FLOATS = """
sigmoid rsqrt erf erfc erfinv exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh asin acos atan asinh
acosh atanh i0 special_i0e special_i1 special_i1e special_ndtri reciprocal
"""
"""Operators that make floats of integers."""


def install() -> None:
    """Registers the lowerings in torchax's table."""
    aten = torch.ops.aten
    set_lowering(aten.div, _div(get_lowering(aten.div)))
    for overload in (aten.add.Tensor, aten.add.Scalar):
        set_lowering(overload, _add(get_lowering(overload)), keep_kind=True)
    for operator in (aten.scatter_add, aten.scatter_reduce):
        set_lowering(operator, _of_sums(str(operator).split(".")[1], get_lowering(operator)))
    set_lowering(aten.pow, _pow(get_lowering(aten.pow)))
    set_lowering(aten.fmod, _fmod)
    for operator in (aten.remainder, aten.floor_divide):
        set_lowering(operator, _of_divisors(str(operator).split(".")[1], get_lowering(operator)))
    signed: tuple[Any, ...] = (aten.sub.Tensor, aten.sub.Scalar, aten.neg)
    for each in signed:
        set_lowering(each, _of_signs(get_lowering(each)), keep_kind=True)
    set_lowering(aten.cumsum, _cumulative(jnp.cumsum))
    set_lowering(aten.cumprod, _cumulative(jnp.cumprod))
    set_lowering(aten.prod, _prod(get_lowering(aten.prod)))
    set_lowering(aten.any, _any(get_lowering(aten.any)))
    for operators, function in (
        ((aten.__and__, aten.bitwise_and), jnp.bitwise_and),
        ((aten.__or__, aten.bitwise_or), jnp.bitwise_or),
        ((aten.__xor__, aten.bitwise_xor), jnp.bitwise_xor),
    ):
        for operator in operators:
            set_lowering(operator, function)
    for name in _OF_FLOATS.split():
        set_lowering(getattr(aten, name), _of_floats(get_lowering(getattr(aten, name))))
    for operator in (aten.lgamma, aten.logit):
        set_lowering(operator, _in_own_dtype(get_lowering(operator)))
    for operator in (aten.sign, aten.sgn):
        set_lowering(operator, _sign)
    set_lowering(aten.copysign, _copysign)


def is_integer(x: Any) -> bool:
    """Tells whether `x`, an array or a number, is of integers or truth values."""
    if isinstance(x, bool | int):
        return True
    return hasattr(x, "dtype") and (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool)


def long_dtype() -> Any:
    """Returns the dtype that stands for int64."""
    return jax_dtype(torch.int64)


def _both(x: Any, y: Any) -> tuple[jax.Array, jax.Array]:
    """Returns both operands as arrays of one shape and dtype."""
    dtype = jnp.result_type(x, y)
    first, second = jnp.broadcast_arrays(jnp.asarray(x, dtype), jnp.asarray(y, dtype))
    return first, second


def _div(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def div(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
        if rounding_mode is None or not (is_integer(x) and is_integer(y)):
            return theirs(x, y, rounding_mode or "")
        _check_divisor("div", y)
        first, second = _both(x, y)
        return jnp.floor_divide(first, second) if rounding_mode == "floor" else jax.lax.div(first, second)

    return div


def _check_divisor(operator: str, y: Any) -> None:
    """Raises ZeroDivisionError if a known integer divisor is 0, as PyTorch does."""
    if is_integer(y) and not isinstance(y, jax.core.Tracer):
        is_here = not isinstance(y, jax.Array) or y.is_fully_addressable
        if is_here and not np.all(np.asarray(y)):
            raise ZeroDivisionError(f"{operator}: expected integers other than 0 as divisors")


def _of_divisors(operator: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    def divided(x: Any, y: Any) -> Any:
        if is_integer(x):
            _check_divisor(operator, y)
        return theirs(x, y)

    return divided


def _of_signs(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the lowering of a difference; PyTorch has none of truth values."""

    def computed(x: Any, *args: Any, **kwargs: Any) -> Any:
        if is_bool(x) or any(is_bool(each) and hasattr(each, "dtype") for each in args):
            raise RuntimeError("sub and neg: expected numbers, got truth values; use ^ or logical_not")
        return theirs(x, *args, **kwargs)

    return computed


def is_bool(x: Any) -> bool:
    """Tells whether `x`, an array or a number, is of truth values."""
    return isinstance(x, bool) or (hasattr(x, "dtype") and x.dtype == bool)


def _add(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the lowering of a sum; that of truth values is one."""

    def add(x: Any, y: Any, *, alpha: Any = 1) -> Any:
        if is_bool(x) and is_bool(y):
            return x | y if alpha else x | False
        return theirs(x, y, alpha=alpha)

    return add


def _of_sums(operator: str, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the lowering of ``scatter_add`` or ``scatter_reduce``.

    Of truth values they are those of integers.
    """

    def scattered(x: jax.Array, dim: int, index: jax.Array, src: jax.Array, *args: Any, **kwargs: Any) -> Any:
        check_known(operator, x.shape[dim] if x.ndim else 1, index)
        if is_bool(x):
            return theirs(x.astype(jnp.int32), dim, index, src.astype(jnp.int32), *args, **kwargs) != 0
        return in_float32(theirs)(x, dim, index, src, *args, **kwargs)

    return scattered


def _fmod(x: Any, y: Any) -> jax.Array:
    """Computes ``torch.fmod``, exactly."""
    if is_integer(x):
        _check_divisor("fmod", y)
    return jax.lax.rem(*_both(x, y))


def _pow(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def power(x: Any, y: Any) -> Any:
        if not (is_integer(x) and is_integer(y)):
            return theirs(x, y)
        if not hasattr(y, "dtype"):
            if y < 0:
                raise UnsupportedModelError(f"pow: expected an exponent of at least 0 for integers, got {y}")
            return jax.lax.integer_pow(jnp.asarray(x, jnp.result_type(x, int(y))), int(y))
        base, exponent = _both(x, y)
        if base.dtype == bool:
            return base | ~exponent
        powers = jnp.power(base, jnp.maximum(exponent, 0))
        of_parts = jnp.where(base == 1, 1, jnp.where(base + 1 == 0, jnp.where(exponent % 2 == 0, 1, -1), 0))
        return jnp.where(exponent < 0, of_parts.astype(base.dtype), powers)

    return power


def _cumulative(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the lowering of a cumulative sum or product; integers become int64."""

    def cumulative(x: jax.Array, dim: int, *, dtype: Any = None) -> Any:
        own = long_dtype() if is_integer(x) else x.dtype
        x = x.astype(own if dtype is None else jax_dtype(dtype))
        return in_float32(function)(x, dim) if x.ndim else x

    return cumulative


def _prod(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the lowering of a product; of integers it is int64."""

    def prod(x: jax.Array, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        own = long_dtype() if is_integer(x) else x.dtype
        return in_float32(theirs)(x.astype(own if dtype is None else jax_dtype(dtype)), dim, keepdim)

    return prod


def _any(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def has_any(x: jax.Array, dim: Any = None, keepdim: bool = False) -> Any:
        dims = tuple(dim) if isinstance(dim, list | tuple) else dim
        found = theirs(x, dims, keepdim)
        return found.astype(x.dtype) if x.dtype == jnp.uint8 else found

    return has_any


def _of_floats(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a lowering that takes integers of all widths and truth values."""
    return lambda x: theirs(x.astype(jnp.float32) if is_integer(x) else x)


def _in_own_dtype(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a lowering whose results have the dtype of its operand."""

    def computed(x: jax.Array, *args: Any, **kwargs: Any) -> Any:
        found = theirs(x.astype(jnp.float32), *args, **kwargs)
        return found if is_integer(x) else found.astype(x.dtype)

    return computed


def _sign(x: jax.Array) -> jax.Array:
    """Computes ``torch.sign`` and ``torch.sgn``; NaN has the sign 0."""
    if is_bool(x):
        return x
    return jnp.sign(x) if is_integer(x) else jnp.where(jnp.isnan(x), 0, jnp.sign(x)).astype(x.dtype)


def _copysign(x: jax.Array, y: Any) -> jax.Array:
    """Computes ``torch.copysign``, also of a number's sign."""
    if is_integer(x) and is_integer(y):
        x = x.astype(jnp.float32)
    first, second = _both(x, y)
    return jnp.copysign(first, second)
