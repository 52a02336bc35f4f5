"""Objects that a module holds beside its parts, compared by contents."""

from __future__ import annotations

import enum
import types
from typing import Any

import torch

_BY_VALUE = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
_BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, torch.nn.Module, enum.Enum)


def described(value: Any, known: dict[int, int]) -> Any:
    """Returns a form of `value`, equal for objects of the same class and contents.

    A form with a tensor, or with what has state outside of its attributes, equals no other form.

    Args:
        value: An object, or a container.
        known: Numbers of the objects seen before, by id, to which this adds. So a form tells one object in two places
            from two objects.
    """
    kind = type(value)
    if kind in _BY_VALUE:
        return kind, value
    if isinstance(value, _BY_IDENTITY):
        return kind, value
    if id(value) in known:
        return "again", known[id(value)]
    known[id(value)] = len(known)
    if kind in (list, tuple):
        return kind, [described(each, known) for each in value]
    if kind is dict:
        return kind, [(described(key, known), described(each, known)) for key, each in value.items()]
    if has_only_attributes(value):
        return kind, [(name, described(each, known)) for name, each in vars(value).items()]
    return object()


class _WithoutSlots:
    """Class whose objects have nothing but a dict of attributes."""


def has_only_attributes(value: Any) -> bool:
    """Tells whether all state of `value` is in its ``__dict__``.

    It has no slots then, and no base class written in C.
    """
    kind = type(value)
    return kind.__basicsize__ == _WithoutSlots.__basicsize__ and kind.__itemsize__ == 0 and hasattr(value, "__dict__")
