"""The arguments, results and cache layers of a layer's call as arrays and everything else.

A *form* says what a value consists of: containers, constants, and numbers of arrays. Two calls with equal forms differ
in their arrays alone. Values that are neither arrays of the trace nor plain data are compared by identity.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import torch
from transformers.cache_utils import Cache

from model_adapters.bridge.views import TorchTensor, jax_view, torch_view
from model_adapters.caches.index_handles import TopTokens
from model_adapters.caches.packed_batch import ScaledPool
from model_adapters.lowerings import aliases, strides
from model_adapters.program.layer_structure import PRIMITIVES, SHARED_TYPES, NotComparableError

Form = Hashable
_PLAIN = {"_array", "_alias", "_noted", "_env", "_dynamo_static_input_type"}
"""Attributes of a tensor without annotations; the last one is a hint for PyTorch's own compiler."""
_OF_FIELDS = (ScaledPool, TopTokens)
"""Classes of ours whose values are their fields."""


def is_plain(value: Any) -> bool:
    """Tells whether `value` is a torch view of a traced array, without annotations."""
    return type(value) is TorchTensor and isinstance(value._elem, jax.core.Tracer) and vars(value).keys() <= _PLAIN


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
        known = (torch.Tensor, jax.Array, Cache, UserDict, *SHARED_TYPES)
        if not isinstance(value, known) and not _is_frozen(value):
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
        """Returns shape, dtype and whether it is a tensor, by input.

        And strides, if they are not contiguous.
        """
        return tuple(
            (isinstance(each, torch.Tensor), jax.typeof(array), _strides(each))
            for each, array in zip(self.inputs, self.arrays(), strict=True)
        )

    def within(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns `inputs` over other arrays, for the trace of the function."""
        return [
            view_of(array, getattr(each, "_strided", None)) if isinstance(each, torch.Tensor) else array
            for each, array in zip(self.inputs, arrays, strict=True)
        ]


def view_of(array: Any, strided: Any) -> TorchTensor:
    """Returns a torch view of `array` with strides as `_strided` has them."""
    made = torch_view(array)
    made._strided = strided
    return made


def _strides(value: Any) -> Hashable:
    """Returns what code can tell of the strides of an input, but where its memory begins.

    Slices of one tensor, one for each layer, are of one kind.
    """
    strided = getattr(value, "_strided", None)
    if strided is None:
        return None
    return "unknown" if strided is strides.UNKNOWN else tuple(strided.stride())


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
        self._tensors = [each for each in (*inputs, *objects.values()) if isinstance(each, TorchTensor)]
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
        """Tells whether `value` is an array, or a tensor that shares no element with others.

        Others are results and arguments.
        """
        if isinstance(value, jax.Array):
            return True
        if type(value) is not TorchTensor or not vars(value).keys() <= _PLAIN:
            return False
        if not all(aliases.are_apart(value, other) for other in self._tensors):
            return False
        self._tensors.append(value)
        return True
