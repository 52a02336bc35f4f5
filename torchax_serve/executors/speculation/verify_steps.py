"""Inputs of verify steps: one array of integers for a call, and the batch of each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.caches.packed_batch import PackedBatch
from torchax_serve.executors.slot_adapters import SlotAdapters
from torchax_serve.executors.speculation.prompt_lookup import TokenHistory, VerifyRows, last_tokens, lookup, verify_rows
from torchax_serve.executors.step_inputs import PackedStepSpec
from torchax_serve.scheduler import DraftRows, PlanRow


class DraftSpecs(Protocol):
    """Sizes of an executor's verify steps."""

    @property
    def num_slots(self) -> int:
        """Maximum number of rows of a step."""

    @property
    def max_len(self) -> int:
        """Most tokens of a row."""

    @property
    def max_num_steps(self) -> int:
        """Most steps of a dispatch."""

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Numbers of rows of a step, ascending."""

    @property
    def draft_ends(self) -> tuple[int, ...]:
        """Lengths of rows up to which steps have the same size, ascending."""

    def of_drafts(self, num_rows: int, num_tokens: int, end: int) -> PackedStepSpec:
        """Returns the spec of a step of rows with drafts, which end at `end` tokens or before."""


@dataclasses.dataclass(frozen=True)
class VerifySpec:
    """Static arguments of verify steps; numbers of steps and drafts are inputs.

    Attributes:
        packed: A step of ``S * (k + 1)`` tokens with logits of all.
        max_num_steps: Most steps of a call.
        num_drafts: Most drafts of a row, k.
        longest, shortest: Most and fewest tokens that are looked up.
        draft: Names the model that drafts; None: tokens are looked up.
        is_scored: Whether log-probabilities of the sampled tokens come out, and logits of each row's first token.
    """

    packed: PackedStepSpec
    max_num_steps: int
    num_drafts: int
    longest: int
    shortest: int
    draft: str | None = None
    is_scored: bool = False

    @property
    def size(self) -> int:
        """Number of integers in the array of a call."""
        return self.packed.num_rows * (3 + self.packed.num_tables * self.packed.pages_per_seq) + 3

    def pack(
        self,
        rows: Sequence[PlanRow],
        drafts: DraftRows,
        tables: Sequence[np.ndarray],
        num_steps: int,
        draws: bool,
        num_top: int | None,
    ) -> np.ndarray:
        """Returns the inputs of a call as one array, int32[size].

        They are the slot, the end, the most drafts and the pages of each row, the number of steps, whether to draw, and
        whether the likeliest tokens are read.
        """
        numbers = np.zeros(self.size, np.int32)
        by_row, num_rows = numbers[:-3].reshape(-1, self.packed.num_rows), len(rows)
        slots, num_pages = np.array([row.slot for row in rows], np.int32), self.packed.pages_per_seq
        by_row[0, :num_rows], by_row[1, :num_rows], by_row[2, :num_rows] = slots, drafts.ends, drafts.most
        parts = np.split(by_row[3:], max(self.packed.num_tables, 1))
        for table, pages in zip(tables, parts, strict=bool(tables)):  # states alone have no tables
            of_rows = table[slots, :num_pages]
            pages.reshape(self.packed.num_rows, num_pages)[:num_rows, : of_rows.shape[1]] = of_rows
        numbers[-3:] = num_steps, draws, bool(num_top)
        return numbers


class VerifyBatch(NamedTuple):
    """The tokens of one step."""

    packed: PackedBatch
    tokens: VerifyRows
    drafts: jax.Array  # int32[S, k]
    num_drafts: jax.Array  # int32[S], of these how many are verified
    is_active: jax.Array  # bool[S], rows that are computed


@dataclasses.dataclass(frozen=True)
class VerifySteps:
    """The unpacked inputs of a call, while it is traced."""

    spec: VerifySpec
    slots: jax.Array  # int32[S]
    ends: jax.Array  # int32[S], position of each row that is not computed any more; 0 for a row that is not used
    most: jax.Array  # int32[S], most drafts of a step
    tables: tuple[jax.Array, ...]  # by group of layers, int32[S, pages_per_seq]
    num_steps: jax.Array  # int32[]
    draws: jax.Array  # bool[]
    has_top: jax.Array  # bool[], whether the likeliest tokens are read
    adapters: jax.Array | None  # int32[S], adapter of each row; None: there are none

    @classmethod
    def unpack(cls, numbers: jax.Array, spec: VerifySpec, slot_adapters: SlotAdapters) -> Self:
        """Returns the inputs in `numbers` int32[size], with the adapters of all slots behind them."""
        with_adapters, numbers = numbers, numbers[: spec.size]
        packed = spec.packed
        by_row = numbers[:-3].reshape(-1, packed.num_rows)
        tables = jnp.split(by_row[3:], packed.num_tables) if packed.num_tables else []
        of_groups = tuple(table.reshape(packed.num_rows, packed.pages_per_seq) for table in tables)
        adapters = slot_adapters.of_rows(with_adapters, by_row[0])
        of_call = numbers[-3], numbers[-2] > 0, numbers[-1] > 0
        return cls(spec, by_row[0], by_row[1], by_row[2], of_groups, *of_call, adapters)

    def is_active(self, rows: TokenHistory) -> jax.Array:
        """Returns whether each row has something to compute, bool[S]."""
        return (rows.lens <= self.ends) & (self.ends > 0)

    def lookup(self, rows: TokenHistory) -> tuple[jax.Array, jax.Array]:
        """Looks up drafts int32[S, k], and whether a row has any, bool[S]."""
        return lookup(rows, self.spec.num_drafts, self.spec.longest, self.spec.shortest)

    def is_drafted(self, rows: TokenHistory) -> jax.Array:
        """Returns whether each row wants drafts, bool[S]."""
        return self.is_active(rows) & (self.most > 0)

    def batch(self, rows: TokenHistory, drafts: jax.Array, is_found: jax.Array) -> VerifyBatch:
        """Returns the next step of `rows`: the last token of each, and its drafts where it has some."""
        spec, active = self.spec, self.is_active(rows)
        num_drafts = jnp.where(active & is_found, jnp.clip(self.ends - rows.lens, 0, self.most), 0)
        tokens = verify_rows(num_drafts, active, spec.packed.num_tokens)
        draft = drafts[tokens.rows, jnp.maximum(tokens.offsets - 1, 0)]
        # Nothing is read of the tokens if no row is active; they still have to be positions.
        positions = jnp.maximum(rows.lens[tokens.rows] - 1 + tokens.offsets, 0)
        packed = PackedBatch(
            token_ids=jnp.where(tokens.offsets == 0, last_tokens(rows)[tokens.rows], draft),
            positions=positions,
            cu_q_lens=tokens.cu_q_lens,
            kv_lens=jnp.where(active, rows.lens + num_drafts, 0),
            last=jnp.maximum(tokens.cu_q_lens[1:] - 1, 0),
            page_tables=self.tables,
            rope_lens=positions + 1 if spec.packed.has_rope_lens else None,
            adapters=None if self.adapters is None else self.adapters[tokens.rows],
            slots=self.slots,
        )
        return VerifyBatch(packed, tokens, drafts, num_drafts, active)
