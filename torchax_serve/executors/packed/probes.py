"""Probes whether a model runs packed, by tracing it on abstract shapes.

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
from model_adapters.errors import TorchaxServeError
from model_adapters.ops import registry
from model_adapters.ops.compressed_weight import Weights
from model_adapters.ops.kv_pool import LARGEST
from torchax_serve.executors.slot_adapters import step_weights
from torchax_serve.kv_cache.cache_layout import SlotStateSpec
from torchax_serve.kv_cache.hybrid_cache import RecurrentLayers
from torchax_serve.kv_cache.memory import MemoryBudget
from torchax_serve.kv_cache.pools import PagedLayerSpec

if TYPE_CHECKING:
    from torchax_serve.runtime.model_runtime import ModelRuntime

TPU_LANES = 128

RECURRENT = "a layer keeps a recurrent state"
"""Why a model is not packed on pages alone."""


def shapes_or_reason(runtime: ModelRuntime, sizes: MemoryBudget) -> tuple[PagedLayerSpec, ...] | str:
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
    trace_packed(runtime, shapes, sizes)
    return shapes


def page_shapes(runtime: ModelRuntime) -> tuple[PagedLayerSpec, ...]:
    """Returns the paged cache of each layer, behind those that of each indexer.

    They are found by tracing a prompt.

    Raises:
        NotPackableError: a layer stores something other than keys and values.
    """
    if runtime.program.names.has_encoder:
        raise NotPackableError("there is an encoder beside the decoder")
    if not runtime.cache_support.is_supported:
        raise NotPackableError("the model has no cache that could be paged")
    if runtime.cache_support.is_recurrent and not runtime.cache_support.is_compressed:
        raise NotPackableError(RECURRENT)
    layers = _layers_with_own_keys(_layers_of_prompt(runtime))
    shapes = tuple(_page_shape(layer) for layer in layers)
    return (*shapes, *(part for number, layer in enumerate(layers) for part in _parts(layer, number, layers)))


def _layers_with_own_keys(layers: Sequence[Any]) -> list[Any]:
    """Returns the layers in front of those that attend to keys of earlier ones (Gemma 3n)."""
    from transformers import cache_utils

    without_keys = getattr(cache_utils, "DummyLayer", ())  # before 5.23 such layers are no part of a cache
    number = len(layers)
    while number and isinstance(layers[number - 1], without_keys):
        number -= 1
    return list(layers[:number])


def _layers_of_prompt(runtime: ModelRuntime) -> list[Any]:
    """Returns the layers of the cache after a prompt, with arrays as shapes."""
    from model_adapters.program.call_spec import CallSpec

    cache = runtime.cache_support.new(16)
    inputs = {"input_ids": jax.ShapeDtypeStruct((1, 16), np.int32)}

    def prompt(weights: Weights, inputs: dict[str, jax.Array]) -> object:
        return runtime.program.forward(weights, cache.states, None, inputs, CallSpec())[1]

    return list(_shapes_of(prompt, runtime.weights, inputs))


def recurrent_or_reason(runtime: ModelRuntime, sizes: MemoryBudget) -> Any:
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
    parts: list[PagedLayerSpec] = []
    found_layers = _layers_of_prompt(runtime)
    for layer in found_layers:
        if isinstance(layer, AttentionLayer) and layer.pool is not None:
            parts += _parts(layer, len(shapes), found_layers)
            has_states = hasattr(layer, "conv_states")
            layers.append(LayerPools(pages=len(shapes), is_open=has_states))
            shapes.append(_page_shape(layer))
        else:
            layers.append(LayerPools(is_open=True))
    shapes += parts
    states = trace_packed(runtime, shapes, sizes, RecurrentLayers(tuple(layers), ()))
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
    trace_packed(runtime, shapes, sizes, found)
    return tuple(shapes), found


def _page_shape(layer: Any) -> PagedLayerSpec:
    from model_adapters.caches.compressed_layer import CompressedLayer
    from model_adapters.caches.layers import AttentionLayer

    if not isinstance(layer, AttentionLayer):
        raise NotPackableError(f"a layer of the cache is a {type(layer).__name__}, which keeps no keys and values")
    if layer.pool is None:
        raise NotPackableError("a layer of the cache stays empty")
    _, num_heads, _, width = layer.pool.shape
    shared_dim = layer.k_dim if layer.keeps_latents else 0  # of latents, which are values and a part of keys
    if isinstance(layer, CompressedLayer):  # whose keys are values
        width = shared_dim = layer.k_dim
    dtype = np.dtype(layer.pool.dtype)
    return PagedLayerSpec(num_heads, _padded(width), dtype, layer.window, shared_dim=shared_dim)


def _parts(layer: Any, number: int, layers: Sequence[Any]) -> list[PagedLayerSpec]:
    """Returns what the layer at place `number` keeps besides keys and values."""
    from model_adapters.caches.compressed_layer import CompressedLayer

    if isinstance(layer, CompressedLayer):
        return _parts_of_compressed(layer, number)
    keys = getattr(layer, "index_pool", None)
    if keys is None:
        return []
    # Where positions are kept, in one of the layers, keys are not rotated. Beside each stands its rotation then, which
    # has at most as many numbers.
    is_rotated = all(getattr(each, "position_pool", None) is None for each in layers)
    width = keys.shape[3] * (1 if is_rotated else 2)
    return [PagedLayerSpec(1, _padded(width), np.dtype(keys.dtype), layer.window, indexed_layer=number)]


def _parts_of_compressed(layer: Any, number: int) -> list[PagedLayerSpec]:
    """Returns entries of blocks, and the tokens that the next ones are made of."""
    found = []
    for name, (kv, gate) in layer.buffers.items():
        entries, width = getattr(layer, f"{name}_pool"), kv.shape[2] + gate.shape[2]
        of_tokens = _padded(width), np.dtype(kv.dtype), layer.rate * (2 if layer.overlaps else 1)
        of_entries = _padded(entries.shape[3]), np.dtype(entries.dtype), None
        found.append(PagedLayerSpec(1, *of_tokens, indexed_layer=number, part=f"{name} tokens"))
        shared_dim = (
            entries.shape[3] if name == "compressor" else 0
        )  # entries are keys and values, or an indexer's keys
        options = {"shared_dim": shared_dim, "row_len": layer.rate, "part": f"{name} entries"}
        part = PagedLayerSpec(1, *of_entries, indexed_layer=number, **options)
        found.append(part)
    return found


def _padded(width: int) -> int:
    """Returns the width of a row of pages; kernels and copies of TPUs want whole lanes."""
    return width + -width % TPU_LANES if registry.platform() == "tpu" else width


def trace_packed(
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
        made = jax.ShapeDtypeStruct(shape.pool_shape(pages[shape.window], plan.page_size), shape.dtype)
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
