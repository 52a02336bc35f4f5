"""Cache of a packed model with recurrent layers: pages, and states of slots and prefixes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from model_adapters.caches.packed_batch import LayerPools
from torchax_serve.kv_cache.cache_layout import SlotStateSpec
from torchax_serve.kv_cache.head_state import empty_state, hidden_bytes, without_slot
from torchax_serve.kv_cache.pools import CacheAllocation, HeadScales, PagedCache, PoolAllocator


@dataclasses.dataclass(frozen=True)
class RecurrentLayers:
    """What the layers of a packed model keep besides pages.

    Attributes:
        layers: By layer of the model, places of its pages and states in the pools.
        states: The states of one request, in the order of the pools behind those of pages.
    """

    layers: tuple[LayerPools, ...]
    states: tuple[SlotStateSpec, ...]

    @property
    def first_place(self) -> int:
        """Place of the first state, behind pools of pages."""
        places = [place for kept in self.layers for _, place in kept.convs]
        return min(places + [kept.recurrent for kept in self.layers if kept.recurrent is not None])

    def num_bytes(self, num_rows: int) -> int:
        """Returns the bytes of the states of `num_rows` requests or snapshots."""
        return sum(state.num_bytes for state in self.states) * num_rows


class HybridCache(PagedCache):
    """Pools of pages, behind them states ``[num_slots + num_snapshots, ...]`` of layers.

    The pool of a draft head and its `HeadState` are last.
    Snapshots stand behind the slots, the first one last: snapshot i is row -1 - i, and row -1 takes what nobody reads.

    Args:
        plan: Number of pages of each group.
        recurrent: What the layers keep.
        num_slots: Number of slots.
        num_snapshots: Number of snapshots, with snapshot 0, which is not used.
        pages: Allocator of pools and states; None: the default device.
        scales: Scales of each layer's pages if these are in 8 bits.
        head: Columns and dtype of the hidden states that a draft head reads; None: there is none.
    """

    def __init__(
        self,
        plan: CacheAllocation,
        recurrent: RecurrentLayers,
        num_slots: int,
        num_snapshots: int = 1,
        pages: PoolAllocator | None = None,
        scales: Sequence[HeadScales] | None = None,
        head: tuple[int, Any] | None = None,
    ) -> None:
        self.recurrent, self.num_snapshots = recurrent, num_snapshots
        self._num_slots, self._head = num_slots, head
        self.num_model_pools = recurrent.first_place
        super().__init__(plan, pages, scales)
        self.layout = dataclasses.replace(plan.layout, layers=recurrent.layers)

    def reset(self) -> None:
        """Allocates pools and states again, all zeros."""
        super().reset()
        rows, of_model = self._num_slots + self.num_snapshots, self.num_model_pools
        states = tuple(
            self._pages.slot_states((rows, *state.shape), state.dtype, is_of_heads=state.is_of_heads)
            for state in self.recurrent.states
        )
        of_head: tuple[Any, ...] = self.pools[of_model:]
        if self._head is not None:
            of_head += (empty_state(self._pages, self._num_slots, *self._head),)
        self.pools = (*self.pools[:of_model], *states, *of_head)

    def free_slot(self, slot: int) -> None:
        """Drops the hidden state of a slot, which was given to another request."""
        if self._head is not None:
            self.pools = without_slot(self.pools, slot)

    def pages_of_layers(self, layers: Sequence[int]) -> tuple[jax.Array, ...]:
        """Returns the pages of some layers; a head's stand behind the states."""
        return super().pages_of_layers(self._places(layers))

    def set_pages_of_layers(self, layers: Sequence[int], pages: Sequence[jax.Array]) -> None:
        """Replaces the pages of some layers, such as donated ones."""
        super().set_pages_of_layers(self._places(layers), pages)

    def _places(self, layers: Sequence[int]) -> list[int]:
        behind = len(self.recurrent.states)
        return [layer if layer < self.num_model_pools else layer + behind for layer in layers]

    def states_of_prefixes(self) -> tuple[jax.Array, ...]:
        """Returns the states of slots and snapshots, ``[num_slots + num_snapshots, ...]`` each."""
        of_model = self.num_model_pools
        states: Any = self.pools[of_model : of_model + len(self.recurrent.states)]
        return states

    def set_states_of_prefixes(self, states: Sequence[jax.Array]) -> None:
        """Replaces the states, such as donated ones."""
        of_model = self.num_model_pools
        self.pools = (*self.pools[:of_model], *states, *self.pools[of_model + len(states) :])

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all slots and snapshots."""
        num_bytes = self.recurrent.num_bytes(self._num_slots + self.num_snapshots)
        return num_bytes if self._head is None else num_bytes + hidden_bytes(self._num_slots, *self._head)
