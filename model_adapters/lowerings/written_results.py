"""Operators that write their results into tensors: in place, and by ``out=``.

torchax 0.0.13 has a part of them. The others are the operator that returns the result, and a write of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch

from model_adapters.bridge.views import TorchTensor, as_views, default_env, is_view, jax_view, torchax
from model_adapters.errors import UnsupportedModelError
from model_adapters.lowerings import argument_checks, constant_folding

_Dispatch = Callable[..., Any]


def install() -> None:
    """Makes torchax write results where an operator is told to."""
    env = default_env()
    theirs = env.dispatch

    def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kwargs = kwargs or {}
        outputs = {name: value for name, value in kwargs.items() if _is_output(func, name, value)}
        if outputs and any(map(is_view, torch.utils._pytree.tree_leaves((args, kwargs)))):
            argument_checks.check(func, args, kwargs)
            return _into(outputs, func, args, {name: kwargs[name] for name in kwargs.keys() - outputs.keys()})
        try:
            return theirs(func, types, args, kwargs)
        except torchax.tensor.OperatorNotFound:
            is_one = isinstance(func, torch._ops.OpOverload) and constant_folding.writes_in_place(func)
            if not is_one or not isinstance(args[0], TorchTensor):
                raise
            write(args[0], _returned(func, args, kwargs))
            return args[0]

    env.dispatch = dispatch


def write(tensor: Any, value: Any) -> None:
    """Writes `value`, broadcast and in the dtype of `tensor`, into `tensor`."""
    array = jax_view(as_views(value))
    tensor._elem = jnp.broadcast_to(array.astype(jax_view(tensor).dtype), tensor.shape)


@functools.cache
def _output_names(func: Any) -> frozenset[str]:
    """Returns the names of an operator's arguments that it writes results to."""
    return frozenset(each.name for each in func._schema.arguments if each.alias_info is not None and each.is_out)


def _is_output(func: Any, name: str, value: Any) -> bool:
    if isinstance(func, torch._ops.OpOverload):
        return name in _output_names(func)
    return name == "out" and any(is_view(each) for each in (value if isinstance(value, tuple | list) else (value,)))


def _returned(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns what the operator of the same name computes that returns its results."""
    if isinstance(func, torch._ops.OpOverload):
        packet = getattr(torch.ops.aten, func._schema.name.partition("::")[2].removesuffix("_"), None)
        if packet is None:
            raise UnsupportedModelError(
                f"{func.name()} has no lowering to JAX, nor has an operator that returns its result"
            )
        func = packet
    with default_env():
        return func(*args, **kwargs)


def _into(outputs: dict[str, Any], func: Any, args: Any, kwargs: Any) -> Any:
    """Computes `func` into tensors, and returns them."""
    found = _returned(func, args, kwargs)
    results = list(found) if isinstance(found, (tuple, list)) else [found]
    targets = [x for value in outputs.values() for x in (value if isinstance(value, (tuple, list)) else [value])]
    for target, result in zip(targets, results, strict=True):
        if not isinstance(target, TorchTensor) or target.shape != result.shape:
            kind = "a tensor on the host" if not is_view(target) else f"one of shape {tuple(target.shape)}"
            raise UnsupportedModelError(
                f"out= of {getattr(func, '__name__', func)}: expected a tensor of the program of shape "
                f"{tuple(result.shape)}, got {kind}; make it by empty_like of an input"
            )
        write(target, result)
    if not isinstance(found, (tuple, list)):
        return targets[0]
    return type(found)(*targets) if hasattr(found, "_fields") else type(found)(targets)
