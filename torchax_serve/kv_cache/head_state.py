"""Cache of a model with a draft head: a layer of pages more, and a hidden state by slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from torchax_serve.kv_cache.cache_layout import CacheLayout
from torchax_serve.kv_cache.pools import CacheAllocation, HeadScales, PagedCache, PoolAllocator
from torchax_serve.kv_cache.slot_states import PagedCacheWithStates


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadState:
    """Hidden states of the last computed token of each slot, donated with the pools."""

    hidden: jax.Array  # float[num_slots, width]
    lens: jax.Array  # int32[num_slots], number of computed tokens; 0: nothing is known of the slot

    def without(self, slot: int) -> HeadState:
        """Returns the state after `slot` was given to another request."""
        return HeadState(self.hidden, _without(self.lens, np.int32(slot)))

    def kept(self, slots: jax.Array, is_active: jax.Array, hidden: jax.Array, lens: jax.Array) -> HeadState:
        """Returns the state with what is known of the rows in `slots` int32[S]; to be traced.

        Args:
            slots: Slot of each row.
            is_active: Rows that have something new, bool[S].
            hidden: float[S, width], of each row's last token.
            lens: int32[S], number of its tokens that are computed.
        """
        where = jax.numpy.where(is_active, slots, len(self.lens))
        return HeadState(
            self.hidden.at[where].set(hidden.astype(self.hidden.dtype), mode="drop"),
            self.lens.at[where].set(lens, mode="drop"),
        )


@jax.jit
def _without(lens: jax.Array, slot: jax.Array) -> jax.Array:
    return lens.at[slot].set(0)


def without_slot(pools: tuple[Any, ...], slot: int) -> tuple[Any, ...]:
    """Returns pools with a `HeadState` last, after `slot` was given to another request."""
    *others, state = pools
    assert isinstance(state, HeadState)
    return (*others, state.without(slot))


def empty_state(pages: PoolAllocator, num_slots: int, width: int, dtype: Any) -> HeadState:
    """Allocates the hidden states of all slots, of which nothing is known."""
    hidden = pages.slot_states((num_slots, width), np.dtype(dtype))
    return HeadState(hidden, pages.slot_states((num_slots,), np.dtype(np.int32)))


def hidden_bytes(num_slots: int, width: int, dtype: Any) -> int:
    """Returns the bytes of the hidden states of all slots, and of their lengths."""
    return num_slots * (width * np.dtype(dtype).itemsize + 4)


class HeadedCache(PagedCache):
    """Pools of a `CacheAllocation`, that of a head last, and behind them a `HeadState`.

    Args:
        plan: Number of pages of each group.
        num_slots: Number of slots.
        width, dtype: Columns of the hidden states, and their dtype.
        pages: Allocator of the pools; None: the default device.
        scales: Scales of each layer but the head's if the pools are in 8 bits.
    """

    def __init__(
        self,
        plan: CacheAllocation,
        num_slots: int,
        width: int,
        dtype: Any,
        pages: PoolAllocator | None = None,
        scales: Sequence[HeadScales] | None = None,
    ) -> None:
        self._num_slots, self._width, self._dtype = num_slots, width, np.dtype(dtype)
        super().__init__(plan, pages, scales)

    def reset(self) -> None:
        """Allocates pools and states again, all zeros."""
        super().reset()
        state = empty_state(self._pages, self._num_slots, self._width, self._dtype)
        self.pools = (*self.pools, state)  # type: ignore[arg-type]

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all slots."""
        return hidden_bytes(self._num_slots, self._width, self._dtype)

    def free_slot(self, slot: int) -> None:
        """Drops the hidden state of a slot, which was given to another request."""
        self.pools = without_slot(self.pools, slot)


class HeadedCacheWithStates(PagedCacheWithStates):
    """Pools, that of a head last, behind them a `HeadState`, and states by slot.

    Args:
        plan: Number of pages of each group.
        layout: What a request stores besides.
        num_slots: Number of slots.
        width, dtype: Columns of the hidden states, and their dtype.
        pages: Allocator of pools and states; None: the default device.
    """

    def __init__(
        self,
        plan: CacheAllocation,
        layout: CacheLayout,
        num_slots: int,
        width: int,
        dtype: Any,
        pages: PoolAllocator | None = None,
    ) -> None:
        self._width, self._dtype = width, np.dtype(dtype)
        super().__init__(plan, layout, num_slots, pages)

    def reset(self) -> None:
        """Allocates pools and states again, all zeros."""
        super().reset()
        state = empty_state(self._pages, self._num_slots, self._width, self._dtype)
        self.pools = (*self.pools, state)  # type: ignore[arg-type]

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all slots."""
        return super().state_bytes + hidden_bytes(self._num_slots, self._width, self._dtype)

    def free_slot(self, slot: int) -> None:
        """Drops the hidden state of a slot, which was given to another request."""
        self.pools = without_slot(self.pools, slot)
