"""Runs one forward per request, for models that cannot run packed.

Those models count positions themselves, attend outside of transformers' interface, or have a recurrent state. The pages
of a request are gathered into dense keys and values before its forward (`SequenceForward`), and new ones are scattered
back; a recurrent state is read from its slot and written back. Decode rows of similar length share one program, and
prefill chunks of equal length do, up to the tokens of a long one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.caches.packed_batch import MediaTokens
from model_adapters.device_arrays import to_device
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.compressed_weight import Weights
from torchax_serve.compilation.background import CompileTask, abstract
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache
from torchax_serve.executors.base import (
    AbstractStep,
    ExecutorLimits,
    MakeBitmask,
    abstract_ints,
    refuse_encoder_input,
)
from torchax_serve.executors.encoder_inputs import EncoderInputs
from torchax_serve.executors.media_slots import MediaSlots
from torchax_serve.executors.per_sequence.batching import ProgramCall, StepSplitter
from torchax_serve.executors.per_sequence.buckets import PerSequenceBuckets, PerSequenceSpec
from torchax_serve.executors.per_sequence.forward import SequenceForward
from torchax_serve.executors.per_sequence.step import SequenceStep
from torchax_serve.executors.request_input import MediaInput, RequestInput
from torchax_serve.executors.slot_adapters import SlotAdapters
from torchax_serve.executors.speculation.draft_head import DraftHead
from torchax_serve.executors.speculation.draft_model import DraftModel
from torchax_serve.executors.speculation.per_sequence_drafts import SequenceDrafts
from torchax_serve.executors.speculation.verified_tokens import VerifiedTokens
from torchax_serve.kv_cache.cache_layout import UNBOUNDED, CacheLayout
from torchax_serve.kv_cache.head_state import HeadedCacheWithStates
from torchax_serve.kv_cache.slot_states import PagedCacheWithStates
from torchax_serve.sampling.sampler import Sampler
from torchax_serve.sampling.types import Logprobs
from torchax_serve.scheduler import PlanRow, SpeculativeConfig, StepPlan


class PerSequenceExecutor:
    """The `Executor` of models that cannot run packed, on a `PagedCacheWithStates`.

    A step has decode rows and prefill rows; of these at most one where prompts cannot share a program.

    Attributes:
        runs_ahead: As `Executor.runs_ahead`.

    Args:
        forward: Forward of one request.
        weights: Weights by name.
        cache: Page pools and states, replaced by each step.
        executables: Cache of compiled steps.
        layout: What a request stores in pages and in states.
        num_slots: Maximum number of rows of a step.
        chunk_sizes: Lengths of prefill chunks, descending.
        is_exact: Whether a chunk must have one of these lengths; otherwise it is padded to the next one.
        block_len: Maximum number of tokens of one forward; a longer chunk, which is exact, takes several.
        sources: Encoder inputs by slot; None for a model without an encoder.
        lora: Form of the adapters' matrices among the weights; empty: there are none.
        speculative: Options of speculation; None: no step verifies drafts.
        draft: Model or head that drafts; None: drafts are looked up.
        batches_prompts: Whether chunks of several prompts may share a program.
    """

    FUNCTION = "per_sequence"  # name of the steps, by which other hosts find them
    runs_ahead = True
    num_substitutes = 0

    def __init__(
        self,
        forward: SequenceForward,
        weights: Weights,
        cache: PagedCacheWithStates,
        executables: ExecutableCache,
        layout: CacheLayout,
        *,
        num_slots: int,
        chunk_sizes: Sequence[int],
        is_exact: bool,
        block_len: int = UNBOUNDED,
        sources: EncoderInputs | None = None,
        lora: str = "",
        speculative: SpeculativeConfig | None = None,
        draft: DraftModel | DraftHead | None = None,
        batches_prompts: bool = False,
    ) -> None:
        self._forward, self.cache = forward, cache
        self._num_slots, self.sources = num_slots, sources
        self.limits = ExecutorLimits(
            max_num_seqs=num_slots,
            max_encoder_len=None if sources is None else sources.max_len,
            chunk_sizes=tuple(chunk_sizes) if is_exact else None,
            batches_prefill=batches_prompts,
            shares_prefixes=not layout.rows,
        )
        self.shapes = PerSequenceBuckets(
            num_slots=num_slots,
            chunk_sizes=chunk_sizes,
            is_exact=is_exact,
            block_len=block_len,
            page_size=cache.plan.page_size,
            pages_per_seq=cache.pages_per_seq if layout.pages else 0,
            source_buckets=() if sources is None else sources.buckets,
            first_source_buckets=() if sources is None else sources.first_buckets,
            has_rope_lens=forward.program.rope is not None,
            lora=lora,
            batches_prompts=batches_prompts,
        )
        self._adapters = SlotAdapters(num_slots, lora)
        self._media = MediaSlots(num_slots)
        self._splitter = StepSplitter(self.shapes, num_slots, sources, self._media)
        self._compiles_ahead = executables.background is not None
        facts = forward.program
        compiled = partial(CachedFunction, executables, facts=facts.trace_facts, restore_facts=facts.restore_facts)
        head = draft if isinstance(draft, DraftHead) else None
        self._weights: Any = weights if head is None else head.loaded.with_model(weights)
        self._run = SequenceStep(forward, layout, self._adapters, head, cache.plan.max_len)
        self._step = compiled(self.FUNCTION, self._run.run, donate={"pools": 1, "states": 2})
        self._drafts: SequenceDrafts | None = None
        if speculative is not None:
            self._drafts = SequenceDrafts(
                speculative,
                *(forward, layout, block_len, self._weights, cache, executables, compiled, self.shapes),
                constrained=self._run.with_sharding,
                num_slots=num_slots,
                adapters=self._adapters,
                draft=draft,
            )

    @property
    def num_programs(self) -> int:
        """Compiled steps."""
        others = (part.num_programs for part in (self.sources, self._drafts) if part is not None)
        return self._step.num_programs + sum(others)

    def run(
        self,
        rows: Sequence[PlanRow],
        tables: Sequence[np.ndarray],
        last_tokens: jax.Array,
        *,
        ahead: int = 0,
    ) -> jax.Array:
        """Runs one step as `Executor.run`, with float32 logits.

        Prefill rows are the last ones, and there is at most one group.
        """
        return self._run_rows(rows, tables, last_tokens, ahead)

    def run_scored(
        self,
        rows: Sequence[PlanRow],
        tables: Sequence[np.ndarray],
        sampler: Sampler,
        following: np.ndarray,
        num_top: int,
    ) -> tuple[Logprobs, jax.Array]:
        """Implements `Executor.run_scored`."""
        logits = self._run_rows(rows, tables, sampler.last_tokens, 0, all_logits=True)
        ids, last = np.zeros(len(logits), np.int32), np.zeros(self._num_slots, np.int32)
        ids[: len(following)] = following
        last[: len(rows)] = np.cumsum([row.num_tokens for row in rows]) - 1
        return sampler.prompt_logprobs(logits, ids, last, num_top, len(following))

    def _run_rows(
        self,
        rows: Sequence[PlanRow],
        tables: Sequence[np.ndarray],
        last_tokens: jax.Array,
        ahead: int,
        *,
        all_logits: bool = False,
    ) -> jax.Array:
        """Runs one step; returns logits [num_slots, vocab], or [T, vocab] of every token."""
        if self._drafts is not None:
            self._drafts.catch_up(tables)
        jobs = self._splitter.of(self._media.with_token_ids(rows), ahead, all_logits)
        parts = []
        for job in jobs:
            numbers = self._splitter.numbers(job, tables, ahead)
            hidden = None
            if self.sources is not None and job.spec.kind == "begin":
                hidden = self.sources.encoder_output([row.slot for row in job.rows], job.spec.source_len)
            media = self._media.tokens(job.rows, job.spec.num_tokens, job.spec.media)
            parts.append(self._dispatch(job.spec, last_tokens, numbers, hidden, media))
        size = self._splitter.num_tokens_out(jobs) if all_logits else self._num_slots
        if len(jobs) == 1 and len(parts[0]) == size:
            return parts[0]
        out = jnp.zeros((size, parts[0].shape[1]), jnp.float32)
        for job, logits in zip(jobs, parts, strict=True):
            places = np.full(len(logits), len(out), np.int32)  # out of bounds, hence dropped
            places[: len(job.places)] = job.places
            out = _place(out, logits, to_device(places, np.int32))
        return out

    def _dispatch(
        self,
        spec: PerSequenceSpec,
        last_tokens: jax.Array,
        numbers: np.ndarray,
        hidden: jax.Array | None,
        media: MediaTokens | None = None,
    ) -> jax.Array:
        """Runs a program on the cache; returns its logits."""
        logits, self.cache.pools, self.cache.states = self._step(
            self._weights,
            self.cache.pools,
            self.cache.states,
            last_tokens,
            to_device(self._adapters.append_to(numbers), np.int32),
            hidden,
            *(() if media is None else (media,)),
            spec=spec,
        )
        return logits

    def first_pages(self) -> tuple[np.ndarray, ...]:
        """Returns page tables that assign the first pages to slot 0 of an unused cache."""
        tables = []
        for group in self.cache.plan.groups:
            table = np.zeros((self._num_slots, self.cache.pages_per_seq), np.int32)
            num_pages = min(group.num_pages - 1, self.cache.pages_per_seq)
            table[0, :num_pages] = np.arange(1, num_pages + 1)
            tables.append(table)
        return tuple(tables)

    def temporary_bytes(self) -> int:
        """Implements `Executor.temporary_bytes`."""
        of_drafts = 0 if self._drafts is None else self._drafts.temporary_bytes()
        return max(of_drafts, *map(self._temporary_bytes, self.shapes.largest()))

    def _temporary_bytes(self, spec: PerSequenceSpec) -> int:
        return self._step.temporary_bytes(
            self._weights,
            self.cache.pools,
            self.cache.states,
            to_device(np.zeros(self._num_slots), np.int32),
            to_device(self._adapters.empty(sum(spec.sizes)), np.int32),
            self._empty_encoder_input(spec),
            spec=spec,
        )

    def _empty_encoder_input(self, spec: PerSequenceSpec) -> jax.Array | None:
        if self.sources is None or spec.kind != "begin":
            return None
        return self.sources.dummy(spec.source_len, spec.num_rows)

    def abstract_steps(self, prefill_lens: Sequence[int]) -> Iterator[AbstractStep]:
        """Implements `Executor.abstract_steps`; a prefill step is the last chunk of its prompt."""
        final_chunks = dict.fromkeys(self.shapes.final_chunk(length) for length in prefill_lens)
        for spec in (self.shapes.largest_decode(), *final_chunks):
            is_decode = spec.kind == "decode"
            sizes = self._num_slots, len(self._adapters.empty(sum(spec.sizes)))
            ints = (abstract_ints(self._forward.program.sharding, size) for size in sizes)
            yield AbstractStep(
                name="decode" if is_decode else "prefill",
                num_tokens=spec.num_rows * spec.num_tokens,
                num_rows=spec.num_rows,
                context_len=self.cache.plan.max_len,
                num_prompts=0 if is_decode else 1,
                function=partial(self._run.run, hidden=None, spec=spec),
                args=(self.cache.pools, self.cache.states, *ints),
                donated=(0, 1),
            )

    def check(self, name: str, request_input: RequestInput) -> None:
        """Implements `Executor.check`."""
        if isinstance(request_input, MediaInput) and self.sources is None:
            if request_input.sees_until is not None:
                raise InvalidArgumentError(f"{name}: expected tokens that see none behind them, got an image whose do")
        elif self.sources is None:
            refuse_encoder_input(name, request_input)
        else:
            self.sources.check(name, request_input)

    def assign(self, slot: int, request_input: RequestInput, adapter_id: int = 0) -> None:
        """Implements `Executor.assign`."""
        self._adapters.assign(slot, adapter_id)
        self._media.assign(slot, request_input)
        if self.sources is not None:
            self.sources.assign(slot, request_input)
        if isinstance(self.cache, HeadedCacheWithStates):
            self.cache.free_slot(slot)

    def run_decode(
        self, plan: StepPlan, sampler: Sampler, make_bitmask: MakeBitmask | None = None
    ) -> jax.Array | VerifiedTokens | None:
        """Implements `Executor.run_decode`: of plans without drafts there is no such program."""
        return None if self._drafts is None or plan.drafts is None else self._drafts.run(plan, sampler, make_bitmask)

    def prepare(self, plan: StepPlan) -> None:
        """Does nothing: steps differ by the lengths of requests, so few are known before."""

    def compile_tasks(self, sampler: Sampler) -> Iterator[CompileTask]:
        """Implements `Executor.compile_tasks`; on several hosts in the order of `warm_up`."""

        def compile(spec: PerSequenceSpec) -> Any:
            zeros = np.zeros(self._num_slots), self._adapters.empty(sum(spec.sizes))
            ints = (to_device(each, np.int32) for each in zeros)
            args = (self.cache.pools, self.cache.states, *ints, self._empty_encoder_input(spec))
            return self._step.compiled(self._weights, *abstract(args), spec=spec)

        for spec in self.shapes.all() if self._compiles_ahead else ():
            yield CompileTask(spec, partial(compile, spec))
        if self._drafts is not None and self._compiles_ahead:
            yield from self._drafts.compile_tasks()

    def warm_up(self, sampler: Sampler) -> None:
        """Implements `Executor.warm_up`; every step runs without rows."""
        out = None
        for spec in self.shapes.all():
            numbers = self._splitter.numbers(ProgramCall(spec, [], []), (), 0)
            logits = self._dispatch(spec, sampler.last_tokens, numbers, self._empty_encoder_input(spec))
            if out is None:
                out = jnp.zeros((self._num_slots, logits.shape[1]), jnp.float32)
            out = _place(out, logits, to_device(np.full(len(logits), self._num_slots), np.int32))
        assert out is not None
        for task in sampler.compile_tasks(out):
            task.compile()
        self.cache.warm_up()


@partial(jax.jit, donate_argnums=0)
def _place(out: jax.Array, logits: jax.Array, places: jax.Array) -> jax.Array:
    return out.at[places].set(logits, mode="drop")
