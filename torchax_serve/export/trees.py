"""Pytrees as JSON, so that programs of a bundle take and return plain arrays."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from model_adapters.caches.packed_batch import ScaledPool
from model_adapters.errors import CheckpointError
from model_adapters.ops.quantized_weight import QuantizedWeight, Scheme
from torchax_serve.sampling.types import Logprobs, SamplerState
from torchax_serve.start.weights_file import TensorNames

_CLASSES = {each.__name__: each for each in (ScaledPool, Logprobs, SamplerState)}
"""Dataclasses that programs return."""


def described_tree(tree: Any) -> Any:
    """Returns the structure of a pytree as JSON.

    Leaves are numbered as ``jax.tree.leaves`` orders them.
    """
    return _described(tree, itertools.count())


def _described(tree: Any, numbers: Iterator[int]) -> Any:
    if tree is None:
        return None
    if isinstance(tree, tuple | list):
        return [_described(each, numbers) for each in tree]
    if type(tree) in _CLASSES.values():
        fields = [field.name for field in dataclasses.fields(tree)]
        return {"class": type(tree).__name__, **{name: _described(getattr(tree, name), numbers) for name in fields}}
    return next(numbers)


def restored_tree(description: Any, leaves: Sequence[Any]) -> Any:
    """Returns the pytree of a structure, with lists as tuples.

    Args:
        description: The structure, by `described_tree`.
        leaves: Its leaves.

    Raises:
        CheckpointError: a class that this release does not know.
    """
    if description is None:
        return None
    if isinstance(description, list):
        return tuple(restored_tree(each, leaves) for each in description)
    if isinstance(description, dict):
        fields = {name: restored_tree(each, leaves) for name, each in description.items() if name != "class"}
        if description["class"] not in _CLASSES:
            raise CheckpointError(
                f"expected results of the classes {', '.join(_CLASSES)}, got {description['class']}; update "
                "torchax-serve, or export the bundle again"
            )
        return _CLASSES[description["class"]](**fields)
    return leaves[description]


def described_weights(names: TensorNames) -> dict[str, Any]:
    """Returns names of tensors as JSON: a name, or the parts of a quantized weight."""
    return {
        name: dataclasses.asdict(tree) if isinstance(tree, QuantizedWeight) else tree for name, tree in names.items()
    }


def restored_weights(description: Mapping[str, Any]) -> TensorNames:
    """Returns the names of tensors that `described_weights` has described."""
    return {name: each if isinstance(each, str) else _quantized(each) for name, each in description.items()}


def _quantized(description: Mapping[str, Any]) -> QuantizedWeight:
    parts = {name: each for name, each in description.items() if name != "scheme"}
    scheme: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in description["scheme"].items()
    }
    return QuantizedWeight(**parts, scheme=Scheme(**scheme))
