"""What the forward of a layer depends on besides tensors, in a form that can be compared.

Layers whose structures are equal compute the same function of their tensors. A layer with an attribute that cannot be
compared has no structure.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from model_adapters.program.held_objects import has_only_attributes

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CAPTURING = "transformers.utils.output_capturing"
"""Module of hooks that do nothing but collect outputs, where a caller asks for them."""
INTERCEPTION = "_torchax_serve_shared"
"""Attribute of functions in place of the forward of layers that may share one; each list of layers has its own."""
PRIMITIVES: tuple[type, ...] = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
)
"""Types whose values compare by value and do not change."""


class NotComparableError(Exception):
    """A layer, or a call of one, that cannot be compared with another; the message says why."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place of a tensor: `table` is a dict of a module, `key` its key."""

    table: dict[str, Any]
    key: str


class LayerParts:
    """The modules of a layer and the attributes that its forward may read.

    Args:
        layer: The layer.

    Attributes:
        modules: The layer and its parts, by path.
        tables: Attributes of each of them.
        object_tables: Attributes of other objects that they have, such as attention processors of diffusers, by id;
            known once `structure` has been called.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self.layer = layer
        self.modules = list(layer.named_modules(remove_duplicate=False))
        self.tables = [vars(module) for _, module in self.modules]
        self.object_tables: dict[int, dict[str, Any]] = {}
        self._open: set[int] = set()
        self._paths = {id(module): path for path, module in reversed(self.modules)}

    def slots(self) -> list[Slot]:
        """Returns the places of all tensors."""
        return [
            Slot(table, key)
            for attributes in self.tables
            for table in (attributes["_parameters"], attributes["_buffers"], attributes)
            for key, value in table.items()
            if isinstance(value, torch.Tensor)
        ]

    def structure(self, indices: dict[tuple[int, str], int]) -> Hashable:
        """Returns everything but tensors and `indices`, attributes by number of part and name.

        Objects that may be shared by layers, such as the configuration, are compared by identity.

        Raises:
            NotComparableError: An attribute has no form that can be compared.
        """
        return tuple(
            (path, id(type(module)), self._of_module(number, path, module, indices))
            for number, (path, module) in enumerate(self.modules)
        )

    def _of_module(
        self, number: int, path: str, module: torch.nn.Module, indices: dict[tuple[int, str], int]
    ) -> Hashable:
        attributes = vars(module)
        if path:
            self._check_hooks(path, attributes)
        found: list[Hashable] = []
        for table in ("_parameters", "_buffers", "_modules"):
            found.append(tuple((name, value is None) for name, value in attributes[table].items()))
        for name, value in attributes.items():
            if name in _OF_EVERY_MODULE or (not path and name == "forward"):
                continue
            if isinstance(value, torch.Tensor):
                found.append((name, "tensor"))
            elif (number, name) in indices:
                found.append((name, "index"))
            else:
                found.append((name, self._of(value, f"{path}.{name}")))
        return tuple(found)

    def _check_hooks(self, path: str, attributes: dict[str, Any]) -> None:
        for table in _HOOKS:
            for hook in attributes[table].values():
                if getattr(hook, "__module__", None) != _CAPTURING:
                    raise NotComparableError(f"{path} has a hook")

    def _of(self, value: Any, where: str) -> Hashable:
        kind = type(value)
        if isinstance(value, PRIMITIVES) and kind in PRIMITIVES:
            return kind, value if value == value else id(value)
        if kind in (tuple, list):
            return kind, tuple(self._of(item, where) for item in value)
        if kind is dict:
            return kind, tuple((self._of(key, where), self._of(item, where)) for key, item in value.items())
        if kind in (set, frozenset):
            return kind, frozenset(self._of(item, where) for item in value)
        if kind is functools.partial:
            return kind, self._of([value.func, value.args, value.keywords], where)
        if kind is types.MethodType and hasattr(value.__func__, INTERCEPTION):
            return kind, INTERCEPTION
        if kind is types.MethodType:
            owner = value.__self__
            return kind, id(value.__func__), self._paths.get(id(owner), id(owner))
        if isinstance(value, torch.nn.Module) and id(value) in self._paths:
            return "part", self._paths[id(value)]
        if isinstance(value, SHARED_TYPES):
            return kind, id(value)
        if has_only_attributes(value):
            return self._of_object(value, where)
        raise NotComparableError(f"{where} is a {kind.__module__}.{kind.__qualname__}")

    def _of_object(self, value: Any, where: str) -> Hashable:
        """Returns the class of an object and its attributes.

        Objects that name each other are compared by identity.
        """
        kind, attributes = type(value), vars(value)
        if id(value) in self._open:
            return kind, id(value)
        self.object_tables[id(value)] = attributes
        self._open.add(id(value))
        try:
            return kind, tuple((name, self._of(item, f"{where}.{name}")) for name, item in attributes.items())
        finally:
            self._open.remove(id(value))


SHARED_TYPES = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    torch.nn.Module,
    PreTrainedConfig,
    types.ModuleType,
    enum.Enum,
    str,
    int,
)
"""Types of objects that layers may share and whose state their code does not change."""


def unchanged(before: Sequence[dict[str, Any]], tables: Sequence[dict[str, Any]]) -> bool:
    """Tells whether the dicts `tables` have the same objects as their copies `before`."""
    return all(
        then.keys() == now.keys() and all(now[key] is value for key, value in then.items())
        for then, now in zip(before, tables, strict=True)
    )


class Snapshot:
    """The contents of dicts, lists and sets, and of those in them, to be restored.

    Args:
        owners: The containers.
    """

    def __init__(self, owners: Iterable[Any]) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}
        waiting = list(owners)
        while waiting:
            each = waiting.pop()
            if type(each) in (dict, list, set, OrderedDict) and id(each) not in self._copies:
                self._copies[id(each)] = each, copy.copy(each)
                waiting += each.values() if isinstance(each, dict) else each

    def restore(self) -> None:
        """Gives every container the items that it had."""
        for container, items in self._copies.values():
            if isinstance(container, list):
                container[:] = items
            elif not _has_same_items(container, items):
                container.clear()
                container.update(items)


def _has_same_items(container: Any, items: Any) -> bool:
    if isinstance(container, dict):
        return unchanged([items], [container])
    return bool(container == items)
