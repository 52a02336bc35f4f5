"""Probes whether a model runs packed and builds its `PackedExecutor`.

It does if its decoder takes positions as an argument and attends only through transformers' attention interface.
What traces a model is imported where it is needed: a model whose probes are on disk starts without torch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from model_adapters.caches.packed_batch import LayerPools, NotPackableError, PackedBatch, ScaledPool
from model_adapters.draft_heads.loaded_head import LoadedAssistant, LoadedHead
from model_adapters.errors import TorchaxServeError, UnsupportedArgumentError
from model_adapters.ops import registry
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.kv_pool import LARGEST
from torchax_serve.executors.base import ExecutorChoice
from torchax_serve.executors.draft_assistant import DraftAssistant
from torchax_serve.executors.draft_head import DraftHead
from torchax_serve.executors.draft_model import DraftModel
from torchax_serve.executors.loaded_draft import LoadedDraft
from torchax_serve.executors.packed import PackedExecutor
from torchax_serve.executors.slot_adapters import lora_form, step_weights
from torchax_serve.kv_cache.cache_layout import SlotStateSpec
from torchax_serve.kv_cache.head_state import HeadedCache
from torchax_serve.kv_cache.hybrid_cache import HybridCache, RecurrentLayers
from torchax_serve.kv_cache.memory import MemoryBudget
from torchax_serve.kv_cache.pools import CacheAllocation, HeadScales, PagedCache, PagedLayerSpec, PoolAllocator

if TYPE_CHECKING:
    from torchax_serve.runtime.model_runtime import ModelRuntime

TPU_LANES = 128

RECURRENT = "a layer keeps a recurrent state"
"""Why a model is not packed on pages alone."""


def packed_executor(runtime: ModelRuntime, sizes: MemoryBudget) -> ExecutorChoice:
    """Returns the packed executor of a model, with a cache sized from the free memory.

    Raises:
        NotPackableError: the model's code does not support packed sequences.
        OutOfMemoryError: the cache does not fit.
    """
    programs = runtime.steps.executables
    described = f"{sizes.page_size} {sizes.max_model_len} {lora_form(runtime)}"
    shapes = programs.memoize("packed shapes", described, lambda: _shapes_or_reason(runtime, sizes))
    if shapes == RECURRENT:
        return _hybrid_executor(runtime, sizes)
    if isinstance(shapes, str):
        raise NotPackableError(shapes)
    scales = None
    if sizes.kv_cache_dtype is not None:
        from torchax_serve.kv_cache.scales import calibrate_scales, dtype_of

        dtype = dtype_of(sizes.kv_cache_dtype)
        shapes, scales = _in_8_bits(runtime, shapes, sizes, dtype), calibrate_scales(runtime, dtype)

    draft = draft_of(runtime, sizes)
    shapes, head = (*shapes, *head_shapes(shapes, draft)), draft if isinstance(draft, DraftHead) else None

    def temporary() -> int:
        probe = _cache(runtime, sizes.probe_plan(shapes), scales, sizes, head)
        return _model(runtime, probe, sizes, draft).temporary_bytes()

    budget = sizes.choose_cache_bytes(
        sizes.max_usable_bytes(shapes), lambda: programs.memoize("temporary", f"{sizes}{lora_form(runtime)}", temporary)
    )
    cache = _cache(runtime, sizes.plan(shapes, budget), scales, sizes, head)
    return ExecutorChoice(_model(runtime, cache, sizes, draft))


def _hybrid_executor(runtime: ModelRuntime, sizes: MemoryBudget) -> ExecutorChoice:
    """Returns the packed executor of a model with recurrent layers.

    Raises:
        NotPackableError: the model's code does not support packed sequences, or the options do not.
        OutOfMemoryError: the cache does not fit.
    """
    programs, slots = runtime.steps.executables, sizes.max_num_seqs
    if programs.launcher is not None or sizes.speculative is not None or sizes.kv_cache_dtype is not None:
        raise NotPackableError(f"{RECURRENT}; it runs packed on one host, without drafts, on pages in its dtype")
    described = f"{sizes.page_size} {sizes.max_model_len} {lora_form(runtime)}"
    found = programs.memoize("recurrent layers", described, lambda: _recurrent_or_reason(runtime, sizes))
    if isinstance(found, str):
        raise NotPackableError(found)
    shapes, recurrent = found
    pages = _allocator(runtime, begins_small=slots == 1, has_states=True)

    def temporary() -> int:
        probe = HybridCache(sizes.probe_plan(shapes), recurrent, slots, pages)
        return _model(runtime, probe, sizes, None).temporary_bytes()

    state_bytes = recurrent.num_bytes(slots)
    budget = sizes.choose_cache_bytes(
        sizes.max_usable_bytes(shapes) + state_bytes,
        lambda: programs.memoize("temporary", f"{sizes}{lora_form(runtime)}", temporary),
    )
    sizes.check_states(state_bytes, budget)
    cache = HybridCache(sizes.plan(shapes, budget - state_bytes), recurrent, slots, pages)
    return ExecutorChoice(_model(runtime, cache, sizes, None))


def _cache(
    runtime: ModelRuntime,
    plan: CacheAllocation,
    scales: Sequence[HeadScales] | None,
    sizes: MemoryBudget,
    head: DraftHead | None,
) -> PagedCache:
    pages = _allocator(runtime, begins_small=sizes.max_num_seqs == 1 and head is None)
    if head is not None:
        return HeadedCache(plan, sizes.max_num_seqs, head.width, head.dtype, pages, scales)
    return PagedCache(plan, pages, scales)


def _allocator(runtime: ModelRuntime, *, begins_small: bool, has_states: bool = False) -> PoolAllocator:
    sharding, programs = runtime.program.sharding, runtime.steps.executables
    if sharding is None:
        return PoolAllocator(begins_small=begins_small)
    if programs.launcher is None:
        of_states = (sharding.state_sharding, sharding.recurrent_sharding) if has_states else ()
        return PoolAllocator(sharding.pool_sharding, *of_states)
    from torchax_serve.kv_cache.multihost_pools import MultiHostPoolAllocator  # imports transformers

    return MultiHostPoolAllocator(programs, sharding)


def _in_8_bits(
    runtime: ModelRuntime, shapes: Sequence[PagedLayerSpec], sizes: MemoryBudget, dtype: np.dtype
) -> tuple[PagedLayerSpec, ...]:
    """Returns the same layers with pages in `dtype`, of 8 bits.

    Raises:
        InvalidArgumentError: no kernel supports them.
    """
    from torchax_serve.kv_cache.scales import check_kernels

    narrow = tuple(dataclasses.replace(shape, dtype=dtype) for shape in shapes)

    def refusals(shapes: Sequence[PagedLayerSpec]) -> list[str]:
        with registry.fallbacks() as reasons:
            _trace_packed(runtime, shapes, sizes)
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
    programs = runtime.steps.executables
    slots, budget = sizes.max_num_seqs, sizes.max_num_batched_tokens
    return PackedExecutor(
        runtime.program,
        step_weights(runtime),
        cache,
        programs,
        num_slots=slots,
        token_budget=budget,
        max_num_steps=sizes.max_num_steps,
        batch_invariant=sizes.batch_invariant,
        speculative=sizes.speculative,
        draft=draft,
        buckets=None if programs.exported is None else programs.exported.memoized("step buckets"),
        lora=lora_form(runtime),
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
        hidden_size = runtime.text_config.hidden_size
        dtype = runtime.program.module.dtype
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
    """Returns the paged cache of the layer of a draft head; nothing without one.

    Args:
        shapes: Those of the model's layers.
        draft: Model or head that drafts.
    """
    if not isinstance(draft, DraftHead) or isinstance(draft, DraftAssistant):
        return ()
    own = draft.loaded.kv_shape
    if own is None:
        return (dataclasses.replace(shapes[-1], window=None, dtype=np.dtype(draft.dtype)),)
    num_heads, width = own
    if registry.platform() == "tpu":
        width += -width % TPU_LANES
    return (PagedLayerSpec(num_heads, width, np.dtype(draft.dtype), None),)


def _shapes_or_reason(runtime: ModelRuntime, sizes: MemoryBudget) -> tuple[PagedLayerSpec, ...] | str:
    """Returns the paged cache of each layer, or the reason why the model cannot be packed."""
    try:
        return packed_shapes(runtime, sizes)
    except NotPackableError as reason:
        return str(reason)


def packed_shapes(runtime: ModelRuntime, sizes: MemoryBudget) -> tuple[PagedLayerSpec, ...]:
    """Returns the paged cache of each layer of a model that can be packed, found by tracing.

    Raises:
        NotPackableError: the model cannot be packed.
    """
    shapes = page_shapes(runtime)
    _trace_packed(runtime, shapes, sizes)
    return shapes


def page_shapes(runtime: ModelRuntime) -> tuple[PagedLayerSpec, ...]:
    """Returns the paged cache of each layer, found by tracing a prompt.

    Raises:
        NotPackableError: a layer stores something other than keys and values.
    """
    if runtime.program.names.has_encoder:
        raise NotPackableError("there is an encoder beside the decoder")
    if not runtime.cache_support.is_supported:
        raise NotPackableError("the model has no cache that could be paged")
    if runtime.cache_support.is_recurrent:
        raise NotPackableError(RECURRENT)
    return tuple(_page_shape(layer) for layer in _layers_of_prompt(runtime))


def _layers_of_prompt(runtime: ModelRuntime) -> list[Any]:
    """Returns the layers of the cache after a prompt, with arrays as shapes."""
    from model_adapters.program.call_spec import CallSpec

    cache = runtime.cache_support.new(16)
    inputs = {"input_ids": jax.ShapeDtypeStruct((1, 16), np.int32)}

    def prompt(weights: Weights, inputs: dict[str, jax.Array]) -> object:
        return runtime.program.forward(weights, cache.states, None, inputs, CallSpec())[1]

    return list(_shapes_of(prompt, runtime.weights, inputs))


def _recurrent_or_reason(runtime: ModelRuntime, sizes: MemoryBudget) -> Any:
    """Returns what `recurrent_layers` does, or the reason why the model cannot be packed."""
    try:
        return recurrent_layers(runtime, sizes)
    except NotPackableError as reason:
        return str(reason)


def recurrent_layers(runtime: ModelRuntime, sizes: MemoryBudget) -> tuple[tuple[PagedLayerSpec, ...], RecurrentLayers]:
    """Returns pages and states of each layer of a model that can be packed, found by tracing.

    Raises:
        NotPackableError: the model cannot be packed.
    """
    from model_adapters.caches.layers import AttentionLayer

    shapes: list[PagedLayerSpec] = []
    layers: list[LayerPools] = []
    for layer in _layers_of_prompt(runtime):
        if isinstance(layer, AttentionLayer) and layer.pool is not None:
            has_states = hasattr(layer, "conv_states")
            layers.append(LayerPools(pages=len(shapes), is_open=has_states))
            shapes.append(_page_shape(layer))
        else:
            layers.append(LayerPools(is_open=True))
    states = _trace_packed(runtime, shapes, sizes, RecurrentLayers(tuple(layers), ()))
    place, known, specs = len(shapes), [], []
    for kept, (convs, recurrent) in zip(layers, states, strict=True):
        arrays = [(array, False) for array in convs.values()]
        arrays += [] if recurrent is None else [(recurrent, True)]
        at = {index: place + number for number, index in enumerate(convs)}
        last = None if recurrent is None else place + len(convs)
        known.append(LayerPools(kept.pages, tuple(at.items()), last))
        specs += [
            SlotStateSpec(tuple(array.shape[1:]), np.dtype(array.dtype), is_of_heads=of_heads)
            for array, of_heads in arrays
        ]
        place += len(arrays)
    found = RecurrentLayers(tuple(known), tuple(specs))
    _trace_packed(runtime, shapes, sizes, found)
    return tuple(shapes), found


def _page_shape(layer: Any) -> PagedLayerSpec:
    from model_adapters.caches.layers import AttentionLayer

    if not isinstance(layer, AttentionLayer):
        raise NotPackableError(f"a layer of the cache is a {type(layer).__name__}, which keeps no keys and values")
    if len(layer.POOLS) > 1:
        raise NotPackableError("a layer keeps more than keys and values: an indexer chooses what is attended to")
    if layer.pool is None:
        raise NotPackableError("a layer of the cache stays empty")
    _, num_heads, _, width = layer.pool.shape
    if registry.platform() == "tpu":  # whose kernels and copies want whole lanes
        width += -width % TPU_LANES
    shared_dim = layer.k_dim if layer.keeps_latents else 0  # of latents, which are values and a part of keys
    return PagedLayerSpec(num_heads, width, np.dtype(layer.pool.dtype), layer.window, shared_dim=shared_dim)


def _trace_packed(
    runtime: ModelRuntime,
    shapes: Sequence[PagedLayerSpec],
    sizes: MemoryBudget,
    recurrent: RecurrentLayers | None = None,
) -> tuple[Any, ...]:
    """Traces the two kinds of packed steps; returns what the last one leaves behind the pages.

    Raises:
        NotPackableError: the model's code does not let it.
    """
    from model_adapters.program.packed_forward import forward_packed

    plan = sizes.probe_plan(shapes)
    pages = {group.window: group.num_pages for group in plan.groups}

    def pool(shape: PagedLayerSpec) -> Any:
        made = jax.ShapeDtypeStruct((pages[shape.window], shape.num_heads, plan.page_size, shape.width), shape.dtype)
        scale: Any = jax.ShapeDtypeStruct((shape.num_heads,), np.float32)
        return made if str(shape.dtype) not in LARGEST else ScaledPool(made, scale, scale)  # type: ignore[arg-type]

    states = () if recurrent is None else recurrent.states
    pools = tuple(pool(shape) for shape in shapes)
    pools += tuple(jax.ShapeDtypeStruct((5, *state.shape), state.dtype) for state in states)
    weights = step_weights(runtime)

    def int_spec(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.int32)

    table = int_spec(4, -(-plan.max_len // plan.page_size))
    tables = (table,) * len(plan.groups)
    rope_lens = None if runtime.program.rope is None else int_spec(4)
    slots = None if recurrent is None else int_spec(4)
    ids, cu_q_lens = int_spec(4), int_spec(5)
    found, is_open = (), recurrent is not None and any(kept.is_open for kept in recurrent.layers)
    for is_decode in (False,) if is_open else (True, False):  # one kind shows which states there are
        of_slots = {"slots": slots, "prompt_lens": None if is_decode else slots}
        batch = PackedBatch(ids, ids, cu_q_lens, ids, ids, tables, rope_lens, **of_slots)  # type: ignore[arg-type]
        layout = dataclasses.replace(plan.layout, is_decode=is_decode)
        layout = layout if recurrent is None else dataclasses.replace(layout, layers=recurrent.layers)
        found = _shapes_of(functools.partial(forward_packed, runtime.program, layout=layout), weights, pools, batch)[1]
    return found[len(shapes) :]


def _shapes_of(function: Callable[..., Any], *args: Any) -> Any:
    """Evaluates `jax.eval_shape`; raises NotPackableError for any error of model code."""
    try:
        return jax.eval_shape(function, *args)
    except TorchaxServeError:
        raise
    except Exception as error:
        said = "".join(str(error).strip().splitlines()[:1])
        raise NotPackableError(f"a packed forward cannot be traced: {type(error).__name__}: {said}") from error
