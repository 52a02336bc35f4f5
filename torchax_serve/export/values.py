"""Arguments and results of a module's forward as JSON with numbers in the places of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from model_adapters.errors import UnsupportedModelError

_SCALARS = (bool, int, float, str, type(None))


def described_values(tree: Any, is_array: Callable[[Any], bool], what: str) -> tuple[Any, list[Any]]:
    """Returns the structure of nested tuples, lists and dicts as JSON, and its arrays in order.

    Args:
        tree: The structure, with numbers, texts and None in it.
        is_array: Whether a leaf is an array.
        what: What it is called in a message.

    Raises:
        UnsupportedModelError: another class, or a key that is no text.
    """
    arrays: list[Any] = []

    def described(value: Any) -> Any:
        if is_array(value):
            arrays.append(value)
            return {"array": len(arrays) - 1}
        if type(value) in (tuple, list):
            return {type(value).__name__: [described(each) for each in value]}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {"dict": {key: described(value[key]) for key in sorted(value)}}
        if type(value) in _SCALARS:
            return {"value": value}
        raise UnsupportedModelError(
            f"{what}: expected arrays, numbers and texts in tuples, lists and dicts for a bundle, got a "
            f"{type(value).__name__}; wrap the module in one that has none"
        )

    return described(tree), arrays


def restored_values(description: Any, arrays: Sequence[Any]) -> Any:
    """Returns the structure that `described_values` has described, with `arrays` in it."""
    ((kind, content),) = description.items()
    if kind == "array":
        return arrays[content]
    if kind == "value":
        return content
    if kind == "dict":
        return {key: restored_values(each, arrays) for key, each in content.items()}
    found = [restored_values(each, arrays) for each in content]
    return tuple(found) if kind == "tuple" else found
