"""Tensors that attention processors append to lists, such as attention maps.

A pipeline reads these later, from lists of its own.
A compiled program cannot append. So what a trace has appended becomes a result of the program, under the path of its
list, and each call appends it anew.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from model_adapters.bridge.views import is_view
from model_adapters.errors import UnsupportedModelError

MAX_DEPTH = 4
"""Containers inside of each other that are looked through, such as a processor, its store, a dictionary, a list."""


def list_lengths(module: torch.nn.Module) -> dict[str, int]:
    """Returns the length of each list of the processors of `module`, by path."""
    return {path: len(value) for path, value in _lists(module)}


def take_appended(module: torch.nn.Module, lengths: Mapping[str, int]) -> dict[str, list[torch.Tensor]]:
    """Returns the views that were appended to lists since `lengths`, and takes them out again.

    They are by path.

    Raises:
        UnsupportedModelError: a processor has stored a view elsewhere than at the end of a list.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for path, values in _lists(module):
        new = values[lengths.get(path, 0) :]
        if any(is_view(each) for each in new):
            found[path] = new
            del values[len(values) - len(new) :]
    for path, value in _leaves(module):
        if is_view(value):
            raise UnsupportedModelError(
                f"{type(module).__name__}: expected attention processors that store tensors at the end of lists, got "
                f"one that sets {path}, which a compiled program would do once; leave this part in PyTorch"
            )
    return found


def drop_appended(module: torch.nn.Module, lengths: Mapping[str, int]) -> None:
    """Removes what a trace that has failed appended to lists since `lengths`."""
    for path, values in _lists(module):
        del values[lengths.get(path, 0) :]


def append(module: torch.nn.Module, appended: Mapping[str, list[Any]]) -> None:
    """Appends what a call has stored to the lists of the processors, by path."""
    lists = dict(_lists(module)) if appended else {}
    for path, values in appended.items():
        lists[path].extend(values)


def _lists(module: torch.nn.Module) -> Iterator[tuple[str, list[Any]]]:
    return ((path, value) for path, value in _places(module) if type(value) is list)


def _leaves(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    return ((path, value) for path, value in _places(module) if isinstance(value, torch.Tensor))


def _places(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields what the processors of `module` hold, each object once, with its first path."""
    seen: set[int] = set()
    for name, child in module.named_modules():
        processor = vars(child).get("processor")
        if processor is not None:
            yield from _inside(processor, f"{name}.processor", seen, MAX_DEPTH)


def _inside(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or depth < 0:
        return
    if isinstance(value, torch.Tensor | list):
        seen.add(id(value))
        yield path, value
        for index, each in enumerate(value if isinstance(value, list) else ()):
            if isinstance(each, dict | list):
                yield from _inside(each, f"{path}[{index}]", seen, depth - 1)
        return
    others = (torch.nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)
    if not isinstance(value, dict) and (isinstance(value, others) or not hasattr(value, "__dict__")):
        return
    seen.add(id(value))
    for key, each in list((value if isinstance(value, dict) else vars(value)).items()):
        yield from _inside(each, f"{path}.{key}", seen, depth - 1)
