"""Names of modules on the operations of a program, for profiles.

XLA stores with each instruction the scopes (`jax.named_scope`) that it was traced in. Inside of `enabled` each module's
forward is traced in a scope of the module's name, ``model/layers/3/mlp/gate_proj``. Programs without scopes stay the
default: tracing them is quicker, as layers of a kind share one traced function, which cannot name each of them.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import torch

from model_adapters.program.trace_context import replaced_methods

_ENABLED: ContextVar[bool] = ContextVar("modules are named", default=False)
_TRANSFORMED = re.compile(r"(?:vmap|jvp|transpose|checkpoint|rematted_computation|shard_map)\((.*)\)")
"""What JAX writes around the first scope inside of a transformation."""


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Names modules in programs that are traced inside the context, on this thread."""
    token = _ENABLED.set(True)
    try:
        yield
    finally:
        _ENABLED.reset(token)


def intercepted(module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Traces the forward of each part of `module` in a scope of its name, if enabled."""
    if not _ENABLED.get():
        return contextlib.nullcontext()
    open_names: list[str] = [""]  # of the modules that are being called, the innermost last
    return replaced_methods(
        (child, "forward", _scoped(name, child.forward, open_names)) for name, child in module.named_modules() if name
    )


def _scoped(name: str, forward: Callable[..., Any], open_names: list[str]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def scoped(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A part of the open module is named from there on: scopes stand behind each other.
        scope = name.removeprefix(f"{open_names[-1]}.").replace(".", "/")
        open_names.append(name)
        try:
            with jax.named_scope(scope):
                return forward(*args, **kwargs)
        finally:
            open_names.pop()

    return scoped


def module_of(scopes: str, names: Collection[str]) -> str:
    """Returns the innermost module that an instruction was traced in; "" for the model itself.

    Args:
        scopes: The instruction's scopes and primitive, ``jit(run)/model/layers/3/mlp/mul``.
        names: Names of all modules, such as ``model.layers.3.mlp``.
    """
    parts = [_unwrapped(part) for part in scopes.split("/")[:-1]]
    for end in range(len(parts), 0, -1):
        for begin in range(end):
            if (name := ".".join(parts[begin:end])) in names:
                return name
    return ""


def _unwrapped(part: str) -> str:
    while (found := _TRANSFORMED.fullmatch(part)) is not None:
        part = found[1]
    return part
