"""PyTorch's rule for operands without axes: they do not widen the others' dtype.

``torch.ones(4, dtype=torch.bfloat16) + torch.tensor(0.1)`` is bfloat16 for PyTorch, and float32 for JAX.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.bridge.views import TorchTensor, as_views, default_env
from model_adapters.errors import OperatorArgumentError, UnsupportedModelError

_NAMES = """
add sub rsub mul div true_divide floor_divide remainder fmod pow maximum minimum fmax fmin where clamp clamp_min
clamp_max atan2 hypot logaddexp logaddexp2 xlogy addcmul addcdiv lerp copysign bitwise_and bitwise_or bitwise_xor
eq ne lt le gt ge
"""
_ELEMENTWISE = frozenset(
    getattr(packet, overload)
    for packet in (getattr(torch.ops.aten, name) for name in _NAMES.split())
    for overload in packet.overloads()
)
"""Operators of several operands that are computed in one dtype."""
_IN_PLACE = frozenset(
    getattr(packet, overload)
    for packet in (getattr(torch.ops.aten, name) for name in ("add_", "sub_", "mul_", "div_", "remainder_", "fmod_"))
    for overload in packet.overloads()
)
"""Operators that write into their first operand, which holds results of no higher kind."""
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def install() -> None:
    """Makes torchax give operands without axes the dtype of the others."""
    env = default_env()
    theirs = env.dispatch

    def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in _ELEMENTWISE and any(isinstance(x, torch.Tensor) and not x.ndim for x in args):
            args = _narrowed(args, func is torch.ops.aten.where.self)
        if func in _IN_PLACE:
            _check_kind(func, args, kwargs or {})
        try:
            return theirs(func, types, args, kwargs)
        except OverflowError as error:  # a number that PyTorch wraps around, or has in 64 bits
            name = getattr(func, "__name__", str(func)).partition(".")[0]
            raise UnsupportedModelError(f"{name}: expected a number that its tensors' dtype holds: {error}") from None

    env.dispatch = dispatch


def _check_kind(func: Any, args: Any, kwargs: Any) -> None:
    """Raises OperatorArgumentError if an operand is of a higher kind than what is written to."""
    target = args[0].dtype
    own = _kind_of(target)
    is_quotient = func.name().startswith("aten::div_") and kwargs.get("rounding_mode") is None
    highest = max(2 if is_quotient else 0, *map(_kind_of, args))
    if own < highest:
        name = func.name().partition("::")[2].partition(".")[0]
        raise OperatorArgumentError(
            f"{name}: expected operands that a tensor of {target} holds, got a higher kind; leave out the underscore"
        )


def _kind_of(value: Any) -> int:
    """Returns the place in `_KINDS` of a tensor, a dtype of PyTorch or a number."""
    if isinstance(value, torch.Tensor):
        value = value.dtype
    if isinstance(value, torch.dtype):
        return 3 if value.is_complex else 2 if value.is_floating_point else int(value != torch.bool)
    return {bool: 0, int: 1, float: 2, complex: 3}.get(type(value), 0)


def _kind(dtype: Any) -> int:
    return max(place for place, kind in enumerate(_KINDS) if place == 0 or jnp.issubdtype(dtype, kind))


def _narrowed(args: Any, has_condition: bool) -> Any:
    """Returns operands of which those without axes have the dtype of the others.

    They keep their own where it is of a higher kind.
    """
    first = 1 if has_condition else 0
    operands = [x for x in args[first:] if isinstance(x, torch.Tensor)]
    if all(x.ndim for x in operands) or not any(x.ndim for x in operands):
        return args
    if not any(isinstance(x, TorchTensor) for x in operands):  # masks that transformers computes on the host stay there
        return args
    views = as_views(tuple(args))
    arrays = [x._elem for x in views[first:] if isinstance(x, TorchTensor)]
    wanted = jnp.result_type(*(x.dtype for x in arrays if x.ndim))

    def narrowed(x: Any) -> Any:
        if not isinstance(x, TorchTensor) or x.ndim or x._elem.dtype == wanted or _kind(x._elem.dtype) > _kind(wanted):
            return x
        with jax.ensure_compile_time_eval():  # a known value stays one
            return TorchTensor(x._elem.astype(wanted), default_env())

    return (*views[:first], *map(narrowed, views[first:]))
