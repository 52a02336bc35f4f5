"""Probes a model that cannot run packed and builds its `PerSequenceExecutor`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from model_adapters.errors import OutOfMemoryError, UnsupportedModelError
from model_adapters.ops import registry
from model_adapters.ops.kv_pool import LARGEST
from torchax_serve.buckets import bucket_sizes
from torchax_serve.executors.base import ExecutorChoice
from torchax_serve.executors.encoder_inputs import (
    SMALLEST_SOURCE_LEN,
    EncoderInputs,
    PrecomputedEncoderOutputs,
    TokenEncoderInputs,
    encoder_buckets,
)
from torchax_serve.executors.packed.factory import draft_of, head_shapes
from torchax_serve.executors.per_sequence.chunked_prefill_probe import find_chunk_len
from torchax_serve.executors.per_sequence.executor import PerSequenceExecutor
from torchax_serve.executors.per_sequence.forward import PROBE_LEN, SequenceForward, as_unsupported
from torchax_serve.executors.per_sequence.scales import calibrate_by_sequence, check_layout
from torchax_serve.executors.slot_adapters import lora_form, step_weights
from torchax_serve.executors.speculation.draft_assistant import DraftAssistant
from torchax_serve.executors.speculation.draft_head import DraftHead
from torchax_serve.executors.speculation.draft_model import DraftModel
from torchax_serve.kv_cache.cache_layout import UNBOUNDED, CacheLayout
from torchax_serve.kv_cache.head_state import HeadedCacheWithStates
from torchax_serve.kv_cache.memory import MemoryBudget, free_bytes
from torchax_serve.kv_cache.multihost_pools import MultiHostPoolAllocator
from torchax_serve.kv_cache.pools import CacheAllocation, HeadScales, PagedLayerSpec, PoolAllocator
from torchax_serve.kv_cache.scales import dtype_of
from torchax_serve.kv_cache.slot_states import PagedCacheWithStates
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.scheduler.speculative_config import refuse_drafts

EXACT_CHUNK_SIZES = (256, 64, 16, 4, 1)
"""Lengths of chunks where a chunk may not be padded; the last one must be 1."""
SHORTEST_PADDED = 16


def per_sequence_executor(runtime: ModelRuntime, sizes: MemoryBudget, why_not_packed: str) -> ExecutorChoice:
    """Returns the per-sequence executor of a model, with a cache sized from the free memory.

    Raises:
        UnsupportedModelError: requests of the model cannot be batched; the message has both reasons.
        OutOfMemoryError: the cache does not fit.
    """
    while True:
        try:
            return _executor_of(runtime, sizes, why_not_packed)
        except OutOfMemoryError:  # a step needs memory, too, and others may have taken some since it was counted
            if not _may_lower_encoder_len(sizes):
                raise
            halved = 1 << (sizes.max_encoder_len - 1).bit_length() - 1
            sizes = dataclasses.replace(sizes, max_encoder_len=max(halved, SMALLEST_SOURCE_LEN))


def _may_lower_encoder_len(sizes: MemoryBudget) -> bool:
    """Tells whether the encoder length is nobody's choice, and not the least one."""
    is_any = sizes.encoder_len_is_default and sizes.source_len is None
    return is_any and sizes.max_encoder_len > SMALLEST_SOURCE_LEN


def _executor_of(runtime: ModelRuntime, sizes: MemoryBudget, why_not_packed: str) -> ExecutorChoice:
    """Returns the executor at an encoder length of at most that of `sizes`.

    Raises as `per_sequence_executor`.
    """
    executables = runtime.steps.executables
    if executables.launcher is not None:
        refuse_drafts(sizes.speculative, "a model that runs per-sequence on several hosts")
        _check_several_hosts(runtime, sizes, why_not_packed)
    try:
        forward = SequenceForward(runtime)
        layout = executables.memoize("per-sequence layout", "", forward.layout)
        sources: EncoderInputs | None = None
        if sizes.source_len is not None:
            sources, layout = (
                PrecomputedEncoderOutputs(runtime, (sizes.source_len,)),
                layout.with_encoder_len(sizes.source_len),
            )
            sizes = _with_fitting_slots(sizes, layout)
        elif runtime.encoder is not None:
            sizes = _with_source_len(sizes, layout)
            max_len = sizes.max_encoder_len
            runs_before = runtime.encoder.runs_before_engine
            sources = (
                PrecomputedEncoderOutputs(runtime, encoder_buckets(max_len))
                if runs_before
                else TokenEncoderInputs(runtime.encoder.runtime, max_len)
            )
            layout = layout.with_encoder_len(max_len)
        check_drafts(sizes, forward, sources)
        draft = draft_of(runtime, sizes)
        if isinstance(draft, DraftHead):
            check_head(sizes, runtime, draft, layout)
            forward.layers = draft.loaded.layers
        parts = PerSequenceFactory(runtime, forward, layout, sizes, sources, draft=draft)
        exact = parts  # probes compare logits, which rounded keys and values change
        if sizes.kv_cache_dtype is not None:
            check_layout(sizes.kv_cache_dtype, layout)
            dtype = dtype_of(sizes.kv_cache_dtype)
            scales = calibrate_by_sequence(runtime, forward, layout, wanted_block_len(layout), dtype, sources)
            parts = dataclasses.replace(parts, layout=layout.with_encoder_in(dtype), scales=scales)
            if sources is not None:  # whose exact states lie beside the cache during probes: of one request they do
                exact = dataclasses.replace(exact, sizes=dataclasses.replace(sizes, max_num_seqs=1))
        cache = parts.cache()
        make = functools.cache(functools.partial(parts.model, cache))
        block_len = executables.memoize("per-sequence trial", f"{sizes}", lambda: exact.block_len(cache, make))
    except UnsupportedModelError as reason:
        raise UnsupportedModelError(
            f"requests of this model cannot be batched. Packed: {why_not_packed}. Each by itself: {reason}"
        ) from reason
    cache.reset()
    return ExecutorChoice(make(block_len), why_not_packed)


def check_drafts(sizes: MemoryBudget, forward: SequenceForward, sources: EncoderInputs | None) -> None:
    """Raises UnsupportedArgumentError if drafts are asked of a model that cannot verify any."""
    if sources is not None:
        refuse_drafts(sizes.speculative, "a model with an encoder beside its decoder")
    if forward.infers_positions:
        refuse_drafts(sizes.speculative, "a model that counts positions itself, by a table that padding would leave")
    if getattr(forward.program.target.config.get_text_config(), "attention_chunk_size", None) is not None:
        refuse_drafts(sizes.speculative, "attention in chunks of tokens that pages do not divide")


def check_head(sizes: MemoryBudget, runtime: ModelRuntime, head: DraftHead, layout: CacheLayout) -> None:
    """Raises UnsupportedArgumentError for a model whose steps a draft head cannot follow."""
    if isinstance(head, DraftAssistant):
        refuse_drafts(sizes.speculative, "a model that runs per-sequence, whose pages an assistant cannot read")
    if layout.block_len != UNBOUNDED:
        refuse_drafts(sizes.speculative, "a model whose code loops over tokens, so that prompts take several forwards")
    if not layout.pages or sizes.kv_cache_dtype is not None:
        refuse_drafts(sizes.speculative, "a model without keys and values, or with these in 8 bits")


def _check_several_hosts(runtime: ModelRuntime, sizes: MemoryBudget, why_not_packed: str) -> None:
    """Refuses what the followers of several hosts have no functions for.

    Raises:
        UnsupportedModelError: the model has an encoder.
    """
    if runtime.encoder is not None or sizes.source_len is not None:
        raise UnsupportedModelError(
            f"requests of a model with an encoder are batched on one host only, got several: {why_not_packed}"
        )


def _with_source_len(sizes: MemoryBudget, layout: CacheLayout) -> MemoryBudget:
    """Returns `sizes` with an encoder length whose inputs take at most half of the memory."""
    if not sizes.encoder_len_is_default:
        return sizes
    memory = sizes.kv_cache_memory_bytes or free_bytes()
    each = sum(row.num_bytes for row in layout.rows if row.is_of_source) * (sizes.max_num_seqs + 1)
    fitting = SMALLEST_SOURCE_LEN
    while 2 * fitting * each <= memory // 2:  # by powers of two: what is free differs from start to start
        fitting *= 2
    return dataclasses.replace(sizes, max_encoder_len=min(sizes.max_encoder_len, fitting))


def _with_fitting_slots(sizes: MemoryBudget, layout: CacheLayout) -> MemoryBudget:
    """Returns `sizes` with as many slots as encoder outputs fit into half of the memory.

    Raises:
        UnsupportedModelError: not even one request fits.
    """
    memory = sizes.kv_cache_memory_bytes or free_bytes()
    each = sum(row.num_bytes for row in layout.rows if row.is_of_source)
    most = memory // 2 // each - 1  # one row is nobody's
    if most < 1:
        raise UnsupportedModelError(
            f"expected memory for keys and values of two encoder outputs, {2 * each} bytes in half of the memory, got "
            f"{memory // 2} bytes; raise kv_cache_memory_bytes"
        )
    if most >= sizes.max_num_seqs:
        return sizes
    return dataclasses.replace(
        sizes, max_num_seqs=1 << most.bit_length() - 1
    )  # what is free differs from start to start


def wanted_block_len(layout: CacheLayout) -> int:
    """Returns the maximum number of tokens of one forward; `UNBOUNDED` for any."""
    if layout.block_len >= EXACT_CHUNK_SIZES[0]:
        return UNBOUNDED
    return next(size for size in EXACT_CHUNK_SIZES if size <= layout.block_len)


@dataclasses.dataclass(frozen=True)
class PerSequenceFactory:
    """Builds executors and caches of one model: for probes, and for the engine."""

    runtime: ModelRuntime
    forward: SequenceForward
    layout: CacheLayout
    sizes: MemoryBudget
    sources: EncoderInputs | None
    scales: tuple[HeadScales, ...] | None = None
    draft: DraftModel | DraftHead | None = None

    @property
    def stored(self) -> tuple[PagedLayerSpec, ...]:
        """Leaves in pages as they are stored: in 8 bits with `scales`."""
        if self.sizes.kv_cache_dtype is None or self.scales is None:
            return (*self.layout.pages, *self.of_head)
        dtype = dtype_of(self.sizes.kv_cache_dtype)
        return tuple(dataclasses.replace(leaf, dtype=dtype) for leaf in self.layout.pages)

    @property
    def of_head(self) -> tuple[PagedLayerSpec, ...]:
        """The layer of pages that a draft head has; nothing without one."""
        return head_shapes(self.layout.pages, self.draft)

    @property
    def pages(self) -> PoolAllocator:
        """Allocator of pools and states, sharded by heads and channels if the model is on a mesh."""
        sharding = self.runtime.program.sharding
        if sharding is None:
            return PoolAllocator(begins_small=self.sizes.max_num_seqs == 1)
        executables = self.runtime.steps.executables
        if executables.launcher is not None:
            return MultiHostPoolAllocator(executables, sharding)
        return PoolAllocator(sharding.pool_sharding, sharding.state_sharding)

    def model(self, cache: PagedCacheWithStates, block_len: int) -> PerSequenceExecutor:
        """Returns an executor on `cache`; pads chunks only if the model ignores padding."""
        is_exact = (
            self.runtime.cache_support.is_recurrent
            or self.forward.infers_positions
            or block_len < self.sizes.max_num_batched_tokens
        )
        is_exact = is_exact or self.sources is not None
        budget = self.sizes.max_num_batched_tokens
        exact = tuple(size for size in EXACT_CHUNK_SIZES if size <= budget)
        return PerSequenceExecutor(
            self.forward,
            step_weights(self.runtime),
            cache,
            self.runtime.steps.executables,
            self.layout,
            num_slots=self.sizes.max_num_seqs,
            chunk_sizes=exact if is_exact else bucket_sizes(budget, 4, SHORTEST_PADDED)[::-1],
            is_exact=is_exact,
            block_len=block_len,
            sources=self.sources,
            lora=lora_form(self.runtime),
            speculative=self.sizes.speculative,
            draft=self.draft,
            batches_prompts=self._batches_prompts,
        )

    @property
    def _batches_prompts(self) -> bool:
        """Whether chunks of several prompts share programs.

        On a CPU only: elsewhere a prompt fills the device, and kernels would not follow the rows. Drafts have programs
        for one prompt.
        """
        has_drafts = self.sizes.speculative is not None or self.draft is not None
        is_cpu = registry.platform() == "cpu" and not self.layout.is_on_mesh
        return self.layout.batches_prompts and is_cpu and not has_drafts

    def cache(self) -> PagedCacheWithStates:
        """Returns the cache of the engine: states for all slots, pages in the rest of the budget."""
        sizes, slots = self.sizes, self.sizes.max_num_seqs
        state_bytes = sum(row.num_bytes for row in self.layout.rows) * (slots + 1)
        useful = sizes.max_usable_bytes(self.stored) + state_bytes
        budget = sizes.choose_cache_bytes(useful, self._temporary_bytes)
        # Where memory is short, encoder outputs of a length that nobody asked for leave half of it to pages.
        share = 2 if budget < useful and _may_lower_encoder_len(sizes) else 1
        sizes.check_states(state_bytes, budget, share)
        return self._cache_of(sizes.plan(self.stored, budget - state_bytes))

    def _cache_of(self, plan: CacheAllocation) -> PagedCacheWithStates:
        slots = self.sizes.max_num_seqs
        if isinstance(self.draft, DraftHead):
            return HeadedCacheWithStates(plan, self.layout, slots, self.draft.width, self.draft.dtype, self.pages)
        return PagedCacheWithStates(plan, self.layout, slots, self.pages, self.scales)

    def _small_cache(self) -> PagedCacheWithStates:
        num_pages = 2 + PROBE_LEN // self.sizes.page_size
        return self._cache_of(self.sizes.probe_plan(self.stored, num_pages))

    def _temporary_bytes(self) -> int:
        def ask() -> int:
            return self.model(self._small_cache(), wanted_block_len(self.layout)).temporary_bytes()

        return self.runtime.steps.executables.memoize(
            "per-sequence temporary", f"{self.sizes}{lora_form(self.runtime)}", ask
        )

    def block_len(self, cache: PagedCacheWithStates, make: Callable[[int], PerSequenceExecutor]) -> int:
        """Finds the number of tokens of one forward, on `cache` or on a larger one."""
        needed = -(-PROBE_LEN // self.sizes.page_size)
        is_rounded = any(str(leaf.dtype) in LARGEST for leaf in cache.plan.shapes)
        if is_rounded or any(group.num_pages <= needed for group in cache.plan.groups):
            make = functools.cache(functools.partial(self.model, self._small_cache()))
        with as_unsupported():
            return find_chunk_len(
                make,
                wanted_block_len(self.layout),
                num_slots=self.sizes.max_num_seqs,
                vocab_size=self.runtime.limits.vocab_size,
                is_float32=self.runtime.program.is_float32,
                is_one_by_one=self.forward.needs_token_by_token,
            )
