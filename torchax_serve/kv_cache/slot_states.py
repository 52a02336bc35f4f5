"""The cache of the per-sequence executor: pages of keys and values, and states by slot."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.caches.packed_batch import Pool, ScaledPool, pages_of, with_pages
from model_adapters.ops.attention_args import KVScales
from model_adapters.ops.cpu import pages as page_kernels
from model_adapters.ops.kv_pool import has_copy_kernels, quantize, split, write_tokens_at
from torchax_serve.kv_cache.cache_layout import CacheLayout, SlotStates, SlotStateSpec
from torchax_serve.kv_cache.pools import CacheAllocation, HeadScales, PagedCache, PagedLayerSpec, PoolAllocator
from torchax_serve.kv_cache.scaled_state import ScaledState


class PagedCacheWithStates(PagedCache):
    """Pools of a `CacheAllocation`, and states by slot; the last row of a state is padding's."""

    def __init__(
        self,
        plan: CacheAllocation,
        layout: CacheLayout,
        num_slots: int,
        pages: PoolAllocator | None = None,
        scales: Sequence[HeadScales] | None = None,
    ) -> None:
        self.states: SlotStates = ()
        self._layout, self._rows, self._num_slots = layout, layout.rows, num_slots
        super().__init__(plan, pages, scales)

    def reset(self) -> None:
        """Allocates pools and states again, all zeros."""
        super().reset()
        self.states = ()
        self.states = tuple(map(self._zeros, self._rows))

    def _zeros(self, row: SlotStateSpec) -> jax.Array | ScaledState:
        shape = (self._num_slots + 1, *self._layout.stored_shape(row))
        if row.stored_dtype is None:
            return self._pages.slot_states(shape, row.dtype)
        by_head = (*shape[:3], 1, 1)
        return ScaledState(
            self._pages.slot_states(shape, row.stored_dtype), self._pages.slot_states(by_head, np.dtype(np.float32))
        )

    def release(self) -> None:
        """Frees pools and states until `reset`."""
        super().release()
        self.states = ()

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all slots."""
        return sum(row.num_bytes for row in self._rows) * (self._num_slots + 1)

    @property
    def is_lost(self) -> bool:
        """Whether a failed step has deleted a donated pool or state."""
        return super().is_lost or any(array.is_deleted() for array in jax.tree.leaves(self.states))


def gather(
    pool: Pool, table: jax.Array, starts: jax.Array, spec: PagedLayerSpec, *, is_on_mesh: bool = False
) -> jax.Array:
    """Gathers dense keys and values ``[S, 1, heads, capacity, width]`` from pages.

    They are zero after `starts` tokens: another request's NaN there would not be removed by an attention weight of 0.

    Args:
        pool: ``[num_pages, heads, page_size, width]``, also in 8 bits.
        table: Page table int32[S, num_pages].
        starts: int32[S], number of tokens stored.
        spec: Form of a token for the model.
        is_on_mesh: Whether the pool may be divided among devices.
    """
    num_rows, num_pages = table.shape
    pages = pages_of(pool)
    _, heads, page_size, width = pages.shape
    has_kernels = has_copy_kernels(is_on_mesh)
    if has_kernels:
        dense = page_kernels.read_tokens(pages, table, starts, slice(None))
    else:
        dense = jnp.swapaxes(pages[table], 1, 2).reshape(num_rows, heads, num_pages * page_size, width)
    if isinstance(pool, ScaledPool):
        keys, values = split(dense, spec.k_dim, slice(spec.k_dim, width), KVScales(pool.k_scale, pool.v_scale))
        dense = jnp.concatenate([keys, values], axis=-1).astype(spec.dtype)
    if has_kernels:
        return dense[:, None]
    is_stored = jnp.arange(num_pages * page_size) < starts[:, None]
    return jnp.where(is_stored[:, None, :, None], dense, 0)[:, None]


def scatter(
    pool: Pool,
    table: jax.Array,
    starts: jax.Array,
    lens: jax.Array,
    new: jax.Array,
    spec: PagedLayerSpec,
    after: Sequence[jax.Array] = (),
    *,
    is_on_mesh: bool = False,
) -> Pool:
    """Returns the pool with new keys and values written after the `starts` tokens of each row.

    Padding is dropped and not written to the null page.

    Args:
        pool: ``[num_pages, heads, page_size, width]``, also in 8 bits.
        table: Page table int32[S, num_pages].
        starts: int32[S], number of tokens stored.
        lens: int32[S], number of new tokens without padding.
        new: ``[S, T, heads, width]``.
        spec: Form of a token for the model.
        after: Results of all reads of the pool, so that it need not be copied for them.
        is_on_mesh: Whether the pool may be divided among devices.
    """
    num_rows, num_tokens = new.shape[:2]
    steps = jnp.arange(num_tokens, dtype=jnp.int32)
    positions = jnp.where(steps < lens[:, None], starts[:, None] + steps, -1).reshape(-1)
    rows = jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), num_tokens)
    flat = new.reshape(num_rows * num_tokens, *new.shape[2:])
    scales = KVScales(pool.k_scale, pool.v_scale) if isinstance(pool, ScaledPool) else None
    keys, values = flat[..., : spec.k_dim], flat[..., spec.k_dim :]
    pages = pages_of(pool)
    if has_copy_kernels(is_on_mesh):
        if scales is not None:
            keys, values = quantize(keys, scales.k, pages.dtype), quantize(values, scales.v, pages.dtype)
            flat = jnp.concatenate([keys, values], axis=-1)
        pages = page_kernels.write_tokens(pages, table, rows, positions, flat.astype(pages.dtype), after)
    else:
        pages = write_tokens_at(pages, table, rows, positions, keys, values, scales)
    return with_pages(pool, pages)
