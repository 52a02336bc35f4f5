"""The model on a paged cache, packed: one program per bucket of tokens and rows.

Decode is a program of its own, one token a row. Every other step, chunks of prompts with or without decode rows beside
them, is a packed run of tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.bridge.host_arrays import to_device
from model_adapters.caches.paged_cache import PackedBatch, PagedLayout, Pool
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.cpu.ffi import batch_invariant
from model_adapters.program.model_program import ModelProgram
from model_adapters.program.packed_forward import forward_packed
from torchax_serve.buckets import bucket_for, bucket_sizes, token_buckets
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.kv_cache.pools import PagedCache
from torchax_serve.sampling.sample import sample
from torchax_serve.sampling.types import RowOptions, SamplerSpec, SamplerState
from torchax_serve.scheduler import DecodeBatch, PlanRow

SAMPLED_ON_DEVICE = -1
"""Stands for a token id that was sampled in the row's slot and that the host may not know yet."""


@dataclasses.dataclass(frozen=True)
class PackedStepSpec:
    """The static part of a packed step."""

    num_tokens: int  # T
    num_rows: int  # S
    pages_per_seq: int
    layout: PagedLayout
    batch_invariant: bool
    has_rope_lens: bool = False  # rotary frequencies depend on lengths

    @property
    def num_tables(self) -> int:
        """Tables of pages, one for each group of layers."""
        return max(self.layout.groups) + 1

    @functools.cached_property
    def bounds(self) -> tuple[slice, ...]:
        """Where the parts of a step's one array of integers lie, in order; tables last."""
        tokens, rows = self.num_tokens, self.num_rows
        tables = [rows * self.pages_per_seq] * self.num_tables
        rope_lens = tokens if self.has_rope_lens else 0
        ends = itertools.accumulate([0, tokens, tokens, tokens, rope_lens, rows + 1, rows, rows, *tables])
        return tuple(slice(begin, end) for begin, end in itertools.pairwise(ends))

    @property
    def size(self) -> int:
        """Integers of a step."""
        return int(self.bounds[-1].stop)

    def unpack(self, numbers: jax.Array, last_tokens: jax.Array) -> PackedBatch:
        """The batch in `numbers`; ids that are `SAMPLED_ON_DEVICE` are taken from `last_tokens` int32[num_slots]."""
        ids, slots, positions, rope_lens, cu_q_lens, kv_lens, last, *tables = [numbers[part] for part in self.bounds]
        return PackedBatch(
            token_ids=jnp.where(ids == SAMPLED_ON_DEVICE, last_tokens[slots], ids),
            positions=positions,
            cu_q_lens=cu_q_lens,
            kv_lens=kv_lens,
            last=last,
            page_tables=tuple(table.reshape(self.num_rows, self.pages_per_seq) for table in tables),
            rope_lens=rope_lens if self.has_rope_lens else None,
        )


@dataclasses.dataclass(frozen=True)
class FusedDecodeSpec:
    """The static part of decode steps with the choice of tokens among them; how many steps is told at each call.

    The host says little, as each array that it makes or touches costs it time while the device waits for the next call:
    rows' slots and lengths, page tables, how many steps, and whether any row draws its tokens. The rest follows.
    """

    packed: PackedStepSpec
    max_num_steps: int

    @property
    def size(self) -> int:
        """Integers of a call."""
        return self.packed.num_rows * (2 + self.packed.num_tables * self.packed.pages_per_seq) + 2

    def pack(self, rows: Sequence[PlanRow], tables: Sequence[np.ndarray], num_steps: int, draws: bool) -> np.ndarray:
        """The array of a call."""
        numbers = np.zeros(self.size, np.int32)
        by_row, num_rows = numbers[:-2].reshape(-1, self.packed.num_rows), len(rows)
        if isinstance(rows, DecodeBatch):
            slots, starts = rows.slots, rows.starts
        else:
            slots = np.array([row.slot for row in rows], np.int32)
            starts = np.array([row.context_len for row in rows], np.int32)
        by_row[0, :num_rows] = slots
        by_row[1, :num_rows] = starts + 1
        for table, pages in zip(tables, np.split(by_row[2:], self.packed.num_tables), strict=True):
            table.take(slots, axis=0, out=pages.reshape(self.packed.num_rows, -1)[:num_rows], mode="clip")
        numbers[-2:] = num_steps, draws
        return numbers

    def unpack(self, numbers: jax.Array) -> tuple[PackedBatch, jax.Array, jax.Array, jax.Array]:
        """The batch of the first step, without token ids; slots int32[S]; how many steps; whether any row draws."""
        by_row = numbers[:-2].reshape(-1, self.packed.num_rows)
        slots, lengths = by_row[0], by_row[1]
        tables = jnp.split(by_row[2:], self.packed.num_tables)
        index, num_in_use = jnp.arange(self.packed.num_rows + 1), jnp.sum(lengths > 0)
        batch = PackedBatch(
            token_ids=jnp.zeros_like(slots),
            positions=jnp.maximum(lengths - 1, 0),
            cu_q_lens=jnp.minimum(index, num_in_use),
            kv_lens=lengths,
            last=jnp.where(lengths > 0, index[:-1], 0),
            page_tables=tuple(table.reshape(self.packed.num_rows, self.packed.pages_per_seq) for table in tables),
        )
        return batch, slots, numbers[-2], numbers[-1] > 0


class PackedExecutor:
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
        programs: ExecutableCache,
        *,
        num_slots: int,
        token_budget: int,
        max_num_steps: int = 1,
        batch_invariant: bool = False,
    ) -> None:
        self._program, self._weights, self._cache = program, weights, cache
        self._max_num_steps = max_num_steps
        self._batch_invariant = batch_invariant
        self._decode_rungs = bucket_sizes(num_slots)
        self._row_rungs = bucket_sizes(num_slots, 4, 4) if num_slots > 4 else (num_slots,)
        self._token_rungs = token_buckets(token_budget)
        kept = functools.partial(CachedFunction, programs, facts=program.trace_facts, recall=program.restore_facts)
        self._known_specs: dict[tuple[int, int, bool, bool], PackedStepSpec] = {}
        self._programs: dict[PackedStepSpec | FusedDecodeSpec, Any] = {}
        self._step = kept("packed", self._run, donate=["pools"])
        self._decode_steps = kept("decode_steps", self._decode, donate=["pools", "state"])

    def _forward(
        self, weights: Weights, pools: tuple[Pool, ...], batch: PackedBatch, spec: PackedStepSpec
    ) -> tuple[jax.Array, tuple[Pool, ...]]:
        with batch_invariant(spec.batch_invariant):
            return forward_packed(self._program, weights, pools, batch, spec.layout)

    def _run(
        self,
        weights: Weights,
        pools: tuple[Pool, ...],
        last_tokens: jax.Array,
        numbers: jax.Array,
        spec: PackedStepSpec,
    ) -> tuple[jax.Array, tuple[Pool, ...]]:
        """Logits [S, vocab] (or [T, vocab]) in the model's dtype, and the pools."""
        return self._forward(weights, pools, spec.unpack(numbers, last_tokens), spec)

    def _decode(
        self,
        weights: Weights,
        pools: tuple[Pool, ...],
        state: SamplerState,
        options: RowOptions,
        numbers: jax.Array,
        spec: FusedDecodeSpec,
    ) -> tuple[jax.Array, tuple[Pool, ...], SamplerState]:
        """int32[max_num_steps, S] tokens, each step fed with those of the one before; pools; the sampler's state."""
        batch, slots, num_steps, draws = spec.unpack(numbers)
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
            args = options.advanced(now.kv_lens), state, logits
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
            options: of the rows before their first token, padded to `num_rows`; "greedy" and "sampled" ones.
            num_steps: of the plan, at most `max_num_steps`.
            draws: whether any row is of the level "sampled".

        Returns:
            int32[max_num_steps, S] tokens, of which the first `num_steps` mean something, and the new state.
        """
        spec = self._decode_spec(bucket_for(self._decode_rungs, len(rows)))
        args = (self._weights, self._cache.pools, state, options, spec.pack(rows, tables, num_steps, draws))
        tokens, self._cache.pools, state = self._program_of(self._decode_steps, spec, args)(*args)
        return tokens, state

    def num_decode_rows(self, rows: Sequence[PlanRow]) -> int:
        """Rows of a decode step with these, padding included."""
        return bucket_for(self._decode_rungs, len(rows))

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

    def _program_of(
        self, function: CachedFunction, spec: PackedStepSpec | FusedDecodeSpec, args: tuple[Any, ...]
    ) -> Any:
        """The shapes of all arguments follow from the spec, so it alone is looked up."""
        program = self._programs.get(spec)
        if program is None:
            program = self._programs[spec] = function.compiled(*args, spec=spec)
        return program

    def _spec(self, rows: Sequence[PlanRow], all_logits: bool) -> PackedStepSpec:
        is_decode = all(row.num_tokens == 1 for row in rows) and not all_logits
        if is_decode and self._program.rope is not None:  # whose decode steps rotate each token for its own length
            is_decode = all(row.rope_len <= row.context_len + 1 for row in rows)
        if is_decode:
            num_rows = num_tokens = bucket_for(self._decode_rungs, len(rows))
        else:
            num_rows = bucket_for(self._row_rungs, len(rows))
            num_tokens = bucket_for(self._token_rungs, sum(row.num_tokens for row in rows))
        return self._spec_of(num_tokens, num_rows, is_decode, all_logits)

    def _spec_of(self, num_tokens: int, num_rows: int, is_decode: bool, all_logits: bool = False) -> PackedStepSpec:
        key = num_tokens, num_rows, is_decode, all_logits
        spec = self._known_specs.get(key)
        if spec is None:
            layout = dataclasses.replace(self._cache.layout, is_decode=is_decode, all_logits=all_logits)
            has_rope_lens = self._program.rope is not None and not is_decode
            spec = PackedStepSpec(
                num_tokens, num_rows, self._cache.pages_per_seq, layout, self._batch_invariant, has_rope_lens
            )
            self._known_specs[key] = spec
        return spec

    def _decode_spec(self, num_rows: int) -> FusedDecodeSpec:
        return FusedDecodeSpec(self._spec_of(num_rows, num_rows, True), self._max_num_steps)

    @staticmethod
    def _numbers(spec: PackedStepSpec, rows: Sequence[PlanRow], tables: Sequence[np.ndarray], ahead: int) -> np.ndarray:
        numbers = np.zeros(spec.size, np.int32)
        ids, token_slots, positions, rope_lens, cu_q_lens, kv_lens, last, *parts = [
            numbers[part] for part in spec.bounds
        ]
        num_rows = len(rows)
        slots = np.array([row.slot for row in rows], np.int32)
        starts = np.array([row.context_len for row in rows], np.int32) + np.int32(ahead)
        num_tokens = np.array([row.num_tokens for row in rows], np.int32)
        ends = np.cumsum(num_tokens, dtype=np.int32)
        total = int(ends[-1])
        token_slots[:total] = np.repeat(slots, num_tokens)
        positions[:total] = np.arange(total, dtype=np.int32) + np.repeat(starts - ends + num_tokens, num_tokens)
        if spec.has_rope_lens:
            least = np.repeat(np.array([row.rope_len for row in rows], np.int32), num_tokens)
            rope_lens[:total] = np.maximum(least, positions[:total] + 1)
        ids[:total] = SAMPLED_ON_DEVICE
        for row, end in zip(rows, ends.tolist(), strict=True):
            if row.token_ids is not None:
                ids[end - row.num_tokens : end] = row.token_ids
        cu_q_lens[1 : num_rows + 1] = ends
        cu_q_lens[num_rows + 1 :] = total
        kv_lens[:num_rows] = starts + num_tokens
        last[:num_rows] = ends - 1
        for part, table in zip(parts, tables, strict=True):
            part.reshape(spec.num_rows, -1)[:num_rows] = table[slots]
        return numbers

    def padded_rows(self, numbers: np.ndarray) -> np.ndarray:
        """A number for each row, with zeros up to the rung that a step of so many rows has."""
        padded = np.zeros(bucket_for(self._row_rungs, len(numbers)), np.int32)
        padded[: len(numbers)] = numbers
        return padded

    def _specs(self) -> Iterator[PackedStepSpec]:
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
            to_device(np.zeros(self._row_rungs[-1]), np.int32),
            np.zeros(spec.size, np.int32),
            spec=spec,
        )

    def warm_up(self, last_tokens: Callable[[], jax.Array]) -> Iterator[jax.Array]:
        """Compiles every step that mixed traffic meets and runs it on nothing; yields its logits.

        Between two steps the array that `last_tokens` answers may be given away.
        """
        for spec in self._specs():
            numbers = np.zeros(spec.size, np.int32)
            logits, self._cache.pools = self._step(self._weights, self._cache.pools, last_tokens(), numbers, spec=spec)
            yield logits

    def warm_up_decode(self, take: Callable[[int], tuple[SamplerState, RowOptions]]) -> Iterator[SamplerState]:
        """Compiles `decode` for every number of rows and runs no step of it; yields the sampler's state.

        Args:
            take: the state, given away, and options for so many rows.
        """
        for num_rows in self._decode_rungs:
            spec = self._decode_spec(num_rows)
            state, options = take(num_rows)
            args = (self._cache.pools, state, options, np.zeros(spec.size, np.int32))
            _, self._cache.pools, state = self._decode_steps(self._weights, *args, spec=spec)
            yield state
