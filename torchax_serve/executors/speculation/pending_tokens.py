"""Verify steps of models with recurrent states, which cannot be taken back.

A forward that verifies drafts leaves states with the rejected ones in them. So its states are dropped: those of a slot
stay where they are, and the tokens accepted since then, the pending ones, are computed again in front of the next
drafts. When they are many, a forward of `commit_len` of them alone moves the states ahead. Where a forward waits for
the weights it costs about the same for one token and for sixteen.

Keys and values need none of it: what is behind a row's length is not read, and written again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from model_adapters.caches.packed_batch import PackedBatch, Pool
from model_adapters.ops.compressed_weight import Weights
from torchax_serve.executors.per_sequence.blocks import BlockForward
from torchax_serve.executors.per_sequence.rows import extend_rows
from torchax_serve.executors.step_inputs import PackedStepSpec
from torchax_serve.executors.traced_function import TracedFunction
from torchax_serve.kv_cache.cache_layout import CacheLayout, Leaves, SlotStates
from torchax_serve.kv_cache.slot_states import gather, scatter

MIN_COMMIT_LEN = 8
"""Fewest tokens of a forward that moves states ahead: fewer cost about as much, and are needed more often."""


Constrained = Callable[[tuple[Pool, ...], SlotStates], tuple[tuple[Pool, ...], SlotStates]]
"""Constrains pools and states to the cache's sharding."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PendingTokens:
    """Tokens by slot that are not in its states yet; the last row is padding's."""

    lens: jax.Array  # int32[num_slots + 1], number of tokens of the text that the states hold
    ids: jax.Array  # int32[num_slots + 1, width], the tokens behind them


class SequenceMemory(NamedTuple):
    """What a verify step reads and writes, donated."""

    pools: tuple[Pool, ...]
    states: SlotStates
    pending: PendingTokens


class Rows(NamedTuple):
    """The rows of a step, and where their states are."""

    is_active: jax.Array  # bool[S]
    slots: jax.Array  # int32[S]; padding's for rows that are not active
    table: jax.Array  # int32[S, pages]
    adapters: jax.Array | None  # int32[S]
    lens: jax.Array  # int32[S], tokens that the states hold
    num_pending: jax.Array  # int32[S], pending tokens
    ids: jax.Array  # int32[S, width], pending tokens first


@dataclasses.dataclass(frozen=True)
class PendingSizes:
    """Numbers of pending tokens for steps with `num_drafts` drafts.

    Attributes:
        num_drafts: Most drafts of a row.
        has_states: Whether the model has states that tokens change; without any no token is pending.
        block_len: Most tokens of one forward.
    """

    num_drafts: int
    has_states: bool
    block_len: int

    @property
    def commit_len(self) -> int:
        """Tokens by which a forward moves states ahead; a step accepts no more than that."""
        return max(MIN_COMMIT_LEN, 1 << self.num_drafts.bit_length())

    def most(self, num_rows: int) -> int:
        """Returns the most pending tokens of a row in front of its drafts.

        Several rows may have more, so that their states move together.
        """
        return self.commit_len * (1 if num_rows == 1 else 2) - 1 if self.has_states else 0

    def width(self, num_rows: int) -> int:
        """Returns the tokens of a row of a step: pending ones, the last one, and drafts."""
        num_tokens = self.most(num_rows) + 1 + self.num_drafts
        return num_tokens if num_tokens <= self.block_len else -(-num_tokens // self.block_len) * self.block_len

    @property
    def catch_up_lens(self) -> tuple[int, ...]:
        """Tokens of the forwards that leave no token pending, descending to 1."""
        return (self.commit_len, self.commit_len // 4, 1)


class PendingForward:
    """Forwards of rows behind their pending tokens, to be traced.

    Args:
        forward: Forward of one request.
        layout: Layout of its cache.
        sizes: Numbers of pending tokens.
        num_slots: Number of slots; also the slot of padding.
        constrained: Constrains pools and states to the cache's sharding.
    """

    def __init__(
        self,
        forward: BlockForward,
        layout: CacheLayout,
        sizes: PendingSizes,
        num_slots: int,
        constrained: Constrained,
    ) -> None:
        self._forward, self._layout, self._sizes, self._num_slots = forward, layout, sizes, num_slots
        self._constrained = constrained

    def verify(
        self, weights: Weights, memory: SequenceMemory, batch: PackedBatch, spec: PackedStepSpec
    ) -> tuple[jax.Array, SequenceMemory, jax.Array | None]:
        """Computes a verify step; returns logits float[T, vocab] of its tokens, and the memory.

        Hidden states of the tokens, float[T, width], are the third result where the forward returns them.
        States move ahead first, where too many tokens are pending.
        """
        num_rows, num_tokens = spec.num_rows, spec.num_tokens
        rows, counts = self._rows(memory, batch)
        states, rows = self._with_states_ahead(weights, memory, rows, num_rows)
        width = self._sizes.width(num_rows)
        ids, column = rows.ids[:, :width], jnp.arange(width, dtype=jnp.int32)
        ids = jnp.pad(ids, ((0, 0), (0, width - ids.shape[1])))
        offset = column - rows.num_pending[:, None]
        new = batch.token_ids[jnp.clip(batch.cu_q_lens[:-1, None] + offset, 0, num_tokens - 1)]
        ids = jnp.where(offset < 0, ids, jnp.where(offset < counts[:, None], new, 0))
        last = jnp.arange(self._sizes.num_drafts + 1, dtype=jnp.int32)
        found, news = extend_rows(
            self._forward,
            weights,
            self._leaves(memory.pools, states, rows),
            rows.lens,
            ids,
            self._layout,
            lens=jnp.maximum(rows.num_pending + counts, 1),
            wanted=jnp.minimum(rows.num_pending[:, None] + last, width - 1),
            adapters=rows.adapters,
            block_len=self._sizes.block_len,
        )
        new_pages, _ = self._layout.partition(news)
        total, after = jnp.where(rows.is_active, rows.num_pending + counts, 0), jax.tree.leaves((found, new_pages))
        pools = tuple(
            scatter(pool, rows.table, rows.lens, total, new, leaf, after, is_on_mesh=self._layout.is_on_mesh)
            for pool, new, leaf in zip(memory.pools, new_pages, self._layout.pages, strict=True)
        )
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.minimum(jnp.sum(token[:, None] >= batch.cu_q_lens[1:], axis=1), num_rows - 1)
        index = jnp.clip(token - batch.cu_q_lens[row], 0, self._sizes.num_drafts)
        memory = self._memory(pools, states, memory.pending, rows._replace(ids=ids))
        if not isinstance(found, tuple):
            return found[row, index], memory, None
        logits, hidden = found
        return logits[row, index], memory, hidden[row, jnp.minimum(rows.num_pending[row] + index, width - 1)]

    def catch_up(
        self,
        weights: Weights,
        memory: SequenceMemory,
        slots: jax.Array,
        ends: jax.Array,
        table: jax.Array,
        adapters: Any,
    ) -> SequenceMemory:
        """Moves the states of rows ahead until no token is pending.

        Args:
            weights: Weights by name.
            memory: Pages, states, and pending tokens.
            slots: int32[S], slot of each row.
            ends: int32[S], number of tokens that are computed; 0 for a row that is not used.
            table: int32[S, pages].
            adapters: int32[S] or None.
        """
        is_active = ends > 0
        slots = jnp.where(is_active, slots, self._num_slots)
        lens, ids = memory.pending.lens[slots], memory.pending.ids[slots]
        num_pending = jnp.where(is_active, ends - lens, 0)
        states, rows = memory.states, Rows(is_active, slots, table, adapters, lens, num_pending, ids)
        for num_tokens in self._sizes.catch_up_lens:
            states, rows = self._moved(weights, memory.pools, states, rows, num_tokens, num_tokens - 1)
        return self._memory(memory.pools, states, memory.pending, rows)

    def _rows(self, memory: SequenceMemory, batch: PackedBatch) -> tuple[Rows, jax.Array]:
        """Returns the rows of a step, and their new tokens int32[S]."""
        is_active = batch.kv_lens > 0
        assert batch.slots is not None
        slots = jnp.where(is_active, batch.slots, self._num_slots)
        counts = jnp.where(is_active, jnp.diff(batch.cu_q_lens), 0)
        first = jnp.where(is_active, batch.kv_lens - counts, 0)
        lens, ids = first, memory.pending.ids[slots]
        if self._sizes.has_states:
            lens = jnp.where(is_active, memory.pending.lens[slots], 0)
        starts = jnp.minimum(batch.cu_q_lens[:-1], len(batch.token_ids) - 1)
        adapters = None if batch.adapters is None else batch.adapters[starts]
        return Rows(is_active, slots, batch.page_tables[0], adapters, lens, first - lens, ids), counts

    def _with_states_ahead(
        self, weights: Weights, memory: SequenceMemory, rows: Rows, num_rows: int
    ) -> tuple[SlotStates, Rows]:
        """Returns states and rows with at most `PendingSizes.most` pending tokens each."""
        if not self._sizes.has_states:
            return memory.states, rows
        most = self._sizes.most(num_rows)
        return self._moved(weights, memory.pools, memory.states, rows, self._sizes.commit_len, most)

    def _moved(
        self, weights: Weights, pools: tuple[Pool, ...], states: SlotStates, rows: Rows, num_tokens: int, most: int
    ) -> tuple[SlotStates, Rows]:
        """Moves states ahead, `num_tokens` at a time, until no row has more than `most` pending."""
        advance = self._advance(weights, pools, states, rows, num_tokens)
        # The carry: states of all slots, and the rows, whose `lens + num_pending` stays the same. Each round moves rows
        # with `num_tokens` pending tokens or more, `most` being no less than `num_tokens - 1`: so it comes to an end.
        moved: tuple[SlotStates, Rows] = jax.lax.while_loop(
            lambda carry: (carry[1].num_pending > most).any(), lambda carry: advance(pools, *carry), (states, rows)
        )
        return moved

    def _advance(
        self, weights: Weights, pools: tuple[Pool, ...], states: SlotStates, rows: Rows, num_tokens: int
    ) -> TracedFunction:
        """Returns the traced function that moves states of rows ahead by `num_tokens` tokens.

        Rows with fewer pending tokens stay where they are.
        """

        def advance(pools: tuple[Pool, ...], states: SlotStates, rows: Rows) -> tuple[SlotStates, Rows]:
            is_moved = rows.num_pending >= num_tokens
            _, news = extend_rows(
                self._forward,
                weights,
                self._leaves(pools, states, rows),
                rows.lens,
                rows.ids[:, :num_tokens],
                self._layout,
                adapters=rows.adapters,
                block_len=self._sizes.block_len,
            )
            _, after = self._layout.partition(news)
            slots, sources = jnp.where(is_moved, rows.slots, self._num_slots), jnp.zeros_like(rows.lens)
            states = self._layout.scatter_slots(
                states, slots, after, is_first=False, source_lens=sources, after=jax.tree.leaves(after)
            )
            step = jnp.where(is_moved, num_tokens, 0)
            column = step[:, None] + jnp.arange(rows.ids.shape[1], dtype=jnp.int32)
            ids = jnp.take_along_axis(rows.ids, jnp.minimum(column, rows.ids.shape[1] - 1), axis=1)
            return states, rows._replace(lens=rows.lens + step, num_pending=rows.num_pending - step, ids=ids)

        return TracedFunction(advance, pools, states, rows)

    def _leaves(self, pools: tuple[Pool, ...], states: SlotStates, rows: Rows) -> Leaves:
        of_pools = zip(pools, self._layout.pages, strict=True)
        on_mesh = self._layout.is_on_mesh
        dense = tuple(gather(pool, rows.table, rows.lens, leaf, is_on_mesh=on_mesh) for pool, leaf in of_pools)
        return self._layout.merge(dense, self._layout.gather_slots(states, rows.slots, 0))

    def _memory(
        self, pools: tuple[Pool, ...], states: SlotStates, pending: PendingTokens, rows: Rows
    ) -> SequenceMemory:
        pools, states = self._constrained(pools, states)
        if not self._sizes.has_states:
            return SequenceMemory(pools, states, pending)
        ids = jnp.pad(rows.ids, ((0, 0), (0, pending.ids.shape[1] - rows.ids.shape[1])))
        kept = PendingTokens(pending.lens.at[rows.slots].set(rows.lens), pending.ids.at[rows.slots].set(ids))
        return SequenceMemory(pools, states, kept)
