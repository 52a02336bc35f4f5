"""Forward hooks that a script has set on submodules of a model.

Such a hook is Python code that runs at every call. A compiled program would run it once, while it is traced. With such
a hook the forward therefore runs operator by operator, and the hook gets PyTorch tensors with values on the CPU, as in
eager PyTorch. Its results take effect, and so do its writes into its arguments.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
from torch.nn.modules import module as torch_module
from torch.utils import _pytree

from model_adapters.bridge.views import as_views, is_view, jax_view, outside_torch_mode, to_torch_tensor

Hook = Callable[..., Any]
Tables = list[tuple[dict[str, Any], dict[str, Any]]]
# Packages whose hooks only compute, so that they may be traced.
_PURE = ("torch.", "transformers.", "accelerate.")
_TABLES = ("_forward_pre_hooks", "_forward_hooks")


class HookError(BaseException):
    """An exception of a script's hook (`error`), carried past code that retries a call."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _is_scripts(hook: Hook) -> bool:
    function: Any = hook
    while isinstance(function, functools.partial):
        function = function.func
    home = getattr(function, "__module__", None) or type(function).__module__
    return not f"{home}.".startswith(_PURE)


def has_hooks(module: torch.nn.Module) -> bool:
    """Tells whether `module` itself has a hook that a script has set."""
    return any(_is_scripts(hook) for table in _TABLES for hook in vars(module)[table].values())


def hooked_parts(module: torch.nn.Module) -> tuple[str, ...]:
    """Returns names of the parts of `module` with hooks that a script has set."""
    return tuple(name for name, child in module.named_modules() if name and has_hooks(child))


def has_global_hooks() -> bool:
    """Tells whether a script has set a hook on all modules of the process."""
    tables = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
    return any(_is_scripts(hook) for table in tables for hook in table.values())


@contextlib.contextmanager
def on_torch_tensors(module: torch.nn.Module) -> Iterator[None]:
    """Gives hooks of scripts on submodules of `module` PyTorch tensors as arguments.

    The hooks are not called while JAX traces. To be entered while the module has its own tensors, which a hook then
    reads.
    """
    replaced: list[tuple[dict[int, Any], int, Hook]] = []
    own = {child: _tables_of(child) for child in module.modules()}
    try:
        for child in module.modules():
            for table in _TABLES:
                hooks = vars(child)[table]
                for key, hook in list(hooks.items()):
                    if child is not module and _is_scripts(hook):
                        replaced.append((hooks, key, hook))
                        hooks[key] = functools.partial(_call, hook, own)
        yield
    finally:
        for hooks, key, hook in replaced:
            if key in hooks:  # otherwise it has removed itself
                hooks[key] = hook


@contextlib.contextmanager
def errors_of_hooks() -> Iterator[None]:
    """Raises an exception of a hook unchanged, past code that would retry the call."""
    try:
        yield
    except HookError as carried:
        raise carried.error from None


def _call(hook: Hook, own: dict[torch.nn.Module, Tables], module: torch.nn.Module, *args: Any) -> Any:
    """Calls `hook` of `module` on PyTorch tensors, and applies its writes and results.

    The tensors replace the views of arrays among the arguments.
    """
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of a view: the view, and a tensor with its values
    views = [leaf for leaf in _pytree.tree_leaves(args) if is_view(leaf)]
    if any(isinstance(jax_view(view), jax.core.Tracer) for view in views):
        return None
    for view in views:
        if id(view) not in pairs:
            pairs[id(view)] = view, _as_in_torch(to_torch_tensor(jax_view(view)))
    given = _pytree.tree_map(lambda leaf: pairs[id(leaf)][1] if id(leaf) in pairs else leaf, args)
    versions = {key: tensor._version for key, (_, tensor) in pairs.items()}
    try:
        with outside_torch_mode(), _with_own_tensors(module, own), torch.no_grad():
            result = hook(module, *given)
    except Exception as error:
        raise HookError(error) from error
    for key, (view, tensor) in pairs.items():
        if tensor._version != versions[key]:
            view.copy_(as_views(tensor))  # also visible where else it is used, such as in a residual connection
    originals = {id(tensor): view for view, tensor in pairs.values()}
    return _pytree.tree_map_only(
        torch.Tensor, lambda t: originals[id(t)] if id(t) in originals else as_views(t), result
    )


def _as_in_torch(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor` with int64 in place of int32, to which JAX narrows integers."""
    return tensor.long() if tensor.dtype == torch.int32 else tensor


def _tables_of(child: torch.nn.Module) -> Tables:
    """Returns the dicts in which `child` has tensors, each with a copy."""
    return [(table, dict(table)) for table in (child._parameters, child._buffers)]


@contextlib.contextmanager
def _with_own_tensors(module: torch.nn.Module, own: dict[torch.nn.Module, Tables]) -> Iterator[None]:
    """Restores the own tensors of `module` and its submodules, which a call has replaced."""
    tables = [pair for child in module.modules() for pair in own.get(child, [])]
    exchanged = [(table, dict(table)) for table, _ in tables]
    try:
        for table, before in tables:
            table.update(before)
        yield
    finally:
        for table, before in exchanged:
            table.update(before)
