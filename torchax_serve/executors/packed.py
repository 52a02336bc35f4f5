"""Runs the rows of a step as one ragged batch on the paged cache.

A decode step has a program of its own, with one token per row. Every other step, chunks of prompts with or without
decode rows, is a packed batch of tokens.
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
from model_adapters.caches.paged_cache import PackedBatch, Pool
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.cpu.ffi import batch_invariant
from model_adapters.program.model_program import ModelProgram
from model_adapters.program.packed_forward import forward_packed
from torchax_serve.buckets import bucket_for, bucket_sizes, token_buckets
from torchax_serve.compilation.background import CompileTask
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.executors.base import (
    AbstractStep,
    ExecutorLimits,
    abstract_ints,
    refuse_encoder_input,
    sampling_task,
)
from torchax_serve.executors.compiled_steps import CompiledSteps
from torchax_serve.executors.request_input import RequestInput
from torchax_serve.executors.step_inputs import FusedDecodeSpec, PackedStepSpec
from torchax_serve.kv_cache.pools import PagedCache
from torchax_serve.sampling.sample import sample
from torchax_serve.sampling.sampler import Sampler
from torchax_serve.sampling.types import RowOptions, SamplerSpec, SamplerState
from torchax_serve.scheduler import PlanRow, StepPlan


class PackedExecutor:
    """The `Executor` of models that run packed, on a `PagedCache`.

    Args:
        program: The model's forward.
        weights: Weights by name.
        cache: Page pools, replaced by each step.
        programs: Cache of compiled steps.
        num_slots: Maximum number of rows of a step.
        token_budget: Maximum number of tokens of a step.
        max_num_steps: Maximum number of decode steps in one dispatch.
        batch_invariant: Whether matrix products sum in the same order for any number of rows.
    """

    runs_ahead = True

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
        self._program, self._weights, self.cache = program, weights, cache
        self._max_num_steps = max_num_steps
        self._batch_invariant = batch_invariant
        self._decode_buckets = bucket_sizes(num_slots)
        self._row_buckets = bucket_sizes(num_slots, 4, 4) if num_slots > 4 else (num_slots,)
        self._token_buckets = token_buckets(token_budget)
        self.limits = ExecutorLimits(
            max_num_seqs=num_slots, fused_decode_steps=max_num_steps, token_buckets=self._token_buckets
        )
        compiled = functools.partial(CachedFunction, programs, facts=program.trace_facts, recall=program.restore_facts)
        self._known_specs: dict[tuple[int, int, bool, bool], PackedStepSpec] = {}
        self._steps: CompiledSteps[PackedStepSpec | FusedDecodeSpec] = CompiledSteps(weights, programs.background)
        self.num_substitutes = 0
        self._when_traced: Callable[[], object] = lambda: None  # of the step that runs next
        self._step = compiled("packed", self._run, donate=["pools"])
        self._decode_steps = compiled("decode_steps", self._decode, donate=["pools", "state"])

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
        """Computes logits [S, vocab] (or [T, vocab]) in the model's dtype, and the pools."""
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
        """Computes tokens int32[max_num_steps, S] of decode steps, pools and the sampler's state."""
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

    def run_decode(self, plan: StepPlan, sampler: Sampler) -> jax.Array | None:
        """Implements `Executor.run_decode`."""
        num_rows = self._ready_decode_rows(len(plan.rows), sampler)
        found = None if num_rows is None else sampler.fused_options(plan.rows, num_rows)
        if found is None:
            return None
        options, draws = found
        state = sampler.take_state("sampled")
        tokens, state = self.decode(plan.rows, plan.page_tables, state, options, plan.num_steps, draws)
        sampler.set_state(state)
        return tokens

    def _ready_decode_rows(self, num_rows: int, sampler: Sampler) -> int | None:
        """Returns the number of rows of the program that decodes `num_rows` rows.

        It is the smallest bucket if its program is there or must be compiled now; a larger bucket that is there, while
        the smallest is compiled in another thread; None if meanwhile single steps do it.
        """
        smallest = bucket_for(self._decode_buckets, num_rows)
        if not self._steps.compiles_ahead or self._steps.has(self._decode_spec(smallest)):
            return smallest
        self._compile_decode_ahead(smallest, sampler)
        for bucket in self._decode_buckets:
            if bucket >= num_rows and self._steps.has(self._decode_spec(bucket)):
                self.num_substitutes += 1
                return bucket
        single_step = self._spec_of(smallest, smallest, True)
        return smallest if self._substitute(single_step, num_rows, num_rows) is None else None

    def _compile_decode_ahead(self, num_rows: int, sampler: Sampler) -> None:
        self._steps.compile_ahead(self._decode_steps, *self._decode_call(num_rows, sampler))

    def _decode_call(self, num_rows: int, sampler: Sampler) -> tuple[FusedDecodeSpec, tuple[Any, ...]]:
        """Returns the spec of decode steps of `num_rows` rows, and their arguments as shapes."""
        spec = self._decode_spec(num_rows)
        return spec, (self.cache.pools, *sampler.abstract_fused(num_rows), np.zeros(spec.size, np.int32))

    def prepare(self, plan: StepPlan, sampler: Sampler) -> None:
        """Implements `Executor.prepare`: the decode steps of the plan's requests."""
        num_rows = bucket_for(self._decode_buckets, len(plan.rows))
        self._when_traced = functools.partial(self._compile_decode_ahead, num_rows, sampler)

    def decode(
        self,
        rows: Sequence[PlanRow],
        tables: Sequence[np.ndarray],
        state: SamplerState,
        options: RowOptions,
        num_steps: int,
        draws: bool,
    ) -> tuple[jax.Array, SamplerState]:
        """Runs decode steps of `rows` with sampling in one dispatch.

        Args:
            rows: Decode rows of a plan.
            tables: Page tables by group, int32[num_slots, pages_per_seq].
            state: Sampler state without tables; donated.
            options: Options of the rows at their first token, padded to a bucket; levels "greedy" and "sampled".
            num_steps: Number of steps, at most `max_num_steps`.
            draws: Whether any row has the level "sampled".

        Returns:
            Tokens int32[max_num_steps, S], of which the first `num_steps` rows are valid, and the new state.
        """
        spec = self._decode_spec(len(options.ints))
        args = (self.cache.pools, state, options, spec.pack(rows, tables, num_steps, draws))
        program = self._steps.get(self._decode_steps, spec, args, lambda: None)
        tokens, self.cache.pools, state = program(self._weights, *args)
        return tokens, state

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
        """Implements `Executor.run`; logits are in the model's dtype."""
        exact = self._spec(rows, all_logits)
        spec = exact
        if self._steps.compiles_ahead and not self._steps.has(exact):
            spec = self._substitute(exact, len(rows), sum(row.num_tokens for row in rows)) or exact
        args = (self.cache.pools, last_tokens, spec.pack(rows, tables, ahead))
        if spec is not exact:
            self.num_substitutes += 1
            self._steps.compile_ahead(self._step, exact, self._step_args(exact, last_tokens))
        program = self._steps.get(self._step, spec, args, self._when_traced)
        logits, self.cache.pools = program(self._weights, *args)
        return logits

    def _step_args(self, spec: PackedStepSpec, last_tokens: jax.Array) -> tuple[Any, ...]:
        return self.cache.pools, last_tokens, np.zeros(spec.size, np.int32)

    def _substitute(self, exact: PackedStepSpec, num_rows: int, num_tokens: int) -> PackedStepSpec | None:
        """Returns the smallest step that is there and can run rows in place of `exact`; None: there is none."""
        sizes = itertools.product(self._token_buckets, self._row_buckets)
        fitting = ((tokens, rows) for tokens, rows in sizes if tokens >= num_tokens and rows >= num_rows)
        specs = (self._spec_of(tokens, rows, False, exact.layout.all_logits) for tokens, rows in fitting)
        return next((spec for spec in specs if self._steps.has(spec)), None)

    def _spec(self, rows: Sequence[PlanRow], all_logits: bool) -> PackedStepSpec:
        is_decode = all(row.num_tokens == 1 for row in rows) and not all_logits
        if is_decode and self._program.rope is not None:  # whose decode steps rotate each token for its own length
            is_decode = all(row.rope_len <= row.context_len + 1 for row in rows)
        if is_decode:
            num_rows = num_tokens = bucket_for(self._decode_buckets, len(rows))
        else:
            num_rows = bucket_for(self._row_buckets, len(rows))
            num_tokens = bucket_for(self._token_buckets, sum(row.num_tokens for row in rows))
        return self._spec_of(num_tokens, num_rows, is_decode, all_logits)

    def _spec_of(self, num_tokens: int, num_rows: int, is_decode: bool, all_logits: bool = False) -> PackedStepSpec:
        key = num_tokens, num_rows, is_decode, all_logits
        spec = self._known_specs.get(key)
        if spec is None:
            layout = dataclasses.replace(self.cache.layout, is_decode=is_decode, all_logits=all_logits)
            has_rope_lens = self._program.rope is not None and not is_decode
            spec = PackedStepSpec(
                num_tokens, num_rows, self.cache.pages_per_seq, layout, self._batch_invariant, has_rope_lens
            )
            self._known_specs[key] = spec
        return spec

    def _decode_spec(self, num_rows: int) -> FusedDecodeSpec:
        return FusedDecodeSpec(self._spec_of(num_rows, num_rows, True), self._max_num_steps)

    def padded_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Implements `Executor.padded_rows`."""
        padded = np.zeros(bucket_for(self._row_buckets, len(numbers)), np.int32)
        padded[: len(numbers)] = numbers
        return padded

    def _specs(self) -> Iterator[PackedStepSpec]:
        """Yields every step that mixed traffic can meet."""
        for num_rows in self._decode_buckets:
            yield self._spec_of(num_rows, num_rows, True)
        for num_rows in self._row_buckets:
            for num_tokens in self._token_buckets:
                yield self._spec_of(num_tokens, num_rows, False)

    def temporary_bytes(self) -> int:
        """Implements `Executor.temporary_bytes`."""
        spec = self._spec_of(self._token_buckets[-1], self._row_buckets[-1], False)
        return self._step.temporary_bytes(
            self._weights,
            self.cache.pools,
            to_device(np.zeros(self._row_buckets[-1]), np.int32),
            np.zeros(spec.size, np.int32),
            spec=spec,
        )

    def abstract_steps(self, prefill_lens: Sequence[int]) -> Iterator[AbstractStep]:
        """Yields the steps of `Executor.abstract_steps`.

        A prefill step has the rows of the smallest bucket, and no padding.
        """
        num_slots = self._decode_buckets[-1]
        specs = [self._spec_of(num_slots, num_slots, True)]
        specs += [self._spec_of(num_tokens, self._row_buckets[0], False) for num_tokens in prefill_lens]
        for spec in specs:
            is_decode = spec.layout.is_decode
            ints = (abstract_ints(self._program.sharding, size) for size in (num_slots, spec.size))
            yield AbstractStep(
                name="decode" if is_decode else "prefill",
                num_tokens=spec.num_tokens,
                num_rows=spec.num_rows,
                context_len=self.cache.plan.max_len if is_decode else spec.num_tokens,
                num_prompts=0 if is_decode else 1,
                function=functools.partial(self._run, spec=spec),
                args=(self.cache.pools, *ints),
                donated=(0,),
            )

    def check(self, name: str, source: RequestInput) -> None:
        """Implements `Executor.check`: a packed model has no encoder."""
        refuse_encoder_input(name, source)

    def assign(self, slot: int, source: RequestInput) -> None:
        """Implements `Executor.assign`: rows have no inputs of their own."""

    @property
    def compiles_ahead(self) -> bool:
        """As `Executor.compiles_ahead`."""
        return self._steps.compiles_ahead

    def compile_tasks(self, sampler: Sampler) -> Iterator[CompileTask]:
        """Implements `Executor.compile_tasks`."""
        for num_rows in self._decode_buckets:
            yield self._steps.task(self._decode_steps, *self._decode_call(num_rows, sampler))
        seen: set[int] = set()
        for spec in self._specs():
            task = self._steps.task(self._step, spec, self._step_args(spec, sampler.last_tokens))
            yield task if spec.num_rows in seen else sampling_task(task, sampler)
            seen.add(spec.num_rows)

    def warm_up(self, sampler: Sampler) -> None:
        """Implements `Executor.warm_up`: every program is a task."""
