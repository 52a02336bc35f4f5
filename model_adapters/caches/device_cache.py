"""The KV cache of a served model, with one layer object per layer of the model.

The tensors of the layers are pytree leaves.

Two classes with different lifetimes:

* `TraceCache` is what unmodified model code sees inside a trace. It is a `transformers.Cache` whose layers hold traced
  arrays, and it ends with the trace.
* `DeviceCache` is the host's handle between calls. It is a `transformers.Cache` too, so that transformers' generation
  loop can pass it on, reorder it for beams and crop it after a rejected draft.
"""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    StaticCache,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from model_adapters.bridge.traced_length import TracedLength
from model_adapters.bridge.views import jax_view, to_jax_array, to_torch_tensor
from model_adapters.caches.compressed_layer import LAYER_TYPES as COMPRESSED
from model_adapters.caches.compressed_layer import CompressedLayer
from model_adapters.caches.cross_attention_layer import CrossLayer, TraceEncoderDecoderCache, fill
from model_adapters.caches.layers import AttentionLayer, HybridLayer, IndexedLayer
from model_adapters.errors import UnsupportedArgumentError, UnsupportedModelError

LayerStates = tuple[Any, ...]
LONGEST = 2**30  # tokens; longer than any window


def empty_layers(config: PreTrainedConfig, capacity: int) -> LayerStates:
    """Returns one empty cache layer per layer of the model and per repeated pass.

    For repeated passes see `passed_again`. The types correspond to those of transformers' own static cache.

    Raises:
        UnsupportedModelError: a layer type that has no counterpart here.
    """
    if COMPRESSED & set(getattr(config, "layer_types", None) or ()):
        return tuple(_compressed(theirs, capacity) for theirs in DynamicCache(config=config).layers)
    layers: list[Any] = []
    # A static sliding layer knows its window as its own length, unless the cache is shorter: make a long one.
    for theirs in StaticCache(config=config, max_cache_len=LONGEST).layers:
        window = theirs.max_cache_len if isinstance(theirs, StaticSlidingWindowLayer) else None
        if type(theirs) in (StaticLayer, StaticSlidingWindowLayer):
            layers.append(AttentionLayer(capacity, window))
        elif isinstance(theirs, LinearAttentionCacheLayerMixin) and isinstance(theirs, StaticLayer):
            layers.append(HybridLayer(capacity, window, theirs.number_of_states))
        elif type(theirs) is StaticIndexedLayer:
            layers.append(IndexedLayer(capacity))
        elif isinstance(theirs, StaticLayer):
            raise UnsupportedModelError(f"cache layers of type {type(theirs).__name__} have no static form here")
        else:
            layers.append(theirs)
    return tuple(layers + [copy.deepcopy(layers[index]) for index in passed_again(config)])


def passed_again(config: PreTrainedConfig) -> list[int]:
    """Returns the index of a layer for each repeated pass through it.

    The keys of the repeated passes follow those of all layers. Forwards append such layers to a cache that has none
    (transformers 5.24: `DoryModel.forward`, `Inkling2LoopTextModel.forward`).
    """
    if (num_passes := getattr(config, "loop_num_passes", None)) is not None:
        return list(range(config.loop_layer_index_start, config.loop_layer_index_end)) * (num_passes - 1)
    if getattr(config, "recurrent_kv_cache_mode", None) != "per_loop":
        return []
    first = config.n_input_layers
    return list(range(first, first + config.n_recurrent_layers)) * (config.n_recurrent_loops - 1)


def _compressed(theirs: Any, capacity: int) -> AttentionLayer:
    """Returns the counterpart of a layer of a model that attends to compressed keys.

    Such a model has no static cache.
    """
    if not hasattr(theirs, "store_compression_weights"):
        return AttentionLayer(capacity, getattr(theirs, "sliding_window", None))
    overlaps = hasattr(theirs, "overlap_kv")
    return CompressedLayer(capacity, theirs.sliding_window, theirs.compress_rate, overlaps=overlaps)


class TraceCache(Cache):
    """The cache as model code sees it inside a trace.

    Args:
        layers: The layers, with traced arrays.
        offset: int32[], number of tokens stored; None for an empty cache.
        right_align_len: Number of new tokens, to right-align layers that are not empty; None: do not.
    """

    def __init__(self, layers: LayerStates, offset: Any, right_align_len: int | None = None) -> None:
        super().__init__(layers=list(layers))
        self.num_layers = len(layers)
        lengths: dict[int, TracedLength] = {}  # one object for all layers, whose lengths are then known to be equal
        for layer in self.layers:
            if isinstance(layer, AttentionLayer):
                layer.offset = offset
                if layer.pool is not None and offset is not None:
                    if layer.capacity not in lengths:
                        lengths[layer.capacity] = TracedLength.of(jax_view(offset), layer.capacity)
                    layer.offset = lengths[layer.capacity]
                layer.right_align_len = None if layer.pool is None else right_align_len
                layer.counted_new_tokens = False

    def mask_len(self, query_len: int) -> int:
        """Returns the length of the attention mask for `query_len` new tokens.

        It is 0 if a recurrent state needs no mask.
        """
        attention = next((layer for layer in self.layers if isinstance(layer, AttentionLayer)), None)
        if attention is not None:
            return attention.get_mask_sizes(query_len)[0]
        return 0 if self.has_previous_state() else query_len

    def states(self) -> LayerStates:
        """Returns the layers, as results of the trace; the host tracks the offset."""
        for layer in self.layers:
            if isinstance(layer, AttentionLayer):
                layer.clear_trace_state()
        return tuple(self.layers)

    @property
    def is_compileable(self) -> bool:
        """False: otherwise transformers builds 4D masks on the host."""
        return False


def trace_cache(states: LayerStates, offset: Any, right_align_len: int | None) -> TraceCache | TraceEncoderDecoderCache:
    """Returns the cache for model code in a trace, of `states` in the torch view."""
    cross = tuple(layer for layer in states if isinstance(layer, CrossLayer))
    own = TraceCache(states[: len(states) - len(cross)], offset, right_align_len)
    return TraceEncoderDecoderCache(own, cross) if cross else own


def check_layers_keep_all(cache: Cache, argument: str | None, module: torch.nn.Module) -> None:
    """Raises UnsupportedModelError if code of `module` stores state beyond the given layers.

    `argument` is the name of the cache among the forward's arguments.
    """
    left = [name for name, value in vars(cache).items() if isinstance(value, torch.Tensor)]
    if left:  # the next step gets only the layers
        raise UnsupportedModelError(
            f"expected a model that keeps its state in the layers of its cache, got {type(module).__name__}, which "
            f"keeps it outside of them ({', '.join(f'{argument}.{name}' for name in left)})"
        )
    own = getattr(cache, "self_attention_cache", cache)
    if isinstance(own, TraceCache) and len(own.layers) != own.num_layers:
        raise UnsupportedModelError(
            f"expected a model that keeps its state in the {own.num_layers} layers of its cache, got "
            f"{type(module).__name__}, which makes {len(own.layers)} of them"
        )


def shortest_window(states: LayerStates | None) -> int:
    """Returns the shortest window in tokens among non-empty layers.

    `LONGEST` if none is sliding.
    """
    layers = [x for x in states or () if isinstance(x, AttentionLayer) and x.pool is not None]
    return min((x.window for x in layers if x.window is not None), default=LONGEST)


class DeviceCache(Cache):
    """Handle of a cache on the device, which transformers' generation loop accepts as its own.

    Args:
        config: Configuration of the decoder.
        capacity: Number of tokens that fit at first.
        with_encoder: Whether the layers also attend to an encoder output.

    Attributes:
        states: One pytree per layer, arrays on the device; layers over the encoder output follow the others.
        encoder_len: Length of the encoder output without padding.
        length: Number of tokens stored, the same for every row of the batch (rows are padded on the left).
        capacity: Number of tokens that fit.
    """

    def __init__(self, config: PreTrainedConfig, capacity: int, *, with_encoder: bool = False) -> None:
        super().__init__(layers=[])
        self.config = config
        self.capacity = capacity
        self.with_encoder = with_encoder
        self.length = 0
        self.encoder_len = 0
        self.states: LayerStates = self._empty()

    def _empty(self) -> LayerStates:
        own = empty_layers(self.config, self.capacity)
        return (*own, *(CrossLayer() for _ in own)) if self.with_encoder else own

    def __len__(self) -> int:
        return len(self.states) // (2 if self.with_encoder else 1)

    def __repr__(self) -> str:
        return f"DeviceCache(length={self.length}, capacity={self.capacity}, layers={len(self.states)})"

    @property
    def is_compileable(self) -> bool:
        """False: transformers must not compile the forward itself."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be removed: only attention layers can remove them."""
        return all(type(layer) in (AttentionLayer, IndexedLayer, CrossLayer) for layer in self.states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of tokens stored."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Returns -1: the cache grows as needed."""
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Tells whether there is a recurrent state to continue from."""
        return self.length > 0

    def reserve(self, capacity: int) -> None:
        """Grows the cache to `capacity` tokens; stored tokens stay."""
        if capacity <= self.capacity:
            return
        self._check_is_here()
        for layer in self.states:
            if isinstance(layer, AttentionLayer):
                for name in layer.POOLS:
                    if (pool := getattr(layer, name)) is not None:
                        setattr(layer, name, jnp.pad(pool, ((0, 0), (0, 0), (0, capacity - self.capacity), (0, 0))))
                layer.capacity = capacity
        self.capacity = capacity

    def _map(self, function: Any) -> None:
        self._check_is_here()
        self.states = jax.tree.map(function, self.states)

    def _check_is_here(self) -> None:
        """Raises UnsupportedArgumentError if devices of other hosts hold a part of the cache.

        Other hosts run only what the model runs.
        """
        if not all(array.is_fully_addressable for array in jax.tree.leaves(self.states)):
            raise UnsupportedArgumentError(
                "expected a cache on this host, got one on several, which beams, assistants and callers of the cache "
                "cannot cut, reorder or read; use greedy search or sampling, or serve the model on one host"
            )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replaces the rows by those at `beam_idx` int[batch]."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Selects the rows at `indices` int[new_batch]."""
        rows = indices.numpy()  # on no device, as the array may be on several
        self._map(lambda array: jnp.take(array, rows, axis=0))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times."""
        self._map(lambda array: jnp.repeat(array, repeats, axis=0))

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``abs(tokens_to_remove)`` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"expected a number of tokens to remove that is 0 or negative, got {tokens_to_remove}")
        if tokens_to_remove and not self.is_croppable:
            raise UnsupportedModelError("a cache with recurrent states cannot be rolled back")
        self.length = max(0, self.length + tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Does nothing: attention layers store every token."""

    def reset(self) -> None:
        """Removes all tokens."""
        self.length = self.encoder_len = 0
        self.states = self._empty()

    @classmethod
    def from_dynamic(cls, cache: DynamicCache | EncoderDecoderCache, config: PreTrainedConfig) -> DeviceCache:
        """Copies transformers' own dynamic cache to the device."""
        pair = isinstance(cache, EncoderDecoderCache)
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        cross: list[Any] = cache.cross_attention_cache.layers if isinstance(cache, EncoderDecoderCache) else []
        length = 0 if not own.layers else own.get_seq_length()
        ours = cls(config, max(length, 1), with_encoder=pair)
        ours.length = length
        if length:
            for state, layer in zip(ours.states, [*own.layers, *cross], strict=True):
                _take(state, layer, length)
        ours.encoder_len = max((layer.get_seq_length() for layer in cross), default=0)
        return ours

    def to_dynamic(self) -> DynamicCache | EncoderDecoderCache:
        """Returns a copy as transformers' own dynamic cache, without unused capacity.

        The tensors are on the CPU.
        """
        self._check_is_here()
        cache = DynamicCache(config=self.config)
        cache.layers += [copy.deepcopy(cache.layers[index]) for index in passed_again(self.config)]
        for layer, state in zip(cache.layers, self.states[: len(self)], strict=True):
            _fill(layer, state, self.length)
        if not self.with_encoder:
            return cache
        cross = DynamicCache(config=self.config)
        fill(cross, self.states[len(self) :], self.encoder_len)
        return EncoderDecoderCache(cache, cross)


def _take(state: Any, layer: Any, length: int) -> None:
    """Copies one of transformers' own layers into the device layer `state`."""
    if isinstance(state, CrossLayer) and layer.is_initialized:
        state.keys, state.values = to_jax_array(layer.keys), to_jax_array(layer.values)
    if isinstance(state, AttentionLayer):
        pool = torch.cat([layer.keys, layer.values], -1)
        missing = length - pool.shape[2]  # dropped by a sliding layer, hence masked in every later step
        state.pool = jnp.pad(to_jax_array(pool), ((0, 0), (0, 0), (missing, state.capacity - length), (0, 0)))
        state.k_dim = layer.keys.shape[-1]
    if isinstance(state, CompressedLayer):
        state.take(layer)
    if isinstance(state, IndexedLayer) and layer.is_indexer_initialized:
        tail = ((0, 0), (0, 0), (0, state.capacity - length), (0, 0))
        state.index_pool = jnp.pad(to_jax_array(layer.indexer_keys)[:, None], tail)
        if getattr(layer, "indexer_position_ids", None) is not None:
            positions = jnp.moveaxis(to_jax_array(layer.indexer_position_ids), 0, 2)[:, None]
            state.position_pool = jnp.pad(positions, tail)
    if isinstance(state, LinearAttentionCacheLayerMixin):
        for name in ("conv_states", "recurrent_states"):
            theirs = getattr(layer, name)
            getattr(state, name).update({i: None if x is None else to_jax_array(x) for i, x in theirs.items()})
        _copy_flags(layer, state)


def _copy_flags(source: Any, target: Any) -> None:
    for name in (
        "is_conv_states_initialized",
        "is_recurrent_states_initialized",
        "has_previous_state",
        "conv_kernel_size",
    ):
        getattr(target, name).update(getattr(source, name))
    target.dtype, target.device = source.dtype, source.device


def _fill(layer: Any, state: Any, length: int) -> None:
    """Copies one device layer into transformers' own layer object."""
    if isinstance(state, AttentionLayer) and state.pool is not None:
        pool = to_torch_tensor(state.pool[:, :, :length])
        keys, values = pool[..., : state.k_dim].contiguous(), pool[..., state.k_dim :].contiguous()
        layer.lazy_initialization(keys, values)
        start = 0 if state.window is None else max(0, length - state.window + 1)
        layer.keys, layer.values = keys[:, :, start:], values[:, :, start:]
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length
    if isinstance(state, CompressedLayer):
        state.fill(layer, length)
    if isinstance(state, IndexedLayer) and state.index_pool is not None:
        keys = to_torch_tensor(state.index_pool[:, 0, :length])
        layer.lazy_initialization_indexer(keys)
        layer.indexer_keys = keys
        if state.position_pool is not None:
            layer.indexer_position_ids = to_torch_tensor(state.position_pool[:, 0, :length]).movedim(2, 0).long()
    if isinstance(state, LinearAttentionCacheLayerMixin):
        for name in ("conv_states", "recurrent_states"):
            ours = getattr(state, name)
            getattr(layer, name).update({i: None if x is None else to_torch_tensor(x) for i, x in ours.items()})
        _copy_flags(state, layer)
        layer.device = torch.device("cpu")
