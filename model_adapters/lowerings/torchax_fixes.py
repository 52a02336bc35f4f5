"""Fixes of operators that torchax 0.0.13 lowers badly."""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.bridge.views import (
    TorchTensor,
    TorchView,
    default_env,
    get_lowering,
    jax_view,
    set_lowering,
    torch_view,
)
from model_adapters.lowerings import constant_folding


def _mend_copy() -> None:
    """Fixes ``tensor.copy_(view)``.

    torchax 0.0.13 reads the array of the view under an attribute that only tensors have.
    """
    theirs = get_lowering(torch.ops.aten.copy_)

    def copy(x: torch.Tensor, y: torch.Tensor, memory_format: Any = None, env: Any = None) -> torch.Tensor:
        return theirs(x, torch_view(jax_view(y)) if isinstance(y, TorchView) else y, memory_format, env)

    set_lowering(torch.ops.aten.copy_, copy, keep_kind=True)


def _mend_type_as() -> None:
    """Fixes ``tensor.type_as(other)``.

    torchax 0.0.13 changes the tensor itself, and fails for a view.
    """

    def type_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.to(other.dtype)

    TorchTensor.type_as = type_as
    TorchView.type_as = type_as


def _stay_on_device() -> None:
    """Ignores the device in ``tensor.to("cpu")`` of a traced tensor: a program has only one."""
    env = default_env()
    theirs = env._to_copy

    def to_copy(x: torch.Tensor, dtype: Any, device: Any) -> torch.Tensor:
        return theirs(x, dtype, None if constant_folding.is_traced(x) else device)

    env._to_copy = to_copy
    set_lowering(torch.Tensor.cpu, lambda x, *args, **kwargs: x)


def _write_through_views() -> None:
    """Fixes in-place operators on views, such as ``x[1:].masked_fill_(…)``.

    If torchax 0.0.13 decomposes such an operator, it writes into a copy of the view, and the result is lost.
    """
    env = default_env()
    theirs = env.dispatch

    def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        target = args[0] if args else None
        if (
            not isinstance(target, TorchView)
            or not constant_folding.writes_in_place(func)
            or constant_folding.is_assignment(func)
        ):
            return theirs(func, types, args, kwargs)
        if env._get_op_or_decomp(func).is_view_op:
            return theirs(func, types, args, kwargs)
        tensor = target.torch()
        theirs(func, types, (tensor, *args[1:]), kwargs)
        target.update(tensor)
        return target

    env.dispatch = dispatch
