"""How the weights of experts lie in the memory of TPUs.

transformers has them as [experts, out, in], as a linear layer has its weight. XLA's ragged product of a TPU reads
[experts, in, out]: of weights in the order of their axes each step would make a copy, which costs three times the bytes
of the product. So their last two axes lie the other way round in memory; shapes, and what is computed, stay as they
are. XLA's programs are made for the layout of an argument, so that whatever describes one takes it from `place_of`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Sharding

if TYPE_CHECKING:
    import torch

PLATFORMS = ("tpu",)
"""Of devices whose products read experts so."""
INPUTS_FIRST = Layout(major_to_minor=(0, 2, 1))

FORMATS: dict[int, Format] = {}
"""Layouts by the id of an array, as JAX takes 0.1 ms to tell one; empty where no device has such weights."""


def experts_by_output(module: torch.nn.Module) -> frozenset[str]:
    """Returns the names of the experts' weights of `module` that are [experts, out, in]."""
    found = set()
    for path, child in module.named_modules():
        has_outputs_first = not getattr(child, "is_transposed", not hasattr(child, "output_size"))
        if hasattr(child, "num_experts") and has_outputs_first:
            dot = f"{path}." if path else ""
            found |= {f"{dot}{name}" for name, own in child.named_parameters(recurse=False) if own.ndim == 3}
    return frozenset(found)


def inputs_first(sharding: Sharding) -> Sharding | Format:
    """Returns where weights [experts, out, in] are placed, with their layout on TPUs."""
    if isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return sharding  # shapes alone are asked for
    device: Any = next(iter(sharding.device_set))
    return Format(INPUTS_FIRST, sharding) if device.platform in PLATFORMS else sharding


def put(array: Any, place: Sharding | Format | None, *, may_alias: bool = False) -> jax.Array:
    """Returns `array` at a place of `inputs_first` or `place_of`.

    Args:
        array: On the host or on a device.
        place: Where it is to lie.
        may_alias: Whether an array that lies there already is taken as it is, and not copied.
    """
    return remembered(jax.device_put(array, place, may_alias=may_alias and not isinstance(place, Format)), place)


def remembered(array: jax.Array, place: Sharding | Format | None) -> jax.Array:
    """Returns `array`, whose layout `place_of` will tell."""
    if isinstance(place, Format):
        key = id(array)
        FORMATS[key] = place
        weakref.finalize(array, FORMATS.pop, key, None)
    return array


def place_of(array: Any) -> Sharding | Format | None:
    """Returns the sharding of an array or a shape, with its layout where one was chosen here."""
    if isinstance(array, jax.ShapeDtypeStruct):
        held: Format = array.format
        return held if held.layout is not None else array.sharding
    found: Any = FORMATS.get(id(array))
    return found or getattr(array, "sharding", None)
