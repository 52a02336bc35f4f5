"""Packs the inputs of a step into one int32 array: each transfer costs host time.

`pack` writes the array on the host and `unpack` cuts it up on the device, both at places that follow from the spec
alone. A packed step has, in this order (`PackedStepSpec.bounds`)::

    [T] token ids, or SAMPLED_ON_DEVICE      [T] slot of each token    [T] positions    [T or 0] rotary lengths
    [S + 1] cu_q_lens    [S] kv_lens    [S] last    [S or 0] prompt lengths    [3 S or 0] snapshots
    [S * pages_per_seq] page table, for each group of layers

A decode program has ``[S]`` slots, kv_lens, ids and perhaps position deltas, the page tables, the number of steps and
whether any row draws; it derives the rest. Behind either array stand the adapters of all slots, if there are any
(`SlotAdapters`). `PackedBatch` says what the parts mean, and how padding looks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.caches.packed_batch import MediaTokens, PackedBatch, PagedLayout
from torchax_serve.executors.media_slots import MediaSpec
from torchax_serve.sampling.types import MAX_NUM_TOP
from torchax_serve.scheduler import DecodeBatch, PlanRow, StateRows

SAMPLED_ON_DEVICE = -1
"""Placeholder for the token sampled last in the row's slot, which the host may not know yet."""


NO_SNAPSHOTS = StateRows()
"""Of rows that begin with the state in their slot, if any, and keep none elsewhere."""


@dataclasses.dataclass(frozen=True)
class PackedStepSpec:
    """Static arguments of a packed step: sizes and layout of its inputs."""

    num_tokens: int  # T
    num_rows: int  # S
    pages_per_seq: int
    layout: PagedLayout
    batch_invariant: bool
    has_rope_lens: bool = False  # rotary frequencies depend on lengths
    lora: str = ""  # form of the adapters' matrices; empty: there are none
    head: str = ""  # names the draft head that follows each step; empty: there is none
    media: MediaSpec | None = None
    num_top: int = MAX_NUM_TOP  # top log-probabilities of a step that returns them

    @property
    def num_tables(self) -> int:
        """Number of page tables: one for each group of layers."""
        return max(self.layout.groups, default=-1) + 1

    @functools.cached_property
    def bounds(self) -> tuple[slice, ...]:
        """Slices of the array, in the order of the inputs; page tables come last."""
        tokens, rows = self.num_tokens, self.num_rows
        tables = [rows * self.pages_per_seq] * self.num_tables
        rope_lens = tokens if self.has_rope_lens else 0
        of_states = [rows, 3 * rows] if self.layout.has_states else [0, 0]
        ends = itertools.accumulate([0, tokens, tokens, tokens, rope_lens, rows + 1, rows, rows, *of_states, *tables])
        return tuple(slice(begin, end) for begin, end in itertools.pairwise(ends))

    @property
    def size(self) -> int:
        """Number of integers in the array of a step."""
        return int(self.bounds[-1].stop)

    def pack(self, rows: Sequence[PlanRow], tables: Sequence[np.ndarray], ahead: int) -> np.ndarray:
        """Returns the inputs of a step as one array, int32[size].

        Args:
            rows: Rows of a plan.
            tables: Page tables by group, int32[num_slots, pages_per_seq].
            ahead: Number of decode steps since the first step of the plan.
        """
        numbers = np.zeros(self.size, np.int32)
        ids, token_slots, positions, rope_lens, cu_q_lens, kv_lens, last, prompt_lens, snapshots, *parts = [
            numbers[part] for part in self.bounds
        ]
        num_rows = len(rows)
        slots = np.array([row.slot for row in rows], np.int32)
        starts = np.array([row.context_len for row in rows], np.int32) + np.int32(ahead)
        num_tokens = np.array([row.num_tokens for row in rows], np.int32)
        ends = np.cumsum(num_tokens, dtype=np.int32)
        total = int(ends[-1])
        token_slots[:total] = np.repeat(slots, num_tokens)
        positions[:total] = np.arange(total, dtype=np.int32) + np.repeat(starts - ends + num_tokens, num_tokens)
        if self.has_rope_lens:
            least = np.repeat(np.array([row.rope_len for row in rows], np.int32), num_tokens)
            rope_lens[:total] = np.maximum(least, positions[:total] + 1)
        ids[:total] = SAMPLED_ON_DEVICE
        for row, end in zip(rows, ends.tolist(), strict=True):
            if row.token_ids is not None:
                ids[end - row.num_tokens : end] = row.token_ids
        # Padding repeats the last token: kernels compute equal rows once.
        for part in (ids, token_slots, positions, rope_lens):
            part[total:] = part[total - 1 : total]
        cu_q_lens[1 : num_rows + 1] = ends
        cu_q_lens[num_rows + 1 :] = total
        kv_lens[:num_rows] = starts + num_tokens
        last[:num_rows] = ends - 1
        last[num_rows:] = total - 1
        if self.layout.has_states:
            prompt_lens[:num_rows] = [row.prompt_len for row in rows]
            snapshots.reshape(3, -1)[:, :num_rows] = np.array([row.states or NO_SNAPSHOTS for row in rows]).T
        for part, table in zip(parts, tables, strict=True):
            part.reshape(self.num_rows, -1)[:num_rows] = table[slots]
        return numbers

    def unpack(self, numbers: jax.Array, last_tokens: jax.Array, media: MediaTokens | None = None) -> PackedBatch:
        """Returns the batch in `numbers` int32[size].

        Ids that are `SAMPLED_ON_DEVICE` are taken from `last_tokens` int32[num_slots].
        """
        ids, slots, positions, rope_lens, cu_q_lens, kv_lens, last, prompt_lens, snapshots, *tables = [
            numbers[part] for part in self.bounds
        ]
        return PackedBatch(
            token_ids=jnp.where(ids == SAMPLED_ON_DEVICE, last_tokens[slots], ids),
            positions=positions,
            cu_q_lens=cu_q_lens,
            kv_lens=kv_lens,
            last=last,
            page_tables=tuple(table.reshape(self.num_rows, self.pages_per_seq) for table in tables),
            rope_lens=rope_lens if self.has_rope_lens else None,
            media=media,
            slots=slots[last] if self.head or self.layout.has_states else None,
            prompt_lens=prompt_lens if self.layout.has_states else None,
            snapshots=snapshots.reshape(3, -1) if self.layout.has_states else None,
        )


@dataclasses.dataclass(frozen=True)
class PackedDecodeSpec:
    """Static arguments of decode steps; the number of steps is an input.

    One step or several; the last one's logits come out, too, for plans whose tokens are sampled elsewhere.
    """

    packed: PackedStepSpec
    max_num_steps: int
    has_deltas: bool = False  # positions for rotary embeddings are others, by a number for each row

    @property
    def size(self) -> int:
        """Number of integers in the array of a call."""
        tables = self.packed.num_tables * self.packed.pages_per_seq
        return self.packed.num_rows * (3 + self.has_deltas + tables) + 2

    def pack(
        self,
        rows: Sequence[PlanRow],
        tables: Sequence[np.ndarray],
        *,
        num_steps: int = 1,
        draws: bool = False,
        ahead: int = 0,
        deltas: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns the inputs of a call as one array, int32[size].

        Args:
            rows: Decode rows of a plan.
            tables: Page tables by group, int32[num_slots, pages_per_seq].
            num_steps: Number of decode steps.
            draws: Whether any row samples.
            ahead: Number of decode steps since the first step of the plan.
            deltas: int32[num_slots], of each slot, with `has_deltas`.
        """
        numbers = np.zeros(self.size, np.int32)
        by_row, num_rows = numbers[:-2].reshape(-1, self.packed.num_rows), len(rows)
        if isinstance(rows, DecodeBatch):
            slots, starts = rows.slots, rows.starts
            by_row[2, :num_rows] = SAMPLED_ON_DEVICE
        else:
            slots = np.array([row.slot for row in rows], np.int32)
            starts = np.array([row.context_len for row in rows], np.int32)
            by_row[2, :num_rows] = [SAMPLED_ON_DEVICE if row.token_ids is None else row.token_ids[0] for row in rows]
        by_row[0, :num_rows] = slots
        by_row[1, :num_rows] = starts + (1 + ahead)
        if self.has_deltas:
            assert deltas is not None
            by_row[3, :num_rows] = deltas[slots]
        pages_by_row = by_row[3 + self.has_deltas :]
        for table, pages in zip(tables, np.split(pages_by_row, max(self.packed.num_tables, 1)), strict=False):
            table.take(slots, axis=0, out=pages.reshape(self.packed.num_rows, -1)[:num_rows], mode="clip")
        numbers[-2:] = num_steps, draws
        return numbers

    def unpack(self, numbers: jax.Array) -> tuple[PackedBatch, jax.Array, jax.Array, jax.Array]:
        """Returns the unpacked arguments of a decode program.

        They are the first batch, whose token ids may be `SAMPLED_ON_DEVICE`, slots int32[S], number of steps, whether
        to draw.
        """
        by_row = numbers[:-2].reshape(-1, self.packed.num_rows)
        slots, lengths, ids = by_row[0], by_row[1], by_row[2]
        num_tables = self.packed.num_tables
        tables = jnp.split(by_row[3 + self.has_deltas :], num_tables) if num_tables else []
        index, num_in_use = jnp.arange(self.packed.num_rows + 1), jnp.sum(lengths > 0)
        repeated = jnp.minimum(index[:-1], jnp.maximum(num_in_use - 1, 0))  # padding repeats the last row
        slots = slots[repeated]
        batch = PackedBatch(
            token_ids=ids[repeated],
            positions=jnp.maximum(lengths[repeated] - 1, 0),
            cu_q_lens=jnp.minimum(index, num_in_use),
            kv_lens=lengths,
            last=repeated,
            page_tables=tuple(table.reshape(self.packed.num_rows, self.packed.pages_per_seq) for table in tables),
            deltas=by_row[3][repeated] if self.has_deltas else None,
            slots=slots if self.packed.head or self.packed.layout.has_states else None,
        )
        return batch, slots, numbers[-2], numbers[-1] > 0
