"""Tensors that model code leaves on its own modules while it is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
