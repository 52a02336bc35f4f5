"""Lists called operators that have no lowering to JAX, names lines, takes a user's own."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model_adapters.bridge.views import default_env, set_lowering
from model_adapters.errors import InvalidArgumentError
from model_adapters.lowerings.install import install

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Folders whose lines are left out: what calls them is shown."""

_PACKAGES = frozenset(
    {"torch", "jax", "torchax", "model_adapters", "torchax_serve", "numpy", "contextlib", "functools"}
)
"""Packages whose lines are left out of errors."""

_OF_FUNCTIONS = (
    "aten._scaled_dot_product",
    "aten._native_multi_head",
    "aten._fused",
    "aten._pack_padded",
    "aten._pad_packed",
    "aten.mkldnn_rnn_layer",
    "prim.",
)
"""Operators that PyTorch makes of functions which are lowered themselves."""


def missing_operators(call: Callable[[], Any]) -> list[str]:
    """Returns the operators of a call that have no lowering, each with file and line.

    Args:
        call: Runs the code in PyTorch, on the host.
    """
    install()
    recorder = _Recorder()
    with torch.no_grad(), recorder:
        call()
    return [f"{name} ({place})" for name, place in recorder.found.items()]


class _Recorder(TorchDispatchMode):
    """Notes operators without a lowering, and where they are called first."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (has_lowering(func) or str(func).startswith(_OF_FUNCTIONS)):
            self.found.setdefault(str(func.overloadpacket).replace(".", "::"), _place())
        return func(*args, **(kwargs or {}))


def has_lowering(func: Any) -> bool:
    """Returns whether an overload is lowered, itself or as operators that it is made of."""
    env = default_env()
    packet = func.overloadpacket
    known = [func, packet]
    if func._schema.is_mutable and str(packet).endswith("_"):  # the functional one, and a write
        namespace, _, name = str(packet).rpartition(".")
        known.append(getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None))
    return any(each in table for table in (env._ops, env._decomps) for each in known)


def _place() -> str:
    """Returns file and line of the frame that is no library's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def line_of(error: BaseException) -> str:
    """Returns file and line of the last frame of an error that is in no library's code."""
    found = "no line of its own"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _PACKAGES:
            found = f"{Path(frame.f_code.co_filename).name}:{line}"
    return found


def lower(operator: Any) -> Callable[[_Function], _Function]:
    """Returns a decorator that makes a function of JAX arrays the lowering of a torch operator.

    >>> @lower("my::scaled")                    # registered by torch.library
    ... def scaled(x, factor):
    ...     return x * factor

    Args:
        operator: Name of the operator, "namespace::name", or the operator itself, such as ``torch.ops.my.scaled``.

    Raises:
        InvalidArgumentError: PyTorch knows no such operator.
    """
    install()
    found = operator
    if isinstance(operator, str):
        namespace, _, name = operator.partition("::")
        found = getattr(getattr(torch.ops, namespace), name, None) if namespace and name else None
    if isinstance(found, torch._ops.OpOverload):
        found = found.overloadpacket
    if not isinstance(found, torch._ops.OpOverloadPacket):
        raise InvalidArgumentError(
            f"operator: expected the name of one of PyTorch, such as 'my::scaled', got {operator!r}; register it by "
            "torch.library first"
        )

    def decorate(function: _Function) -> _Function:
        set_lowering(found, function)
        for overload in found.overloads():
            set_lowering(getattr(found, overload), function)
        return function

    return decorate
