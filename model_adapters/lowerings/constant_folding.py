"""Constant folding in a trace: values that depend only on constants are computed at once.

Under ``jax.jit`` every operation is staged, also one on constants, and its result has no value that Python could read.
Model code for images reads many: it splits features by grids, makes positions and windows of them, and indexes by
boolean masks. While `enabled` is on, an operator none of whose operands is traced runs before the program does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

from model_adapters.bridge.views import TorchTensor, default_env
from model_adapters.once import once

LARGEST_BYTES = 1 << 22
"""The largest size of a result that becomes a constant of the program."""
_OPERATORS = ("add", "sub", "mul", "truediv", "and", "or", "xor")
_ASSIGNMENTS = frozenset({"__setitem__", *(f"__i{name}__" for name in _OPERATORS)})
_OF_SHAPES = frozenset(name for kind in ("zeros", "ones", "full", "empty") for name in (f"{kind}_like", f"new_{kind}"))
"""Operators that read the shape of their first operand, and not its values."""
_STATE = threading.local()
_Dispatch = Callable[..., Any]


def is_enabled() -> bool:
    """Tells whether operators on known values run at once, on this thread."""
    return getattr(_STATE, "depth", 0) > 0


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Runs operators on known values at once, inside the context."""
    _STATE.depth = getattr(_STATE, "depth", 0) + 1
    try:
        yield
    finally:
        _STATE.depth -= 1


@once
def install() -> None:
    """Makes torchax call this module before it runs an operator."""
    env = default_env()
    theirs = env.dispatch

    def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _dispatch(theirs, func, types, args, kwargs or {}) if is_enabled() else theirs(func, types, args, kwargs)

    env.dispatch = dispatch
    TorchTensor.__setitem__ = _assignment(TorchTensor.__setitem__)
    TorchTensor.flatten = _flatten


def _assignment(theirs: Callable[..., None]) -> Callable[..., None]:
    """Returns a function for ``tensor[key] = value``, which bypasses torchax's operator table."""

    def assign(self: torch.Tensor, key: Any, value: Any) -> None:
        tensors = [x for x in torch.utils._pytree.tree_leaves((self, key, value)) if isinstance(x, torch.Tensor)]
        is_known = is_enabled() and not any(is_traced(x) for x in tensors)
        if is_traced_mask(key) and not (isinstance(value, torch.Tensor) and value.ndim):
            mask = key.reshape(*key.shape, *[1] * (self.ndim - key.ndim))
            key, value = (slice(None),) * self.ndim, torch.where(mask, value, self)
        with jax.ensure_compile_time_eval() if is_known else contextlib.nullcontext():
            theirs(self, key, value)

    return assign


def _flatten(self: torch.Tensor, start_dim: int = 0, end_dim: int = -1) -> torch.Tensor:
    """Computes ``tensor.flatten()``, which torchax 0.0.13 does outside of its table, too.

    torchax is wrong there for axes counted from the end.
    """
    return torch.flatten(self, start_dim, end_dim)


def _dispatch(theirs: _Dispatch, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    read = (args[1:], kwargs) if _name(func) in _OF_SHAPES else (args, kwargs)
    tensors = [x for x in torch.utils._pytree.tree_leaves(read) if isinstance(x, torch.Tensor)]
    if any(is_traced(x) for x in tensors):
        return theirs(func, types, args, kwargs)
    with jax.ensure_compile_time_eval():
        result = theirs(func, types, args, kwargs)
    if writes_in_place(func) or all(_num_bytes(x) <= LARGEST_BYTES for x in torch.utils._pytree.tree_leaves(result)):
        return result
    return theirs(func, types, args, kwargs)


def is_traced_mask(key: Any) -> bool:
    """Tells whether `key` is a boolean mask whose values are unknown in the trace.

    The number of its elements that are set is then unknown while the program is made.
    """
    return isinstance(key, torch.Tensor) and key.dtype == torch.bool and key.ndim > 0 and is_traced(key)


def is_traced(x: torch.Tensor) -> bool:
    """Tells whether the values of `x` are unknown while the program is made."""
    return isinstance(x, TorchTensor) and isinstance(x._elem, jax.core.Tracer)


def _num_bytes(x: Any) -> int:
    return x._elem.nbytes if isinstance(x, TorchTensor) else 0


def writes_in_place(func: Any) -> bool:
    """Tells whether the torch function `func` writes into its first argument."""
    name = _name(func)
    return is_assignment(func) or (name.endswith("_") and not name.endswith("__"))


def is_assignment(func: Any) -> bool:
    """Tells whether `func` is one of Python's own: ``x[…] = y``, ``x += y``."""
    return _name(func) in _ASSIGNMENTS


def _name(func: Any) -> str:
    return getattr(func, "__name__", "").partition(".")[0]
