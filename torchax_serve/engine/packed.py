"""The model on a paged cache, packed: one program per bucket of tokens and rows.

Decode is a program of its own, one token a row. Every other step, chunks of prompts with or without decode rows beside
them, is a packed run of tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.arrays import from_host
from model_adapters.ops.cpu.kernels import one_order
from model_adapters.ops.packed_weight import Weights
from model_adapters.paged import PackedBatch, PagedLayout, Pool
from model_adapters.program import ModelProgram
from torchax_serve.buckets import ladder, rung, token_rungs
from torchax_serve.engine.cache import PagedCache
from torchax_serve.engine.sampler import RowOptions, SamplerSpec, SamplerState, sample
from torchax_serve.program_cache import KeptFunction, ProgramCache
from torchax_serve.scheduling import PlanRow

ON_DEVICE = -1
"""Stands for a token id that was sampled in the row's slot and that the host may not know yet."""


@dataclasses.dataclass(frozen=True)
class PackedSpec:
    """The static part of a packed step."""

    num_tokens: int  # T
    num_rows: int  # S
    pages_per_seq: int
    layout: PagedLayout
    batch_invariant: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the parts of a step's one array of integers, in order; tables last."""
        tokens, rows = self.num_tokens, self.num_rows
        num_groups = max(self.layout.groups) + 1
        return (tokens, tokens, tokens, rows + 1, rows, rows, *[rows * self.pages_per_seq] * num_groups)

    def slots(self, numbers: jax.Array) -> jax.Array:
        """int32[T]: the slot of each token's sequence."""
        return numbers[self.num_tokens : 2 * self.num_tokens]

    def unpack(self, numbers: jax.Array, last_tokens: jax.Array) -> PackedBatch:
        """The batch in `numbers`; ids that are `ON_DEVICE` are taken from `last_tokens` int32[num_slots]."""
        parts = jnp.split(numbers, np.cumsum(self.sizes)[:-1])
        ids, slots, positions, cu_q_lens, kv_lens, last, *tables = parts
        return PackedBatch(
            token_ids=jnp.where(ids == ON_DEVICE, last_tokens[slots], ids),
            positions=positions,
            cu_q_lens=cu_q_lens,
            kv_lens=kv_lens,
            last=last,
            page_tables=tuple(table.reshape(self.num_rows, self.pages_per_seq) for table in tables),
        )


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """The static part of decode steps with the choice of tokens among them; how many steps is told at each call."""

    packed: PackedSpec
    max_num_steps: int


class PackedModel:
    """Runs the rows of a plan on a `PagedCache`.

    Args:
        program: of the model.
        weights: by name.
        cache: the pools, replaced by each step.
        programs: where compiled steps are kept.
        num_slots: most rows of a step.
        token_budget: most tokens of a step.
        max_num_steps: most decode steps in one dispatch.
        batch_invariant: whether products sum in one order for any number of rows.
    """

    def __init__(
        self,
        program: ModelProgram,
        weights: Weights,
        cache: PagedCache,
        programs: ProgramCache,
        *,
        num_slots: int,
        token_budget: int,
        max_num_steps: int = 1,
        batch_invariant: bool = False,
    ) -> None:
        self._program, self._weights, self._cache = program, weights, cache
        self._max_num_steps = max_num_steps
        self._batch_invariant = batch_invariant
        self._decode_rungs = ladder(num_slots)
        self._row_rungs = ladder(num_slots, 4, 4) if num_slots > 4 else (num_slots,)
        self._token_rungs = token_rungs(token_budget)
        kept = partial(KeptFunction, programs, facts=program.found_out, recall=program.recall)
        self._programs: dict[PackedSpec | DecodeSpec, Any] = {}
        self._step = kept("packed", self._run, donate=["pools"])
        self._decode_steps = kept("decode_steps", self._decode, donate=["pools", "state"])

    def _forward(
        self, weights: Weights, pools: tuple[Pool, ...], batch: PackedBatch, spec: PackedSpec
    ) -> tuple[jax.Array, tuple[Pool, ...]]:
        with one_order(spec.batch_invariant):
            return self._program.forward_packed(weights, pools, batch, spec.layout)

    def _run(
        self,
        weights: Weights,
        pools: tuple[Pool, ...],
        last_tokens: jax.Array,
        numbers: jax.Array,
        spec: PackedSpec,
    ) -> tuple[jax.Array, tuple[Pool, ...]]:
        """Logits [S, vocab] (or [T, vocab]) in the model's dtype, and the pools."""
        return self._forward(weights, pools, spec.unpack(numbers, last_tokens), spec)

    def _decode(
        self,
        weights: Weights,
        pools: tuple[Pool, ...],
        state: SamplerState,
        numbers: jax.Array,
        options: RowOptions,
        spec: DecodeSpec,
    ) -> tuple[jax.Array, tuple[Pool, ...], SamplerState]:
        """int32[max_num_steps, S] tokens, each step fed with those of the one before; the pools; the sampler's state.

        Behind the numbers of a packed step stand two more: how many steps, and whether any row draws its tokens.
        """
        numbers, num_steps, draws = numbers[:-2], numbers[-2], numbers[-1] > 0
        batch = spec.packed.unpack(numbers, state.last_tokens)
        slots = spec.packed.slots(numbers)
        in_use = batch.kv_lens > 0

        def step(index: jax.Array, carry: Any) -> Any:
            tokens, pools, state = carry
            now = dataclasses.replace(
                batch,
                token_ids=state.last_tokens[slots],
                positions=batch.positions + index,
                kv_lens=batch.kv_lens + jnp.where(in_use, index, 0),
            )
            logits, pools = self._forward(weights, pools, now, spec.packed)
            args = options.after(index), state, logits
            # Behind the condition XLA would look for the maxima on one thread.
            greedy = sample(SamplerSpec("greedy"), *args)
            sampled, state = jax.lax.cond(draws, lambda: sample(SamplerSpec("sampled"), *args), lambda: greedy)
            return tokens.at[index].set(sampled.tokens), pools, state

        tokens = jnp.zeros((spec.max_num_steps, spec.packed.num_rows), jnp.int32)
        return jax.lax.fori_loop(0, num_steps, step, (tokens, pools, state))

    def decode(
        self,
        rows: Sequence[PlanRow],
        tables: Sequence[np.ndarray],
        state: SamplerState,
        options: RowOptions,
        num_steps: int,
        draws: bool,
    ) -> tuple[jax.Array, SamplerState]:
        """Decode steps of `rows`, choice of tokens included, in one dispatch.

        Args:
            rows: of a plan, all of which decode.
            tables: by group, int32[num_slots, pages_per_seq].
            state: of the sampler, without tables; given away.
            options: of the rows, padded to `num_rows`; of the levels "greedy" and "sampled".
            num_steps: of the plan, at most `max_num_steps`.
            draws: whether any row is of the level "sampled".

        Returns:
            int32[max_num_steps, S] tokens, of which the first `num_steps` mean something, and the new state.
        """
        spec = DecodeSpec(self._spec(rows, all_logits=False), self._max_num_steps)
        numbers = np.append(self._numbers(spec.packed, rows, tables, 0), np.array([num_steps, draws], np.int32))
        args = (self._weights, self._cache.pools, state, numbers, options)
        tokens, self._cache.pools, state = self._program_of(self._decode_steps, spec, args)(*args)
        return tokens, state

    def num_rows(self, rows: Sequence[PlanRow]) -> int:
        """Rows of the logits of a step with these rows."""
        return self._spec(rows, all_logits=False).num_rows

    @property
    def num_programs(self) -> int:
        """Compiled steps."""
        return self._step.num_programs + self._decode_steps.num_programs

    def run(
        self,
        rows: Sequence[PlanRow],
        tables: Sequence[np.ndarray],
        last_tokens: jax.Array,
        *,
        ahead: int = 0,
        all_logits: bool = False,
    ) -> jax.Array:
        """Computes `rows` of a plan; the first ``len(rows)`` rows of the logits [S, vocab] are theirs.

        Args:
            rows: at most `num_slots`, of `token_budget` tokens at most.
            tables: by group, int32[num_slots, pages_per_seq].
            last_tokens: int32[num_slots], sampled last in each slot.
            ahead: decode steps since the plan's first one.
            all_logits: logits of every token, [T, vocab], in the order of the rows.
        """
        spec = self._spec(rows, all_logits)
        numbers = self._numbers(spec, rows, tables, ahead)
        args = (self._weights, self._cache.pools, last_tokens, numbers)
        logits, self._cache.pools = self._program_of(self._step, spec, args)(*args)
        return logits

    def _program_of(self, function: KeptFunction, spec: PackedSpec | DecodeSpec, args: tuple[Any, ...]) -> Any:
        """The shapes of all arguments follow from the spec, so it alone is looked up."""
        program = self._programs.get(spec)
        if program is None:
            program = self._programs[spec] = function.compiled(*args, spec=spec)
        return program

    def _spec(self, rows: Sequence[PlanRow], all_logits: bool) -> PackedSpec:
        is_decode = all(row.num_tokens == 1 for row in rows) and not all_logits
        if is_decode:
            num_rows = num_tokens = rung(self._decode_rungs, len(rows))
        else:
            num_rows = rung(self._row_rungs, len(rows))
            num_tokens = rung(self._token_rungs, sum(row.num_tokens for row in rows))
        return self._spec_of(num_tokens, num_rows, is_decode, all_logits)

    def _spec_of(self, num_tokens: int, num_rows: int, is_decode: bool, all_logits: bool = False) -> PackedSpec:
        layout = dataclasses.replace(self._cache.layout, is_decode=is_decode, all_logits=all_logits)
        return PackedSpec(num_tokens, num_rows, self._cache.pages_per_seq, layout, self._batch_invariant)

    @staticmethod
    def _numbers(spec: PackedSpec, rows: Sequence[PlanRow], tables: Sequence[np.ndarray], ahead: int) -> np.ndarray:
        numbers = np.zeros(sum(spec.sizes), np.int32)
        parts = np.split(numbers, np.cumsum(spec.sizes)[:-1])  # views
        ids, token_slots, positions, cu_q_lens, kv_lens, last = parts[:6]
        slots = [row.slot for row in rows]
        num_tokens = [row.num_tokens for row in rows]
        starts = np.array([row.start for row in rows]) + ahead
        ends = np.cumsum(num_tokens)
        for row, start, end, position in zip(rows, ends - num_tokens, ends, starts, strict=True):
            ids[start:end] = ON_DEVICE if row.token_ids is None else row.token_ids
            token_slots[start:end] = row.slot
            positions[start:end] = np.arange(position, position + row.num_tokens)
        cu_q_lens[1 : len(rows) + 1] = ends
        cu_q_lens[len(rows) + 1 :] = ends[-1] if len(rows) else 0
        kv_lens[: len(rows)] = starts + num_tokens
        last[: len(rows)] = ends - 1
        for part, table in zip(parts[6:], tables, strict=True):
            part.reshape(spec.num_rows, -1)[: len(rows)] = table[slots]
        return numbers

    def padded_rows(self, numbers: np.ndarray) -> np.ndarray:
        """A number for each row, with zeros up to the rung that a step of so many rows has."""
        padded = np.zeros(rung(self._row_rungs, len(numbers)), np.int32)
        padded[: len(numbers)] = numbers
        return padded

    def _specs(self) -> Iterator[PackedSpec]:
        """Every step there can be, of those that mixed traffic meets."""
        for num_rows in self._decode_rungs:
            yield self._spec_of(num_rows, num_rows, True)
        for num_rows in self._row_rungs:
            for num_tokens in self._token_rungs:
                yield self._spec_of(num_tokens, num_rows, False)

    def temporary_bytes(self) -> int:
        """What the largest step takes beside weights, cache and results, as the compiler plans it."""
        spec = self._spec_of(self._token_rungs[-1], self._row_rungs[-1], False)
        return self._step.temporary_bytes(
            self._weights,
            self._cache.pools,
            from_host(np.zeros(self._row_rungs[-1]), np.int32),
            np.zeros(sum(spec.sizes), np.int32),
            spec=spec,
        )

    def warm_up(self, last_tokens: Callable[[], jax.Array]) -> Iterator[jax.Array]:
        """Compiles every step that mixed traffic meets and runs it on nothing; yields its logits.

        Between two steps the array that `last_tokens` answers may be given away.
        """
        for spec in self._specs():
            numbers = np.zeros(sum(spec.sizes), np.int32)
            logits, self._cache.pools = self._step(self._weights, self._cache.pools, last_tokens(), numbers, spec=spec)
            yield logits

    def warm_up_decode(self, take: Callable[[int], tuple[SamplerState, RowOptions]]) -> Iterator[SamplerState]:
        """Compiles `decode` for every number of rows and runs no step of it; yields the sampler's state.

        Args:
            take: the state, given away, and options for so many rows.
        """
        for num_rows in self._decode_rungs:
            spec = DecodeSpec(self._spec_of(num_rows, num_rows, True), self._max_num_steps)
            state, options = take(num_rows)
            numbers = np.zeros(sum(spec.packed.sizes) + 2, np.int32)
            _, self._cache.pools, state = self._decode_steps(
                self._weights, self._cache.pools, state, numbers, options, spec=spec
            )
            yield state
