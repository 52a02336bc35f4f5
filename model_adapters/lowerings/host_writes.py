"""Writes of computed values into tensors that a forward makes on the host.

Model code that names no device makes tensors on the host (``out = torch.zeros(2, 3)``), and PyTorch computes with them
while the program is made. Where values of the program are written into such a tensor, it becomes a torch view of the
array that it has then, under the same name in the model's code. A tensor from outside of the forward stays: it would
keep values of one call for the next.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.extend
import torch
from torch.utils._mode_utils import no_dispatch

from model_adapters.bridge.views import TorchTensor, as_views, default_env, forward_number, is_view
from model_adapters.errors import UnsupportedModelError
from model_adapters.lowerings import aliases, constant_folding

_BASE: Any = torch.Tensor._base
_MADE = "_torchax_serve_made"
"""The attribute of a tensor on the host that says which trace of which forward has made it."""


def install() -> None:
    """Makes tensors on the host torch views when something of the program is written into them."""
    env = default_env()
    theirs = env.dispatch

    def dispatch(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        targets = [each for each in _written(func, args, kwargs or {}) if type(each) is torch.Tensor]
        if targets and any(map(is_view, torch.utils._pytree.tree_leaves((args, kwargs)))):
            for target in targets:
                _become_view(target, func)
            if func is torch.Tensor.__setitem__:  # which torch views have as a method of their own
                return args[0].__setitem__(*args[1:])
        result = theirs(func, types, args, kwargs)
        if type(result) is torch.Tensor and not targets:
            _note(result)
        return result

    env.dispatch = dispatch


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns the arguments that `func` writes its results to."""
    found = [kwargs[name] for name in _output_names(func) if name in kwargs]
    found = [each for value in found for each in (value if isinstance(value, tuple | list) else (value,))]
    return [*args[:1], *found] if args and constant_folding.writes_in_place(func) else found


@functools.cache
def _output_names(func: Any) -> tuple[str, ...]:
    if not isinstance(func, torch._ops.OpOverload):
        return ("out",)
    return tuple(each.name for each in func._schema.arguments if each.alias_info is not None and each.is_out)


def _note(tensor: torch.Tensor) -> None:
    """Remembers that a tensor is made now, unless it is a view of another."""
    with no_dispatch(), torch._C.DisableTorchFunction():
        if not tensor._is_view() and not hasattr(tensor, _MADE) and _num_holders(tensor) == 1:
            setattr(tensor, _MADE, _now())


def _now() -> Any:
    return forward_number(), jax.extend.core.get_opaque_trace_state(convention="flax")


def _num_holders(tensor: torch.Tensor) -> int:
    """Returns how many tensors share the memory of `tensor`, itself included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1


def _become_view(tensor: torch.Tensor, func: Any) -> None:
    """Makes `tensor`, and what it is a view of, torch views of the arrays that they have."""
    with no_dispatch(), torch._C.DisableTorchFunction():
        viewed = _BASE.__get__(tensor)
        base = tensor if viewed is None else viewed
        is_known = getattr(base, _MADE, None) == _now() and _num_holders(tensor) == 1 + (base is not tensor)
        place = tensor.size(), tensor.stride(), tensor.storage_offset()
        is_in_order = base.is_contiguous() and not base.requires_grad
    if not is_known or not is_in_order:
        raise UnsupportedModelError(
            "the model's code writes computed values into a tensor on the host "
            f"({getattr(func, '__name__', func)}): expected one that the same forward made, in C order and without "
            "other views of it; make it on the device of the inputs, as by new_zeros"
        )
    _exchange(base, as_views(base))
    if base is not tensor:
        with default_env():
            part = base.as_strided(*place)
        _exchange(tensor, part)


def _exchange(tensor: Any, view: Any) -> None:
    """Makes `tensor` what `view` is; `view` is not used again."""
    with no_dispatch(), torch._C.DisableTorchFunction():
        tensor.__class__ = TorchTensor
        vars(tensor).clear()
        vars(tensor).update(_env=view._env, _array=view._array)
        torch._C._swap_tensor_impl(tensor, view)
    aliases.moved(tensor, view)
