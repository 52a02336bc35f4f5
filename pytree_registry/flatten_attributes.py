"""Attributes of any object, split into children and a hashable static rest, and joined.

The rule looks at values, so it needs no list of attribute names:

* tensors (torch, JAX, numpy, tracers, shape structs) and registered pytree nodes are children;
* lists, tuples, named tuples and dicts are walked, whatever mixture they hold;
* everything else is static and must be hashable; a model configuration is compared by its values;
* an object that hides tensors, or cannot be hashed, is an error that names the class and the attribute.

JAX also rebuilds nodes around things that are no tensors, such as the shardings of ``in_shardings`` or the integers of
``in_axes``. So that such an object comes apart at the same places again, it remembers where its children were.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

import jax
import numpy as np
import torch

from pytree_registry.errors import RegistrationError

# A skeleton is None where a child stood, else the pair of a type and its payload: the value of a static type, the
# skeletons of a list or tuple, the (key, skeleton) pairs of a dict.
Skeleton = tuple[type, Any] | None

_STATIC = frozenset(
    {NoneType, bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size, np.dtype}
)
_ARRAYS = (torch.Tensor, jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_CHILD_PATHS = "_pytree_child_paths"


class _ComparedByValue:
    """Gives an object that has ``==`` and no hash a place in the static part."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ComparedByValue) and bool(self.value is other.value or self.value == other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return f"{type(self.value).__name__}(...)"


def is_array(value: Any) -> bool:
    """Returns whether `value` is a tensor of any kind.

    It may be one of torch, JAX or numpy, a tracer, or a shape with a dtype.
    """
    return isinstance(value, _ARRAYS)


class Splitter:
    """Splitter of the attributes of one object.

    `children` and `paths` fill in the order of the walk.
    """

    def __init__(self, owner: type, child_paths: frozenset[str] = frozenset()) -> None:
        self.owner = owner
        self.child_paths = child_paths
        self.children: list[Any] = []
        self.paths: list[str] = []

    def flatten_object(self, value: Any, path: str) -> Skeleton:
        """Returns the skeleton of `value`, which is at `path` (such as ``layers[0]``) of the owner."""
        kind = type(value)
        if kind in _STATIC and path not in self.child_paths:
            return kind, value
        if kind is dict or kind is OrderedDict:
            return kind, tuple((key, self.flatten_object(item, f"{path}[{key!r}]")) for key, item in value.items())
        if kind is list or issubclass(kind, tuple):
            return kind, tuple(self.flatten_object(item, f"{path}[{i}]") for i, item in enumerate(value))
        if is_array(value) or path in self.child_paths or not jax.tree_util.all_leaves((value,)):
            self.children.append(value)
            self.paths.append(path)
            return None
        return kind, self._static_payload(value, path)

    def _static_payload(self, value: Any, path: str) -> Any:
        kind = type(value)
        inside = (
            value if isinstance(value, set | frozenset) else vars(value).values() if hasattr(value, "__dict__") else ()
        )
        if any(is_array(item) for item in inside):
            raise RegistrationError(
                f"{self.owner.__qualname__}.{path}: expected a tensor, a plain container of tensors or a static value, "
                f"got a {kind.__qualname__} that holds tensors; register it with pytree_registry.register"
            )
        if kind is set:
            return frozenset(value)
        try:
            hash(value)
        except TypeError:
            if _is_configuration(value):
                return _ComparedByValue(value)
            raise RegistrationError(
                f"{self.owner.__qualname__}.{path}: expected a tensor, a plain container of tensors or a hashable "
                f"value, got an unhashable {kind.__qualname__}; make it hashable or register it with "
                "pytree_registry.register"
            ) from None
        return value


def _is_configuration(value: Any) -> bool:
    from transformers import PreTrainedConfig  # the caller holds one, so this is loaded

    return isinstance(value, PreTrainedConfig)


def unflatten_object(skeleton: Skeleton, children: Iterator[Any]) -> Any:
    """Returns the value of `skeleton` with the next `children` in its places.

    Containers are new objects.
    """
    if skeleton is None:
        return next(children)
    kind, payload = skeleton
    if kind in _STATIC:
        return payload
    if kind is dict or kind is OrderedDict:
        return kind((key, unflatten_object(item, children)) for key, item in payload)
    if kind is list:
        return [unflatten_object(item, children) for item in payload]
    if issubclass(kind, tuple):
        items = [unflatten_object(item, children) for item in payload]
        return kind._make(items) if hasattr(kind, "_make") else kind(items)
    if kind is set:
        return set(payload)
    return payload.value if isinstance(payload, _ComparedByValue) else payload


def split_attributes(obj: Any, attributes: Mapping[str, Any]) -> tuple[Splitter, tuple[tuple[str, Skeleton], ...]]:
    """Returns the splitter with the children of `obj`, and the skeletons of `attributes`.

    The skeletons come as pairs ``(name, skeleton)``, one for each attribute.
    """
    splitter = Splitter(type(obj), attributes.get(_CHILD_PATHS, frozenset()))
    static = tuple(
        (name, splitter.flatten_object(value, name)) for name, value in attributes.items() if name != _CHILD_PATHS
    )
    return splitter, static


def _comes_apart(child: Any) -> bool:
    """Returns whether `child` is a child by the general rule: a tensor or a pytree node.

    None is static.
    """
    return is_array(child) or (child is not None and not jax.tree_util.all_leaves((child,)))


def join_attributes(
    static: tuple[tuple[str, Skeleton], ...], children: tuple[Any, ...], recognized: str | None = None
) -> dict[str, Any]:
    """Returns the attributes that :func:`split_attributes` took apart, around other `children`.

    Attribute `recognized` needs no memory: its owner takes it for a child whatever it is.
    """
    remaining = iter(children)
    attributes = {name: unflatten_object(skeleton, remaining) for name, skeleton in static}
    if not all(_comes_apart(child) for child in children):
        paths = (path for name, skeleton in static for path in _child_paths(skeleton, name))
        pairs = zip(paths, children, strict=True)
        foreign = frozenset(path for path, child in pairs if not _comes_apart(child) and path != recognized)
        if foreign:
            attributes[_CHILD_PATHS] = foreign
    return attributes


def _child_paths(skeleton: Skeleton, path: str) -> Iterator[str]:
    """Yields the paths of the children in `skeleton`, spelled as by :meth:`Splitter.split`."""
    if skeleton is None:
        yield path
        return
    kind, payload = skeleton
    if kind in _STATIC:
        return
    if kind is dict or kind is OrderedDict:
        for key, item in payload:
            yield from _child_paths(item, f"{path}[{key!r}]")
    elif kind is list or issubclass(kind, tuple):
        for i, item in enumerate(payload):
            yield from _child_paths(item, f"{path}[{i}]")
