"""The arguments, results and cache layers of a layer's call as arrays and everything else.

A *form* says what a value consists of: containers, constants, and numbers of arrays. Two calls with equal forms differ
in their arrays alone. Values that are neither arrays of the trace nor plain data are compared by identity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import torch
from transformers.cache_utils import Cache

from model_adapters.bridge.views import NarrowInfo, TorchTensor, TorchView, jax_view, torch_view
from model_adapters.caches.index_handles import TopTokens
from model_adapters.caches.packed_batch import ScaledPool
from model_adapters.program.layer_structure import PRIMITIVES, SHARED_TYPES, NotComparableError

Form = Hashable
_PLAIN = {"_elem", "_env", "_dynamo_static_input_type"}
"""Attributes of a tensor without annotations; the last one is a hint for PyTorch's own compiler."""
_OF_FIELDS = (ScaledPool, TopTokens)
"""Classes of ours whose values are their fields."""


def is_plain(value: Any) -> bool:
    """Tells whether `value` is a torch view of a traced array, without annotations."""
    if type(value) is TorchTensor:
        return isinstance(value._elem, jax.core.Tracer) and vars(value).keys() <= _PLAIN
    return type(value) is TorchView and isinstance(jax_view(value), jax.core.Tracer)


def _form_of_data(value: Any, form: Callable[[Any], Form]) -> Form | None:
    """Returns the form of a constant or a container, of whose items `form` returns it.

    None for anything else.
    """
    kind = type(value)
    if kind in PRIMITIVES:
        return "constant", kind, value
    if kind in (tuple, list):
        return "sequence", kind, tuple(form(item) for item in value)
    if kind is dict:
        return "dict", tuple((key, form(item)) for key, item in value.items())
    if kind in _OF_FIELDS:
        return "fields", kind, tuple(form(getattr(value, field.name)) for field in dataclasses.fields(value))
    return None


@dataclasses.dataclass
class CallValues:
    """The arrays and objects of one call, numbered as its form has them.

    Attributes:
        inputs: Tensors and traced arrays, each once.
        objects: What is compared by identity, by id.
    """

    inputs: list[Any] = dataclasses.field(default_factory=list)
    objects: dict[int, Any] = dataclasses.field(default_factory=dict)
    _numbers: dict[int, int] = dataclasses.field(default_factory=dict)

    def form(self, value: Any) -> Form:
        """Returns the form of `value`, whose arrays join `inputs`.

        Raises:
            NotComparableError: It has an object that code may write into unseen.
        """
        kind = type(value)
        if (plain := _form_of_data(value, self.form)) is not None:
            return plain
        if isinstance(value, jax.core.Tracer) or is_plain(value):
            return "input", self._number(value)
        if not isinstance(value, (torch.Tensor, jax.Array, Cache, *SHARED_TYPES)) and not _is_frozen(value):
            # Code may write into it, such as into a dict of a class of its own.
            raise NotComparableError(f"it gets a {kind.__module__}.{kind.__qualname__}")
        self.objects[id(value)] = value
        return "object", id(value)

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.inputs)
            self.inputs.append(value)
        return self._numbers[id(value)]

    def arrays(self) -> list[Any]:
        """Returns the arrays of `inputs`."""
        return [jax_view(each) if isinstance(each, torch.Tensor) else each for each in self.inputs]

    def kinds(self) -> Hashable:
        """Returns shape, dtype and whether it is a tensor, by input."""
        return tuple(
            (isinstance(each, torch.Tensor), jax.typeof(array))
            for each, array in zip(self.inputs, self.arrays(), strict=True)
        )

    def within(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns `inputs` over other arrays, for the trace of the function."""
        return [
            torch_view(array) if isinstance(each, torch.Tensor) else array
            for each, array in zip(self.inputs, arrays, strict=True)
        ]


def _is_frozen(value: Any) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def extra_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns attributes that code has given `tensor`."""
    return {name: value for name, value in vars(tensor).items() if name not in _PLAIN}


def built(form: Any, inputs: Sequence[Any], objects: dict[int, Any], outputs: Sequence[Any] = ()) -> Any:
    """Returns the value of `form` over other inputs and outputs; containers are new."""
    kind, *rest = form
    if kind == "constant":
        return rest[1]
    if kind == "sequence":
        return rest[0](built(item, inputs, objects, outputs) for item in rest[1])
    if kind == "dict":
        return {key: built(item, inputs, objects, outputs) for key, item in rest[0]}
    if kind == "fields":
        return rest[0](*(built(item, inputs, objects, outputs) for item in rest[1]))
    if kind == "object":
        return objects[rest[0]]
    return (inputs if kind == "input" else outputs)[rest[0]]


class Results:
    """The results of a traced layer: what is new of them as arrays.

    Args:
        inputs: Inputs inside the trace.
        objects: Objects of the call, by id.

    Attributes:
        outputs: New tensors and arrays, each once.
    """

    def __init__(self, inputs: Sequence[Any], objects: dict[int, Any]) -> None:
        self._inputs = {id(each): number for number, each in enumerate(inputs)}
        self._objects = objects
        self._numbers: dict[int, int] = {}
        self._bases: dict[int, list[torch.Tensor]] = {}  # views among the results by their base
        self.outputs: list[Any] = []

    def form(self, value: Any) -> Form:
        """Returns the form of a result.

        Raises:
            NotComparableError: It has a part that is neither new arrays nor an argument nor plain data.
        """
        kind = type(value)
        if (plain := _form_of_data(value, self.form)) is not None:
            return plain
        if id(value) in self._inputs:
            return "input", self._inputs[id(value)]
        if id(value) in self._objects:
            return "object", id(value)
        if id(value) not in self._numbers:
            if not self._is_new(value):
                raise NotComparableError(f"it returns or stores a {kind.__module__}.{kind.__qualname__}")
            self._numbers[id(value)] = len(self.outputs)
            self.outputs.append(value)
        return "output", self._numbers[id(value)]

    def _is_new(self, value: Any) -> bool:
        """Tells whether `value` is an array of its own, which no other result shares."""
        if type(value) is TorchView:
            return self._is_new_part(value)
        is_tensor = type(value) is TorchTensor and vars(value).keys() <= _PLAIN and id(value) not in self._bases
        return is_tensor or isinstance(value, jax.Array)

    def _is_new_part(self, view: Any) -> bool:
        """Tells whether `view` is a slice of an array made by the code, apart from other results."""
        base = view.parent
        known = (self._inputs, self._objects, self._numbers)
        if type(base) is not TorchTensor or any(id(base) in each for each in known):
            return False
        others = self._bases.setdefault(id(base), [])
        if not all(_are_apart(view, other, base.shape) for other in others):
            return False
        others.append(view)
        return True


def _are_apart(one: Any, other: Any, shape: Sequence[int]) -> bool:
    """Tells whether two slices of an array of `shape` are apart in any one dimension."""
    parts = [
        index if isinstance(index, tuple) else (index,)
        for each in (one, other)
        if isinstance(each.view_info, NarrowInfo) and (index := each.view_info.slices) is not None
    ]
    if len(parts) < 2 or not all(type(part) is slice for each in parts for part in each):
        return False
    return any(
        set(range(*first.indices(length))).isdisjoint(range(*second.indices(length)))
        for first, second, length in zip(*parts, shape, strict=False)
    )
