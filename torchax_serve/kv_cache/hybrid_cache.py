"""Cache of a packed model with recurrent layers: pages, and states of slots and prefixes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from model_adapters.caches.packed_batch import LayerPools
from torchax_serve.kv_cache.cache_layout import SlotStateSpec
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

    def num_bytes(self, num_rows: int) -> int:
        """Returns the bytes of the states of `num_rows` requests or snapshots."""
        return sum(state.num_bytes for state in self.states) * num_rows


class HybridCache(PagedCache):
    """Pools of pages, behind them states ``[num_slots + num_snapshots, ...]`` of layers.

    Snapshots stand behind the slots, the first one last: snapshot i is row -1 - i, and row -1 takes what nobody reads.

    Args:
        plan: Number of pages of each group.
        recurrent: What the layers keep.
        num_slots: Number of slots.
        num_snapshots: Number of snapshots, with snapshot 0, which is not used.
        pages: Allocator of pools and states; None: the default device.
        scales: Scales of each layer's pages if these are in 8 bits.
    """

    def __init__(
        self,
        plan: CacheAllocation,
        recurrent: RecurrentLayers,
        num_slots: int,
        num_snapshots: int = 1,
        pages: PoolAllocator | None = None,
        scales: Sequence[HeadScales] | None = None,
    ) -> None:
        self.recurrent, self.num_snapshots = recurrent, num_snapshots
        self._num_rows = num_slots + num_snapshots
        super().__init__(plan, pages, scales)
        self.layout = dataclasses.replace(plan.layout, layers=recurrent.layers)

    def reset(self) -> None:
        """Allocates pools and states again, all zeros."""
        super().reset()
        states = (
            self._pages.slot_states((self._num_rows, *state.shape), state.dtype, is_of_heads=state.is_of_heads)
            for state in self.recurrent.states
        )
        self.pools = (*self.pools, *states)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all slots and snapshots."""
        return self.recurrent.num_bytes(self._num_rows)
