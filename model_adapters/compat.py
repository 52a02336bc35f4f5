"""Makes torchax importable on torch versions newer than its last release.

torchax 0.0.13 names overloads of named tensors (``aten.prod.dim_Dimname`` and its like) that torch 2.13 no longer has,
so ``import torchax`` fails there. Its source is mended (commit d1a9349), no release carries that yet. While torchax is
being imported, a missing overload whose name speaks of names is answered with an existing one of the same operator; the
entries that torchax then registers twice are the same function. Where torchax imports by itself nothing is touched.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

_PACKET = type(torch.ops.aten.add)


@contextlib.contextmanager
def _missing_named_overloads_answered() -> Iterator[None]:
    original = _PACKET.__getattr__

    def getattr_or_first_overload(packet: Any, name: str) -> Any:
        try:
            return original(packet, name)
        except AttributeError:
            if "name" not in name.lower() or name.startswith("__"):
                raise
            # getattr, not the saved method: the packet must hand out the overload object it caches.
            return getattr(packet, packet.overloads()[0])

    _PACKET.__getattr__ = getattr_or_first_overload  # type: ignore[method-assign]
    try:
        yield
    finally:
        _PACKET.__getattr__ = original  # type: ignore[method-assign]


def torch_has_named_overloads() -> bool:
    """Whether this torch still has the overloads that torchax 0.0.13 names."""
    return "dimname" in torch.ops.aten.all.overloads()


def import_torchax() -> ModuleType:
    """Returns the ``torchax`` module with its operator tables loaded, imported in the plain way where that works."""
    with contextlib.nullcontext() if torch_has_named_overloads() else _missing_named_overloads_answered():
        torchax = importlib.import_module("torchax")
        importlib.import_module("torchax.decompositions")  # torchax itself loads it late, with the first environment
    return torchax
