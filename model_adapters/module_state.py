"""What changes on a model's modules while it is traced, and is as it was afterwards."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def attributes_restored(module: torch.nn.Module) -> Iterator[list[str]]:
    """Takes tensors that `module` and its parts were given inside away again; yields their names, known at the end.

    Traced tensors mean nothing after the trace.
    """
    before = {child: dict(vars(child)) for child in module.modules()}
    written: list[str] = []
    try:
        yield written
    finally:
        for name, child in module.named_modules():
            for attribute, value in list(vars(child).items()):
                was = before.get(child, {}).get(attribute)  # code may exchange modules, too
                if isinstance(value, torch.Tensor) and was is not value:
                    written.append(f"{name}.{attribute}")
                    vars(child)[attribute] = was


@contextlib.contextmanager
def methods_replaced(replacements: Iterable[tuple[torch.nn.Module, str, Callable[..., Any]]]) -> Iterator[None]:
    """Functions stand in the place of methods inside: of this module, the method of this name, this function."""
    changed: list[tuple[torch.nn.Module, str, Any]] = []
    try:
        for module, method, function in replacements:
            changed.append((module, method, vars(module).get(method)))
            vars(module)[method] = types.MethodType(function, module)
        yield
    finally:
        for module, method, before in reversed(changed):
            vars(module).pop(method, None)
            if before is not None:
                vars(module)[method] = before
