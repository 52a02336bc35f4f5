"""Builds the `PackedExecutor` of a model, with a cache sized from the free memory.

What traces a model is imported where it is needed: a model whose probes are on disk starts without torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from model_adapters.caches.packed_batch import INDEX_KEYS, NotPackableError
from model_adapters.draft_heads.loaded_head import LoadedAssistant, LoadedHead
from model_adapters.errors import UnsupportedArgumentError
from model_adapters.ops import registry
from torchax_serve.executors.base import ExecutorChoice
from torchax_serve.executors.packed.executor import PackedExecutor
from torchax_serve.executors.packed.probes import (
    RECURRENT,
    TPU_LANES,
    packed_shapes,
    recurrent_or_reason,
    shapes_or_reason,
    trace_packed,
)
from torchax_serve.executors.slot_adapters import lora_form, step_weights
from torchax_serve.executors.speculation.draft_assistant import DraftAssistant
from torchax_serve.executors.speculation.draft_head import DraftHead
from torchax_serve.executors.speculation.draft_model import DraftModel
from torchax_serve.executors.speculation.loaded_draft import LoadedDraft
from torchax_serve.kv_cache.head_state import HeadedCache
from torchax_serve.kv_cache.hybrid_cache import HybridCache, RecurrentLayers
from torchax_serve.kv_cache.memory import SNAPSHOTS_PER_SLOT, MemoryBudget
from torchax_serve.kv_cache.pools import CacheAllocation, HeadScales, PagedCache, PagedLayerSpec, PoolAllocator

if TYPE_CHECKING:
    from torchax_serve.runtime.model_runtime import ModelRuntime


def packed_executor(runtime: ModelRuntime, sizes: MemoryBudget) -> ExecutorChoice:
    """Returns the packed executor of a model, with a cache sized from the free memory.

    Raises:
        NotPackableError: the model's code does not support packed sequences, or not with these options.
        OutOfMemoryError: the cache does not fit.
    """
    executables = runtime.steps.executables
    shapes, recurrent = layers_of(runtime, sizes)
    scales = None
    if sizes.kv_cache_dtype is not None:
        from torchax_serve.kv_cache.scales import calibrate_scales, dtype_of

        dtype = dtype_of(sizes.kv_cache_dtype)
        shapes = _in_8_bits(runtime, shapes, sizes, dtype, recurrent)
        scales = calibrate_scales(runtime.with_module(), dtype)

    draft = draft_of(runtime, sizes)
    shapes, head = (*shapes, *head_shapes(shapes, draft)), draft if isinstance(draft, DraftHead) else None
    new = functools.partial(_cache, runtime, sizes, recurrent, scales, head)

    def temporary() -> int:
        return _model(runtime, new(sizes.probe_plan(shapes)), sizes, draft).temporary_bytes()

    budget = sizes.choose_cache_bytes(
        usable_bytes(sizes, shapes, recurrent),
        lambda: executables.memoize("temporary", f"{sizes}{lora_form(runtime)}", temporary),
    )
    return ExecutorChoice(_model(runtime, new(*sized_cache(sizes, shapes, recurrent, budget)), sizes, draft))


def usable_bytes(sizes: MemoryBudget, shapes: Sequence[PagedLayerSpec], recurrent: RecurrentLayers | None) -> int:
    """Returns the most bytes that pages and states can use."""
    usable = sizes.max_usable_bytes(shapes)
    if recurrent is None:
        return usable
    num_rows = sizes.max_num_seqs + 1 + SNAPSHOTS_PER_SLOT * sizes.max_num_seqs * sizes.enable_prefix_caching
    return usable + recurrent.num_bytes(num_rows)


def sized_cache(
    sizes: MemoryBudget, shapes: Sequence[PagedLayerSpec], recurrent: RecurrentLayers | None, budget_bytes: int
) -> tuple[CacheAllocation, int]:
    """Returns how many pages and snapshots of states fit into `budget_bytes`.

    Raises:
        InvalidArgumentError: not even a sequence of one page fits.
        OutOfMemoryError: the states of all requests do not fit.
    """
    num_snapshots = 1
    if recurrent is not None:
        running = recurrent.num_bytes(sizes.max_num_seqs + 1)
        sizes.check_states(running, budget_bytes)
        num_snapshots = sizes.num_snapshots(recurrent.num_bytes(1), budget_bytes - running, has_pages=bool(shapes))
        budget_bytes -= recurrent.num_bytes(sizes.max_num_seqs + num_snapshots)
    return sizes.plan(shapes, budget_bytes), num_snapshots


def layers_of(runtime: ModelRuntime, sizes: MemoryBudget) -> tuple[tuple[PagedLayerSpec, ...], RecurrentLayers | None]:
    """Returns the pages of each layer that attends, and the states of those that are recurrent.

    Raises:
        NotPackableError: the model's code does not support packed sequences, or not with these options.
    """
    executables = runtime.steps.executables
    described = f"{sizes.page_size} {sizes.max_model_len} {lora_form(runtime)}"
    found = executables.memoize("packed shapes", described, lambda: shapes_or_reason(runtime.with_module(), sizes))
    if found != RECURRENT and not isinstance(found, str):
        return found, None
    if found == RECURRENT:
        found = executables.memoize(
            "recurrent layers", described, lambda: recurrent_or_reason(runtime.with_module(), sizes)
        )
        if not isinstance(found, str) and not found[0] and sizes.kv_cache_dtype is not None:
            raise NotPackableError(f"{RECURRENT}, and none has pages, which kv_cache_dtype is for")
    if isinstance(found, str):
        raise NotPackableError(found)
    shapes, recurrent = found
    return shapes, recurrent


def _cache(
    runtime: ModelRuntime,
    sizes: MemoryBudget,
    recurrent: RecurrentLayers | None,
    scales: Sequence[HeadScales] | None,
    head: DraftHead | None,
    plan: CacheAllocation,
    num_snapshots: int = 1,
) -> PagedCache:
    slots = sizes.max_num_seqs
    pages = _allocator(runtime, begins_small=slots == 1 and head is None, has_states=recurrent is not None)
    of_head = None if head is None else (head.width, head.dtype)
    if recurrent is not None:
        return HybridCache(plan, recurrent, slots, num_snapshots, pages, scales, of_head)
    if of_head is not None:
        return HeadedCache(plan, slots, *of_head, pages, scales)
    return PagedCache(plan, pages, scales)


def _allocator(runtime: ModelRuntime, *, begins_small: bool, has_states: bool = False) -> PoolAllocator:
    sharding, executables = runtime.program.sharding, runtime.steps.executables
    if sharding is None:
        return PoolAllocator(begins_small=begins_small)
    if executables.launcher is None:
        of_states = (sharding.state_sharding, sharding.recurrent_sharding) if has_states else ()
        return PoolAllocator(sharding.pool_sharding, *of_states)
    from torchax_serve.kv_cache.multihost_pools import MultiHostPoolAllocator  # imports transformers

    return MultiHostPoolAllocator(executables, sharding)


def _in_8_bits(
    runtime: ModelRuntime,
    shapes: Sequence[PagedLayerSpec],
    sizes: MemoryBudget,
    dtype: np.dtype,
    recurrent: RecurrentLayers | None,
) -> tuple[PagedLayerSpec, ...]:
    """Returns the same layers with pages in `dtype`, of 8 bits; those of indexers stay.

    Raises:
        InvalidArgumentError: no kernel supports them.
        NotPackableError: a layer keeps compressed entries.
    """
    from torchax_serve.kv_cache.scales import check_kernels

    if any(shape.part != INDEX_KEYS for shape in shapes):
        raise NotPackableError("entries of compressed tokens are not kept in 8 bits")
    narrow = tuple(
        shape if shape.indexed_layer is not None else dataclasses.replace(shape, dtype=dtype) for shape in shapes
    )

    def refusals(shapes: Sequence[PagedLayerSpec]) -> list[str]:
        with registry.fallbacks() as reasons:
            trace_packed(runtime.with_module(), shapes, sizes, recurrent)
        return reasons

    described = f"{sizes.page_size} {sizes.max_model_len}"
    both = runtime.steps.executables.memoize(
        f"{dtype} kernels", described, lambda: (refusals(shapes), refusals(narrow))
    )
    check_kernels(str(sizes.kv_cache_dtype), *both)
    return narrow


def _model(
    runtime: ModelRuntime, cache: PagedCache, sizes: MemoryBudget, draft: DraftModel | DraftHead | None
) -> PackedExecutor:
    executables = runtime.steps.executables
    slots, budget = sizes.max_num_seqs, sizes.max_num_batched_tokens
    return PackedExecutor(
        runtime.program,
        step_weights(runtime),
        cache,
        executables,
        num_slots=slots,
        token_budget=budget,
        max_num_steps=sizes.max_num_steps,
        batch_invariant=sizes.batch_invariant,
        speculative=sizes.speculative,
        draft=draft,
        buckets=None if executables.exported is None else executables.exported.memoized("step buckets"),
        lora=lora_form(runtime),
        num_top=sizes.num_top,
    )


def draft_of(runtime: ModelRuntime, sizes: MemoryBudget) -> DraftModel | DraftHead | None:
    """Returns the model or head that drafts; None if the options have none.

    Raises:
        UnsupportedArgumentError: it was not loaded with the model, or does not run packed.
    """
    if sizes.speculative is None or sizes.speculative.looks_up:
        return None
    loaded = sizes.speculative.model
    if isinstance(loaded, LoadedHead):
        loaded = loaded.on(runtime.steps.executables.mesh)
        target = runtime.with_module()
        hidden_size, dtype = target.text_config.hidden_size, target.program.module.dtype
        width = hidden_size * len(loaded.layers)
        kind = DraftAssistant if isinstance(loaded, LoadedAssistant) else DraftHead
        return kind(loaded, runtime.limits.vocab_size, width, str(dtype).removeprefix("torch."))
    if not isinstance(loaded, LoadedDraft):
        raise UnsupportedArgumentError(
            f"speculative_config: method {sizes.speculative.method!r}: expected a model that serve loads on one "
            f"host, got {loaded!r}; leave speculative_config out"
        )
    draft = loaded.on(runtime.steps.executables.mesh)
    try:
        shapes = packed_shapes(draft, sizes)
    except NotPackableError as reason:
        raise UnsupportedArgumentError(
            f"speculative_config: model: expected a model that runs packed, got {loaded.name}: {reason}"
        ) from None
    return DraftModel(
        draft.program,
        draft.weights,
        shapes,
        str(loaded),
        num_slots=sizes.max_num_seqs,
        max_len=sizes.max_model_len,
        page_size=sizes.page_size,
        is_invariant=sizes.batch_invariant,
        vocab_size=runtime.limits.vocab_size,
    )


def head_shapes(shapes: Sequence[PagedLayerSpec], draft: DraftModel | DraftHead | None) -> tuple[PagedLayerSpec, ...]:
    """Returns the paged cache of a draft head's layer, and of its indexer; nothing without one.

    Args:
        shapes: Those of the model's layers.
        draft: Model or head that drafts.
    """
    if not isinstance(draft, DraftHead) or isinstance(draft, DraftAssistant):
        return ()
    own = draft.loaded.kv_shape
    if own is None:
        layers = [shape for shape in shapes if shape.indexed_layer is None]
        pages = dataclasses.replace(layers[-1], window=None, dtype=np.dtype(draft.dtype))
        if not draft.loaded.has_indexer:
            return (pages,)
        keys = next(shape for shape in reversed(shapes) if shape.indexed_layer is not None)
        return pages, dataclasses.replace(keys, window=None, indexed_layer=len(shapes))
    num_heads, width = own
    if registry.platform() == "tpu":
        width += -width % TPU_LANES
    return (PagedLayerSpec(num_heads, width, np.dtype(draft.dtype), None),)
