"""Runs the rows of a step as one ragged batch on the paged cache.

Decode steps, one or several, have programs of their own, with one token per row. Every other step, chunks of prompts
with or without decode rows, is a packed batch of tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

from model_adapters.bridge.host_arrays import to_device
from model_adapters.caches.paged_cache import PackedBatch, Pool
from model_adapters.ops import registry
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.cpu.ffi import batch_invariant
from model_adapters.ops.linear import skips_equal_rows
from model_adapters.program.model_program import ModelProgram
from model_adapters.program.packed_forward import forward_packed
from torchax_serve.buckets import bucket_for, bucket_sizes, token_buckets
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.executors.base import (
    AbstractStep,
    ExecutorLimits,
    abstract_ints,
    refuse_encoder_input,
)
from torchax_serve.executors.request_input import RequestInput
from torchax_serve.executors.step_inputs import SAMPLED_ON_DEVICE, FusedDecodeSpec, PackedStepSpec
from torchax_serve.kv_cache.pools import PagedCache
from torchax_serve.sampling.sample import sample
from torchax_serve.sampling.sampler import Sampler
from torchax_serve.sampling.slot_params import SlotParams
from torchax_serve.sampling.types import RowOptions, SamplerSpec, SamplerState
from torchax_serve.scheduler import PlanRow, StepPlan

SMALLEST_DECODE_BUCKET = 4
"""Rows of a decode step that cost what one costs: the weights are read once for all of them."""

FREE_TOKENS = 256
"""Tokens up to which a step takes an accelerator about as long as one token, as it waits for the weights."""

MAX_WARM_SCORED_TOKENS = 256
"""Tokens of a step with log-probabilities of prompts that warm-up compiles, if the budget is not smaller. More are
compiled when they come: their logits take as much memory as hundreds of requests."""


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
        self._num_slots = num_slots
        is_accelerator = registry.platform() != "cpu"
        smallest = min(SMALLEST_DECODE_BUCKET, num_slots)
        self._decode_buckets = bucket_sizes(num_slots, 4 if is_accelerator else 2, smallest)
        costs = steps = token_buckets(token_budget)
        if is_accelerator:
            costs = steps = token_buckets(token_budget, 4, FREE_TOKENS)
        elif skips_equal_rows():  # padding, that is: what remains of its cost lies between elements of other sizes
            steps = token_buckets(token_budget, 2, steps[-1])
        self._token_buckets = steps
        self._min_scored_tokens = min(steps[-1], MAX_WARM_SCORED_TOKENS)
        self.limits = ExecutorLimits(max_num_seqs=num_slots, fused_decode_steps=max_num_steps, token_buckets=costs)
        compiled = functools.partial(CachedFunction, programs, facts=program.trace_facts, recall=program.restore_facts)
        self._known_specs: dict[tuple[int, bool, bool], PackedStepSpec] = {}
        self._idle_options: dict[int, RowOptions] = {}
        self._programs: dict[PackedStepSpec | FusedDecodeSpec, Any] = {}
        self._step = compiled("packed", self._run, donate=["pools"])
        self._decode_steps = compiled("decode_steps", self._decode, donate=["pools"])

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
        """Computes logits [num_slots, vocab] (or [T, vocab]) in the model's dtype, and the pools."""
        logits, pools = self._forward(weights, pools, spec.unpack(numbers, last_tokens), spec)
        return logits if spec.layout.all_logits else _with_rows(logits, len(last_tokens)), pools

    def _decode(
        self,
        weights: Weights,
        pools: tuple[Pool, ...],
        state: SamplerState,
        options: RowOptions,
        numbers: jax.Array,
        spec: FusedDecodeSpec,
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[Pool, ...], SamplerState]:
        """Computes decode steps.

        Returns logits [num_slots, vocab] of the last step and tokens int32[max_num_steps, S] of all, pools, and the
        sampler's state.
        """
        batch, slots, num_steps, draws = spec.unpack(numbers)
        in_use = batch.kv_lens > 0
        # Traced in front of the loop, which has to know the shape of the logits.
        forward = _TracedFunction(functools.partial(self._forward, spec=spec.packed), weights, pools, batch)

        def step(index: jax.Array, carry: Any) -> Any:
            _, tokens, pools, state = carry
            is_given = (index == 0) & (batch.token_ids != SAMPLED_ON_DEVICE)
            now = dataclasses.replace(
                batch,
                token_ids=jnp.where(is_given, batch.token_ids, state.last_tokens[slots]),
                positions=batch.positions + index,
                kv_lens=batch.kv_lens + jnp.where(in_use, index, 0),
            )
            logits, pools = forward(weights, pools, now)
            args = options.advanced(now.kv_lens), state, logits
            # Behind the condition XLA would look for the maxima on one thread.
            greedy = sample(SamplerSpec("greedy"), *args)
            sampled, state = jax.lax.cond(draws, lambda: sample(SamplerSpec("sampled"), *args), lambda: greedy)
            return logits, tokens.at[index].set(sampled.tokens), pools, state

        shape = forward.result_shape[0]
        logits = jnp.zeros(shape.shape, shape.dtype)
        tokens = jnp.zeros((spec.max_num_steps, spec.packed.num_rows), jnp.int32)
        logits, tokens, pools, state = jax.lax.fori_loop(0, num_steps, step, (logits, tokens, pools, state))
        return (_with_rows(logits, len(state.last_tokens)), tokens), pools, state

    def run_decode(self, plan: StepPlan, sampler: Sampler) -> jax.Array | None:
        """Implements `Executor.run_decode`."""
        found = sampler.fused_options(plan.rows, bucket_for(self._decode_buckets, len(plan.rows)))
        if found is None:
            return None
        options, draws = found
        state = sampler.take_state("sampled")
        tokens, state = self.decode(plan.rows, plan.page_tables, state, options, plan.num_steps, draws)
        sampler.set_state(state)
        return tokens

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
            state: Sampler state without tables.
            options: Options of the rows at their first token, padded to the bucket; levels "greedy" and "sampled".
            num_steps: Number of steps, at most `max_num_steps`.
            draws: Whether any row has the level "sampled".

        Returns:
            Tokens int32[max_num_steps, S], of which the first `num_steps` rows are valid, and the new state.
        """
        spec = self._decode_spec(bucket_for(self._decode_buckets, len(rows)))
        numbers = spec.pack(rows, tables, num_steps=num_steps, draws=draws)
        (_, tokens), state = self._dispatch_decode(spec, state, options, numbers)
        return tokens, state

    def _dispatch_decode(
        self, spec: FusedDecodeSpec, state: SamplerState, options: RowOptions, numbers: np.ndarray
    ) -> tuple[tuple[jax.Array, jax.Array], SamplerState]:
        """Runs a decode program on the cache; returns logits and tokens, and the new state."""
        args = (self._weights, self.cache.pools, state, options, numbers)
        results, self.cache.pools, state = self._program_of(self._decode_steps, spec, args)(*args)
        return results, state

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
        if self._is_decode(rows) and not all_logits:
            spec = self._decode_spec(bucket_for(self._decode_buckets, len(rows)))
            return self._decode_logits(spec, last_tokens, spec.pack(rows, tables, ahead=ahead))
        num_tokens = sum(row.num_tokens for row in rows)
        if all_logits:
            num_tokens = max(num_tokens, self._min_scored_tokens)
        step = self._spec_of(bucket_for(self._token_buckets, num_tokens), all_logits=all_logits)
        args = (self._weights, self.cache.pools, last_tokens, step.pack(rows, tables, ahead))
        logits, self.cache.pools = self._program_of(self._step, step, args)(*args)
        return logits

    def _decode_logits(self, spec: FusedDecodeSpec, last_tokens: jax.Array, numbers: np.ndarray) -> jax.Array:
        """Runs a decode step and returns its logits [num_slots, vocab]; its tokens are not used."""
        num_rows = spec.packed.num_rows
        options = self._idle_options.get(num_rows)
        if options is None:
            idle = SlotParams(self._num_slots, 1).rows((), num_rows)[0]
            options = self._idle_options[num_rows] = jax.device_put(idle, last_tokens.sharding)
        return self._dispatch_decode(spec, SamplerState(last_tokens), options, numbers)[0][0]

    def _program_of(
        self, function: CachedFunction, spec: PackedStepSpec | FusedDecodeSpec, args: tuple[Any, ...]
    ) -> Any:
        """Returns the compiled step; the spec determines the shapes of all arguments."""
        program = self._programs.get(spec)
        if program is None:
            program = self._programs[spec] = function.compiled(*args, spec=spec)
        return program

    def _is_decode(self, rows: Sequence[PlanRow]) -> bool:
        """Returns whether each row has one token, whose rotary frequencies are those of its own length."""
        if self._program.rope is not None and any(row.rope_len > row.context_len + 1 for row in rows):
            return False
        return all(row.num_tokens == 1 for row in rows)

    def _spec_of(self, num_tokens: int, *, is_decode: bool = False, all_logits: bool = False) -> PackedStepSpec:
        """Returns the spec of a step with `num_tokens` tokens, a bucket; no more rows than tokens."""
        key = num_tokens, is_decode, all_logits
        spec = self._known_specs.get(key)
        if spec is None:
            num_rows = min(num_tokens, self._num_slots)
            layout = dataclasses.replace(self.cache.layout, is_decode=is_decode, all_logits=all_logits)
            has_rope_lens = self._program.rope is not None and not is_decode
            spec = PackedStepSpec(
                num_tokens, num_rows, self.cache.pages_per_seq, layout, self._batch_invariant, has_rope_lens
            )
            self._known_specs[key] = spec
        return spec

    def _decode_spec(self, num_rows: int) -> FusedDecodeSpec:
        return FusedDecodeSpec(self._spec_of(num_rows, is_decode=True), self._max_num_steps)

    def temporary_bytes(self) -> int:
        """Implements `Executor.temporary_bytes`."""
        spec = self._spec_of(self._token_buckets[-1])
        return self._step.temporary_bytes(
            self._weights,
            self.cache.pools,
            to_device(np.zeros(self._num_slots), np.int32),
            np.zeros(spec.size, np.int32),
            spec=spec,
        )

    def abstract_steps(self, prefill_lens: Sequence[int]) -> Iterator[AbstractStep]:
        """Yields the steps of `Executor.abstract_steps`; a prefill step has no padding."""
        num_slots = self._num_slots
        specs = [self._spec_of(num_slots, is_decode=True)]
        specs += [self._spec_of(num_tokens) for num_tokens in prefill_lens]
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

    def warm_up(self, sampler: Sampler) -> None:
        """Implements `Executor.warm_up`; every step runs without rows."""
        for num_tokens in self._token_buckets:
            logits = self._run_idle(self._spec_of(num_tokens), sampler)
        scored = self._spec_of(bucket_for(self._token_buckets, self._min_scored_tokens), all_logits=True)
        sampler.warm_up(logits, self._run_idle(scored, sampler))
        for num_rows in self._decode_buckets:
            spec = self._decode_spec(num_rows)
            self._decode_logits(spec, sampler.last_tokens, np.zeros(spec.size, np.int32))
        self.cache.warm_up()

    def _run_idle(self, spec: PackedStepSpec, sampler: Sampler) -> jax.Array:
        """Runs a step without rows and returns its logits."""
        args = (self._weights, self.cache.pools, sampler.last_tokens, np.zeros(spec.size, np.int32))
        logits, self.cache.pools = self._step(*args, spec=spec)
        return logits


def _with_rows(logits: jax.Array, num_rows: int) -> jax.Array:
    """Returns logits [S, vocab] with rows of zeros behind them, [num_rows, vocab]."""
    return jnp.pad(logits, ((0, num_rows - len(logits)), (0, 0)))


class _TracedFunction:
    """A pure function, traced once for arguments of these shapes.

    Args:
        function: Function of pytrees of arrays.
        *args: Arguments, or others of their shapes.

    Attributes:
        result_shape: Shapes and dtypes of its results.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._closed, self.result_shape = jax.make_jaxpr(function, return_shape=True)(*args)

    def __call__(self, *args: Any) -> Any:
        """Returns the results for `args`."""
        results = jex.jaxpr_as_fun(self._closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.result_shape), results)
