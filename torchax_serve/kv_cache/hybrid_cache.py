"""Cache of a packed model with recurrent layers: pages, and behind them states by slot."""

from __future__ import annotations

import dataclasses

from model_adapters.caches.packed_batch import LayerPools
from torchax_serve.kv_cache.cache_layout import SlotStateSpec
from torchax_serve.kv_cache.pools import CacheAllocation, PagedCache, PoolAllocator


@dataclasses.dataclass(frozen=True)
class RecurrentLayers:
    """What the layers of a packed model keep besides pages.

    Attributes:
        layers: By layer of the model, places of its pages and states in the pools.
        states: The states of one request, in the order of the pools behind those of pages.
    """

    layers: tuple[LayerPools, ...]
    states: tuple[SlotStateSpec, ...]

    def num_bytes(self, num_slots: int) -> int:
        """Returns the bytes of the states of all slots; a row more takes what nobody reads."""
        return sum(state.num_bytes for state in self.states) * (num_slots + 1)


class HybridCache(PagedCache):
    """Pools of a `CacheAllocation`, behind them states ``[num_slots + 1, ...]`` of layers.

    Args:
        plan: Number of pages of each group.
        recurrent: What the layers keep.
        num_slots: Number of slots.
        pages: Allocator of pools and states; None: the default device.
    """

    def __init__(
        self, plan: CacheAllocation, recurrent: RecurrentLayers, num_slots: int, pages: PoolAllocator | None = None
    ) -> None:
        self._recurrent, self._num_slots = recurrent, num_slots
        super().__init__(plan, pages)
        self.layout = dataclasses.replace(plan.layout, layers=recurrent.layers)

    def reset(self) -> None:
        """Allocates pools and states again, all zeros."""
        super().reset()
        rows = self._num_slots + 1
        states = (
            self._pages.slot_states((rows, *state.shape), state.dtype, is_of_heads=state.is_of_heads)
            for state in self._recurrent.states
        )
        self.pools = (*self.pools, *states)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all slots."""
        return self._recurrent.num_bytes(self._num_slots)
