"""Adapters of the requests in the slots, as the last part of the int32 array of a step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.caches.packed_batch import PackedBatch
from model_adapters.ops.compressed_weight import Weights

if TYPE_CHECKING:
    from torchax_serve.runtime.model_runtime import ModelRuntime


def step_weights(runtime: ModelRuntime) -> Weights:
    """Returns the weights of an engine's steps.

    They have the matrices of adapters, if requests can name some.
    """
    return runtime.weights if runtime.lora is None else runtime.lora.weights(runtime.weights)


def lora_form(runtime: ModelRuntime) -> str:
    """Returns what programs of an engine's steps depend on of its adapters; empty without any."""
    return "" if runtime.lora is None else runtime.lora.form


class SlotAdapters:
    """The adapter of each slot.

    Args:
        num_slots: Number of slots.
        form: Form of the adapters' matrices; empty: there are none, and nothing is passed.

    Attributes:
        form: As the argument.
        size: Number of integers that a step gets.
    """

    def __init__(self, num_slots: int, form: str) -> None:
        self.form = form
        self.size = num_slots if form else 0
        self._ids = np.zeros(self.size, np.int32)

    def assign(self, slot: int, adapter_id: int) -> None:
        """Gives a slot an adapter, 0 for none."""
        if self.size:
            self._ids[slot] = adapter_id
        else:
            assert not adapter_id

    def empty(self, size: int) -> np.ndarray:
        """Returns an array of zeros as `append_to` returns it for one of `size` numbers."""
        return np.zeros(size + self.size, np.int32)

    def append_to(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the array of a step, int32[size], with the adapters of all slots at its end."""
        return np.concatenate([numbers, self._ids]) if self.size else numbers

    def of_rows(self, numbers: jax.Array, slots: jax.Array) -> jax.Array | None:
        """Returns the adapter of each row, int32[S]; None if there are none.

        Args:
            numbers: The array of a step, with the adapters at its end.
            slots: Slot of each row, int32[S]; one that there is not has the last one's.
        """
        return numbers[-self.size :][jnp.minimum(slots, self.size - 1)] if self.size else None

    def with_adapters(self, batch: PackedBatch, numbers: jax.Array, slots: jax.Array) -> PackedBatch:
        """Returns `batch` with the adapter of each token.

        Args:
            batch: A batch.
            numbers: The array of its step, with the adapters at its end.
            slots: Slot of each token, int32[T].
        """
        return dataclasses.replace(batch, adapters=self.of_rows(numbers, slots)) if self.size else batch
