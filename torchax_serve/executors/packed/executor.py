"""Runs the rows of a step as one ragged batch on the paged cache.

Decode steps, one or several, have programs of their own, with one token per row. Every other step, chunks of prompts
with or without decode rows, is a packed batch of tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from model_adapters.caches.packed_batch import MediaTokens, PackedBatch, Pool
from model_adapters.device_arrays import to_device
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.cpu.ffi import batch_invariant
from torchax_serve.compilation.background import CompileTask
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.executors.base import AbstractStep, ExecutorLimits, MakeBitmask, abstract_ints, refuse_encoder_input
from torchax_serve.executors.media_slots import MediaSlots
from torchax_serve.executors.packed.calls import abstract_step, all_logits, forward_model, optional_args
from torchax_serve.executors.packed.decode_steps import decode_steps
from torchax_serve.executors.packed.specs import PackedSpecs, StepBuckets
from torchax_serve.executors.request_input import MediaInput, RequestInput
from torchax_serve.executors.slot_adapters import SlotAdapters
from torchax_serve.executors.speculation.draft_head import DraftHead
from torchax_serve.executors.speculation.draft_model import DraftModel
from torchax_serve.executors.speculation.packed_drafts import PackedDrafts
from torchax_serve.executors.speculation.verified_tokens import VerifiedTokens
from torchax_serve.executors.step_inputs import PackedDecodeSpec, PackedStepSpec
from torchax_serve.executors.step_programs import StepCall, StepPrograms
from torchax_serve.kv_cache.hybrid_cache import HybridCache
from torchax_serve.kv_cache.pools import PagedCache
from torchax_serve.sampling.sample import logprobs_of, with_rows
from torchax_serve.sampling.sampler import Sampler, SlotParams, default_sharding
from torchax_serve.sampling.types import MAX_NUM_TOP, Logprobs, RowOptions, SamplerState
from torchax_serve.scheduler import PlanRow, SpeculativeConfig, StepPlan

if TYPE_CHECKING:
    from model_adapters.program.model_program import ModelProgram

Spec = PackedStepSpec | PackedDecodeSpec
"""Spec of a step."""


class PackedExecutor:
    """The `Executor` of models that run packed, on a `PagedCache`.

    Args:
        program: The model's forward.
        weights: Weights by name.
        cache: Page pools, replaced by each step.
        executables: Cache of compiled steps.
        num_slots: Maximum number of rows of a step.
        token_budget: Maximum number of tokens of a step.
        max_num_steps: Maximum number of decode steps in one dispatch.
        batch_invariant: Whether matrix products sum in the same order for any number of rows.
        buckets: Sizes of its steps; None: those of this device.
        lora: Form of the adapters' matrices among the weights; empty: there are none.
        speculative: Options of speculation; None: no step verifies drafts.
        draft: Model or head that drafts; None: drafts are looked up.
        num_top: Top log-probabilities that steps return for the tokens of prompts and for drafts.
    """

    runs_ahead = True

    def __init__(
        self,
        program: ModelProgram,
        weights: Weights,
        cache: PagedCache,
        executables: ExecutableCache,
        *,
        num_slots: int,
        token_budget: int,
        max_num_steps: int = 1,
        batch_invariant: bool = False,
        buckets: StepBuckets | None = None,
        lora: str = "",
        speculative: SpeculativeConfig | None = None,
        draft: DraftModel | DraftHead | None = None,
        num_top: int = MAX_NUM_TOP,
    ) -> None:
        self._head = draft if isinstance(draft, DraftHead) else None
        self._weights: Any = weights if self._head is None else self._head.loaded.with_model(weights)
        self._program, self.cache = program, cache
        self._num_slots = num_slots
        self.buckets = buckets or StepBuckets.of_device(num_slots, token_budget)
        self._specs = PackedSpecs(
            layout=cache.layout,
            pages_per_seq=cache.pages_per_seq,
            num_slots=num_slots,
            decode_buckets=self.buckets.decode,
            token_buckets=self.buckets.tokens,
            max_num_steps=max_num_steps,
            batch_invariant=batch_invariant,
            has_rope_lens=program.rope is not None,
            lora=lora,
            head="" if self._head is None else self._head.identity,
            num_top=num_top,
        )
        self._adapters = SlotAdapters(num_slots, lora)
        self.limits = _limits(cache, num_slots, max_num_steps, self.buckets)
        compiled = functools.partial(
            CachedFunction, executables, facts=program.trace_facts, restore_facts=program.restore_facts
        )
        self._idle_options: dict[int, RowOptions] = {}
        self._media = MediaSlots(num_slots)
        self._step_programs: StepPrograms[Spec] = StepPrograms(self._weights, executables, self._call_of)
        self.compiles_ahead = self._step_programs.compiles_ahead
        self._packed_function = compiled("packed", self._packed_step, donate={"pools": 1})
        decode = functools.partial(decode_steps, self._forward, self._adapters, self._constrain_pools)
        self._decode_function = compiled("decode_steps", decode, donate={"pools": 1})
        self._drafts: PackedDrafts | None = None
        if speculative is not None:
            of_steps = self._forward, self._weights, cache, executables, compiled, self._specs
            of_model = functools.partial(forward_model, program)
            self._drafts = PackedDrafts(
                speculative, *of_steps, of_model, self._constrain_pools, adapters=self._adapters, draft=draft
            )

    @property
    def num_substitutes(self) -> int:
        """As `Executor.num_substitutes`."""
        return self._step_programs.num_substitutes

    def _forward(
        self, weights: Any, pools: tuple[Pool, ...], batch: PackedBatch, spec: PackedStepSpec
    ) -> tuple[jax.Array, tuple[Pool, ...], jax.Array | None]:
        if self._head is None:
            return forward_model(self._program, weights, pools, batch, spec, ())
        with batch_invariant(spec.batch_invariant):
            return self._head.forward(self._program, weights, pools, batch, spec.layout)

    def _constrain_pools(self, pools: tuple[Pool, ...]) -> tuple[Pool, ...]:
        """Constrains the pools that a program returns to the shardings that the next one takes.

        Behind a loop of steps XLA would divide pools as it sees fit. On several hosts they stay as they are: processes
        on CPUs wait for each other without end in a loop whose pools are placed.
        """
        if (sharding := self._program.sharding) is None or jax.process_count() > 1:
            return pools
        from model_adapters.program.packed_forward import constrain_pools  # tracing needs torch, running does not

        if self._head is None:
            return constrain_pools(pools, self.cache.layout, sharding)
        num_own = self._head.loaded.num_pools
        of_model, own = pools[: -1 - num_own], self._head.constrain_pools(pools)[-1 - num_own :]
        return (*constrain_pools(of_model, self.cache.layout.without_last(num_own), sharding), *own)

    def _packed_step(
        self,
        weights: Weights,
        pools: tuple[Pool, ...],
        last_tokens: jax.Array,
        numbers: jax.Array,
        scored: tuple[jax.Array, jax.Array] | None = None,
        media: MediaTokens | None = None,
        *,
        spec: PackedStepSpec,
    ) -> tuple[jax.Array | tuple[jax.Array, Logprobs], tuple[Pool, ...]]:
        """Computes logits [num_slots, vocab] in the model's dtype, and the pools.

        With `scored`, tokens int32[T] and whether the likeliest ones are read, the logits come with log-probabilities.
        """
        batch = spec.unpack(numbers, last_tokens, media)
        batch = self._adapters.with_adapters(batch, numbers, numbers[spec.bounds[1]])
        logits, pools, _ = self._forward(weights, pools, batch, spec)
        pools = self._constrain_pools(pools)
        if scored is None:
            return with_rows(logits, len(last_tokens)), pools
        ids, has_top = scored
        num_tokens = batch.cu_q_lens[-1]
        logprobs = logprobs_of(logits, ids, num_top=spec.num_top, has_top=has_top, num_rows=num_tokens)
        return (with_rows(logits[batch.last], len(last_tokens)), logprobs), pools

    def run_decode(
        self, plan: StepPlan, sampler: Sampler, make_bitmask: MakeBitmask | None = None
    ) -> jax.Array | VerifiedTokens | None:
        """Implements `Executor.run_decode`."""
        if self._drafts is not None:
            if plan.drafts is not None:
                return self._drafts.run(plan, sampler, make_bitmask)
            self._drafts.catch_up(plan.page_tables)
        spec = self._step_programs.choose(self._decode_specs(plan.rows))
        if not isinstance(spec, PackedDecodeSpec):
            return None
        found = sampler.fused_options(plan.rows, spec.packed.num_rows)
        if found is None:
            return None
        options, draws = found
        numbers = spec.pack(
            plan.rows, plan.page_tables, num_steps=plan.num_steps, draws=draws, deltas=self._media.deltas
        )
        (_, tokens), state = self._dispatch_decode(spec, sampler.take_state("sampled"), options, numbers)
        sampler.set_state(state)
        return tokens

    def _dispatch_decode(
        self, spec: PackedDecodeSpec, state: SamplerState, options: RowOptions, numbers: np.ndarray
    ) -> tuple[tuple[jax.Array, jax.Array], SamplerState]:
        """Runs a decode program on the cache; returns logits and tokens, and the new state.

        `options` are those of the rows at their first token. Of the tokens, int32[max_num_steps, S], as many rows are
        valid as steps were run.
        """
        args = (self.cache.pools, state, options, self._with_adapters(numbers))
        program = self._step_programs.get(spec, StepCall(self._decode_function, args))
        results, self.cache.pools, state = program(self._weights, *args)
        return results, state

    @property
    def num_programs(self) -> int:
        """Compiled steps."""
        own = self._packed_function.num_programs + self._decode_function.num_programs
        return own + (0 if self._drafts is None else self._drafts.num_programs)

    def run(
        self,
        rows: Sequence[PlanRow],
        tables: Sequence[np.ndarray],
        last_tokens: jax.Array,
        *,
        ahead: int = 0,
    ) -> jax.Array:
        """Implements `Executor.run`; logits are in the model's dtype."""
        if self._drafts is not None:
            self._drafts.catch_up(tables)
        media, is_decode = None, self._specs.is_decode(rows)
        if self._media.by_slot:
            rows = self._media.with_token_ids(rows)
            media, is_decode = self._media.spec_of(rows), is_decode and not self._media.has_prompts(rows)
        num_tokens = sum(row.num_tokens for row in rows)
        specs = self._decode_specs(rows) if is_decode else self._specs.step_choices(num_tokens, media=media)
        spec = self._step_programs.choose(specs)
        if isinstance(spec, PackedDecodeSpec):
            numbers = spec.pack(rows, tables, ahead=ahead, deltas=self._media.deltas)
            return self._decode_logits(spec, last_tokens, numbers)
        numbers = self._with_adapters(spec.pack(rows, tables, ahead))
        args: tuple[Any, ...] = (self.cache.pools, last_tokens, numbers)
        if spec.media is not None:
            args = (*args, None, self._media.tokens(rows, spec.num_tokens, spec.media))
        program = self._step_programs.get(spec, StepCall(self._packed_function, args))
        logits, self.cache.pools = program(self._weights, *args)
        return logits

    def run_scored(
        self,
        rows: Sequence[PlanRow],
        tables: Sequence[np.ndarray],
        sampler: Sampler,
        following: np.ndarray,
        num_top: int,
    ) -> tuple[Logprobs, jax.Array]:
        """Implements `Executor.run_scored`."""
        if self._drafts is not None:
            self._drafts.catch_up(tables)
        rows = self._media.with_token_ids(rows)
        media = self._media.spec_of(rows)
        spec = self._step_programs.choose(self._specs.step_choices(len(following), all_logits=True, media=media))
        assert isinstance(spec, PackedStepSpec)
        ids = np.zeros(spec.num_tokens, np.int32)
        ids[: len(following)] = following
        scored = ids, np.bool_(num_top > 0)
        numbers = self._with_adapters(spec.pack(rows, tables, 0))
        args = (
            self.cache.pools,
            sampler.last_tokens,
            numbers,
            *optional_args(scored, self._media.tokens(rows, spec.num_tokens, spec.media)),
        )
        program = self._step_programs.get(spec, StepCall(self._packed_function, args))
        (logits, logprobs), self.cache.pools = program(self._weights, *args)
        return logprobs, logits

    def _decode_logits(self, spec: PackedDecodeSpec, last_tokens: jax.Array, numbers: np.ndarray) -> jax.Array:
        """Runs a decode step and returns its logits [num_slots, vocab]; its tokens are not used."""
        num_rows = spec.packed.num_rows
        options = self._idle_options.get(num_rows)
        if options is None:
            idle = SlotParams(self._num_slots, 1).rows((), num_rows)[0]
            options = self._idle_options[num_rows] = jax.device_put(idle, last_tokens.sharding)
        return self._dispatch_decode(spec, SamplerState(last_tokens), options, numbers)[0][0]

    def temporary_bytes(self) -> int:
        """Implements `Executor.temporary_bytes`."""
        spec = self._specs.step_spec(self._specs.token_buckets[-1])
        of_drafts = 0 if self._drafts is None else self._drafts.temporary_bytes()
        of_tokens = self._packed_function.temporary_bytes(
            self._weights,
            self.cache.pools,
            to_device(np.zeros(self._num_slots), np.int32),
            self._adapters.empty(spec.size),
            spec=spec,
        )
        return max(of_tokens, of_drafts)

    def abstract_steps(self, prefill_lens: Sequence[int]) -> Iterator[AbstractStep]:
        """Yields the steps of `Executor.abstract_steps`; a prefill step has no padding."""
        num_slots = self._num_slots
        steps: list[Any] = [(self._specs.step_spec(num_slots, is_decode=True), self._packed_step, self.cache.pools)]
        if self._drafts is not None:
            spec, forward, pools = self._drafts.largest(functools.partial(abstract_ints, self._program.sharding))
            steps.append((spec, functools.partial(all_logits, forward), pools))
        num_decode = len(steps)
        steps += [
            (self._specs.step_spec(num_tokens), self._packed_step, self.cache.pools) for num_tokens in prefill_lens
        ]
        for index, (spec, run, pools) in enumerate(steps):
            sizes = num_slots, len(self._adapters.empty(spec.size))
            ints = [abstract_ints(self._program.sharding, size) for size in sizes]
            function = functools.partial(run, spec=spec)
            is_verify = 0 < index < num_decode
            yield abstract_step(spec, self.cache.plan.max_len, function, (pools, *ints), verifies=is_verify)

    def check(self, name: str, request_input: RequestInput) -> None:
        """Implements `Executor.check`: a packed model has no encoder-decoder's encoder."""
        if not isinstance(request_input, MediaInput):
            refuse_encoder_input(name, request_input)

    def assign(self, slot: int, request_input: RequestInput, adapter_id: int = 0) -> None:
        """Implements `Executor.assign`."""
        if self._adapters.size or adapter_id:
            self._adapters.assign(slot, adapter_id)
        if self._media.by_slot or isinstance(request_input, MediaInput):
            self._media.assign(slot, request_input)
        if self._drafts is not None:
            self._drafts.assign(slot)
        self.cache.free_slot(slot)

    def prepare(self, plan: StepPlan) -> None:
        """Implements `Executor.prepare`: the decode steps of the plan's requests."""
        self._step_programs.expect(self._decode_specs(plan.rows)[:1])

    def _decode_specs(self, rows: Sequence[PlanRow]) -> list[PackedDecodeSpec | PackedStepSpec]:
        """Returns the specs of steps that can decode `rows`, decode steps first."""
        media = self._media.of_decode(rows) if self._media.by_slot else (None, False)
        return self._specs.decode_choices(len(rows), *media)

    def _with_adapters(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the array of a step, with the adapters of all slots behind it if there are any."""
        return self._adapters.append_to(numbers) if self._adapters.size else numbers

    def _call_of(self, spec: Spec) -> StepCall:
        """Returns a step with its arguments as shapes."""
        placed = functools.partial(jax.ShapeDtypeStruct, sharding=default_sharding())
        tokens: Any = placed((self._num_slots,), np.int32)
        numbers = self._adapters.empty(spec.size)
        if isinstance(spec, PackedStepSpec):
            scored = (np.zeros(spec.num_tokens, np.int32), np.bool_(False)) if spec.layout.all_logits else None
            media = None if spec.media is None else spec.media.shapes(spec.num_tokens)
            return StepCall(self._packed_function, (self.cache.pools, tokens, numbers, *optional_args(scored, media)))
        idle = SlotParams(self._num_slots, 1).rows((), spec.packed.num_rows)[0]
        options = jax.tree.map(lambda x: placed(x.shape, x.dtype), idle)
        return StepCall(self._decode_function, (self.cache.pools, SamplerState(tokens), options, numbers))

    def compile_tasks(self, sampler: Sampler) -> Iterator[CompileTask]:
        """Implements `Executor.compile_tasks`; the sampler's programs follow the first step."""
        if not self.compiles_ahead:  # several hosts: `warm_up` runs every step
            return
        has_sampling = False
        for spec in self._specs.all():
            task = self._step_programs.task(spec)
            if not has_sampling and isinstance(spec, PackedStepSpec) and not spec.layout.all_logits:
                has_sampling, task = True, task.then(lambda program: sampler.compile_tasks(program.out_info[0]))
            yield task
        if self._drafts is not None:
            yield from self._drafts.compile_tasks()

    def warm_up(self, sampler: Sampler) -> None:
        """Implements `Executor.warm_up`: copies of pages; on several hosts also empty steps."""
        for spec in () if self.compiles_ahead else self._specs.all():
            function, (_, *shapes) = self._call_of(spec)
            args = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), default_sharding()), shapes)
            results, self.cache.pools, *_ = function(self._weights, self.cache.pools, *args, spec=spec)
            if isinstance(spec, PackedStepSpec) and not spec.layout.all_logits:
                for task in sampler.compile_tasks(results):
                    task.compile()
        self.cache.warm_up()


def _limits(cache: PagedCache, num_slots: int, max_num_steps: int, buckets: StepBuckets) -> ExecutorLimits:
    """Returns what the executor can run; prefixes with states need snapshots to be shared."""
    num_snapshots = cache.num_snapshots if isinstance(cache, HybridCache) else 0
    return ExecutorLimits(
        max_num_seqs=num_slots,
        shares_prefixes=num_snapshots != 1,
        num_snapshots=num_snapshots,
        max_num_steps=max_num_steps,
        token_buckets=buckets.costs,
        sees_ahead=True,
    )


def step_calls(executor: PackedExecutor) -> Iterator[tuple[Spec, StepCall]]:
    """Yields every step that requests can need, with its arguments as shapes."""
    specs = executor._specs
    return ((spec, executor._call_of(spec)) for spec in (*specs.all(), *specs.larger_scored()))
