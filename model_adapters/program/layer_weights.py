"""The tensors of a layer as inputs of a function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.lowerings import index_checks
from model_adapters.ops import compressed_weight
from model_adapters.program.call_values import is_plain
from model_adapters.program.layer_structure import LayerParts, NotComparableError
from model_adapters.sharding import sharded_trace


class LayerWeights:
    """The tensors of a layer as inputs.

    Attributes:
        slots: Places of the tensors.
        arrays: Arrays of the surrounding trace, each once.
        stored: By array, its stored form or the array itself.
        key: Equal for layers whose weights have the same shapes, dtypes, forms and placements.
    """

    def __init__(self, parts: LayerParts) -> None:
        self.slots = parts.slots()
        tensors = [slot.table[slot.key] for slot in self.slots]
        if not all(is_plain(tensor) for tensor in tensors):
            raise NotComparableError("it has a tensor whose values are known")
        found = {id(array): array for array in (jax_view(tensor) for tensor in tensors)}
        numbers = {each: number for number, each in enumerate(found)}
        self.arrays = list(found.values())
        self.numbers = [numbers[id(jax_view(tensor))] for tensor in tensors]
        self.stored = [compressed_weight.stored_form(array) for array in self.arrays]
        self.placed = [sharded_trace.placement_in_trace(array) for array in self.arrays]
        leaves, tree = jax.tree.flatten(self.stored)
        self.leaves = leaves
        self.tree = tree
        self.key = (
            tuple(self.numbers),
            tree,
            tuple(jax.typeof(leaf) for leaf in leaves),
            tuple(each and each.layout_key for each in self.placed),
        )

    @contextlib.contextmanager
    def replaced(self, leaves: list[Any]) -> Iterator[list[bool]]:
        """Puts `leaves` in place of the layer's tensors inside the context.

        Yields a list that has, at the end, whether each tensor was left unwritten.
        """
        stored = jax.tree.unflatten(self.tree, leaves)
        arrays = [compressed_weight.unpacked(each) for each in stored]
        before = [slot.table[slot.key] for slot in self.slots]
        unwritten: list[bool] = []
        with (
            compressed_weight.also_stored(list(zip(arrays, stored, strict=True))),
            sharded_trace.also_placed(list(zip(arrays, self.placed, strict=True))),
            index_checks.also_named(list(zip(arrays, self.arrays, strict=True))),
        ):
            try:
                for slot, number in zip(self.slots, self.numbers, strict=True):
                    slot.table[slot.key] = torch_view(arrays[number])
                mine = [slot.table[slot.key] for slot in self.slots]
                yield unwritten
                unwritten += [
                    slot.table.get(slot.key) is tensor and jax_view(tensor) is arrays[number]
                    for slot, tensor, number in zip(self.slots, mine, self.numbers, strict=True)
                ]
            finally:
                for slot, tensor in zip(self.slots, before, strict=True):
                    slot.table[slot.key] = tensor
