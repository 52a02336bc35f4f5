"""The KV cache of a served model: one layer object per layer of the model, tensors as pytree leaves.

Two objects with two lives:

* `TraceCache` is what unmodified model code sees inside a trace. It is a `transformers.Cache`; its layers hold traced
  arrays, and it dies with the trace.
* `DeviceCache` is the handle that the host keeps between calls. It is a `transformers.Cache` too, so that transformers'
  own generation loop can carry it around, reorder it for beams and crop it after a rejected draft.

An attention layer keeps K and V side by side in one array ``pool[batch, kv_heads, capacity, k_dim + v_dim]``. Sliding
layers keep the full length as well: the window is applied by the attention mask or the kernel.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticCache,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

import pytree_registry
from model_adapters.bridge import StoredLength, jax_view, to_jax_array, to_torch_tensor, torch_view
from model_adapters.errors import UnsupportedModelError

LayerStates = tuple[Any, ...]
LONGEST = 2**30


@dataclasses.dataclass(frozen=True)
class CacheWrite:
    """What one call of ``cache.update`` wrote, attached to the keys it returned.

    The attention function that receives those very keys may attend and write in one pass, from the pool as it was
    before; the write that ``update`` has traced is then dead code. Model code that changes the keys in between loses
    the attachment and gets the dense keys and values it computed with.
    """

    layer: AttentionLayer
    keys: jax.Array  # [batch, kv_heads, num_new, k_dim]
    values: jax.Array  # [batch, kv_heads, num_new, v_dim]
    values_out: torch.Tensor  # what `update` returned beside the keys
    pool_before: jax.Array | None  # [batch, kv_heads, capacity, k_dim + v_dim]; None in a first prefill


class AttentionLayer(CacheLayerMixin):
    """Keys and values of one attention layer, full or sliding.

    An empty layer (``pool is None``) takes a first prefill: it returns the new keys and values as they are, and
    stores them at position 0. Later updates store at ``offset`` and return the whole pool.

    A layer that leans returns the pool shifted, so that the newest token is the last of it: to model code it looks like
    the end of a batch padded on the left, whose lengths are numbers and not traced. For code that counts from the end.
    """

    supports_early_init = False
    POOLS: tuple[str, ...] = ("pool",)
    """Attributes with an array [batch, heads, capacity, width], a row per token."""

    def __init__(self, capacity: int, window: int | None = None) -> None:
        self.capacity = capacity
        self.window = window
        self.k_dim = 0
        self.pool: Any = None
        self.offset: Any = None
        self.lean_len: int | None = None  # new tokens of this forward, if the layer leans in it

    @property
    def is_sliding(self) -> bool:
        """Whether only the last `window` positions are ever attended to."""
        return self.window is not None

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether something has been stored."""
        return self.pool is not None

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override]
        """Dense keys [batch, kv_heads, capacity, k_dim]."""
        return torch_view(jax_view(self.pool)[..., : self.k_dim])

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        """Dense values [batch, kv_heads, capacity, v_dim]."""
        return torch_view(jax_view(self.pool)[..., self.k_dim :])

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is made by the first update."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new keys and values [batch, kv_heads, num_new, dim]; returns those to attend to."""
        keys, values = jax_view(key_states), jax_view(value_states)
        before = None if self.pool is None else jax_view(self.pool)
        new = jnp.concatenate([keys, values], -1)
        if before is None:
            num_new = new.shape[2]
            if num_new > self.capacity:
                raise ValueError(f"expected at most {self.capacity} tokens for this cache, got {num_new}")
            self.k_dim = keys.shape[-1]
            pool = jnp.pad(new, ((0, 0), (0, 0), (0, self.capacity - num_new), (0, 0)))
            keys_out, values_out = torch_view(keys), torch_view(values)
        else:
            pool = jax.lax.dynamic_update_slice(before, new.astype(before.dtype), (0, 0, jax_view(self.offset), 0))
            seen = pool
            if self.lean_len is not None:
                seen = jnp.roll(pool, self.capacity - new.shape[2] - jax_view(self.offset), axis=2)
                self.lean_len = 0  # as a cache that has been updated counts
            keys_out, values_out = torch_view(seen[..., : self.k_dim]), torch_view(seen[..., self.k_dim :])
        self.pool = torch_view(pool)
        keys_out.cache_write = CacheWrite(self, keys, values, values_out, before)
        return keys_out, values_out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that ``update`` returns for `query_length` new tokens."""
        return (query_length if self.pool is None else self.capacity), 0

    def get_seq_length(self) -> Any:
        """Tokens stored so far: 0 for an empty layer, else a traced scalar."""
        if self.pool is None:
            return 0
        return self.offset if self.lean_len is None else self.capacity - self.lean_len

    def get_max_length(self) -> int:
        """Tokens that fit."""
        return self.capacity


class HybridLayer(LinearAttentionLayer, AttentionLayer):  # type: ignore[override]  # as transformers' own
    """A layer with both a linear-attention state and keys and values."""

    is_initialized = AttentionLayer.is_initialized

    def __init__(self, capacity: int, window: int | None, number_of_states: int) -> None:
        AttentionLayer.__init__(self, capacity, window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Prepares the linear-attention state; keys and values need nothing."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


class IndexedLayer(AttentionLayer):
    """An attention layer with the keys of an indexer beside, which chooses the positions that are attended to."""

    POOLS = ("pool", "index_pool")

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.index_pool: Any = None  # [batch, 1, capacity, index_dim]

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Stores an indexer's new keys [batch, num_new, dim]; returns all there are, as `update` does."""
        new = jax_view(indexer_key_states)[:, None]
        if self.index_pool is None:
            pool = jnp.pad(new, ((0, 0), (0, 0), (0, self.capacity - new.shape[2]), (0, 0)))
            self.index_pool = torch_view(pool)
            return indexer_key_states
        if self.lean_len is not None:
            raise UnsupportedModelError("an indexer's keys do not lean")
        before = jax_view(self.index_pool)
        pool = jax.lax.dynamic_update_slice(before, new.astype(before.dtype), (0, 0, jax_view(self.offset), 0))
        self.index_pool = torch_view(pool)
        return torch_view(pool[:, 0])


def empty_layers(config: PreTrainedConfig, capacity: int) -> LayerStates:
    """One empty cache layer per layer of the model, kinds as transformers' own static cache chooses them.

    Raises:
        UnsupportedModelError: a layer kind that has no counterpart here.
    """
    layers: list[Any] = []
    # A static sliding layer knows its window as its own length, unless the whole cache is shorter: ask a long one.
    for theirs in StaticCache(config=config, max_cache_len=LONGEST).layers:
        window = theirs.max_cache_len if isinstance(theirs, StaticSlidingWindowLayer) else None
        if type(theirs) in (StaticLayer, StaticSlidingWindowLayer):
            layers.append(AttentionLayer(capacity, window))
        elif isinstance(theirs, LinearAttentionCacheLayerMixin) and isinstance(theirs, StaticLayer):
            layers.append(HybridLayer(capacity, window, theirs.number_of_states))
        elif type(theirs) is StaticIndexedLayer:
            layers.append(IndexedLayer(capacity))
        elif isinstance(theirs, StaticLayer):
            raise UnsupportedModelError(f"cache layers of kind {type(theirs).__name__} have no static form here")
        else:
            layers.append(theirs)
    return tuple(layers)


class TraceCache(Cache):
    """The cache as model code sees it inside a trace; `offset` is the number of tokens stored, a traced scalar.

    With `lean_len`, the number of new tokens, layers that hold something lean.
    """

    def __init__(self, layers: LayerStates, offset: Any, lean_len: int | None = None) -> None:
        super().__init__(layers=list(layers))
        for layer in self.layers:
            if isinstance(layer, AttentionLayer):
                layer.offset = offset if layer.pool is None or offset is None else StoredLength.of(jax_view(offset))
                layer.lean_len = None if layer.pool is None else lean_len

    def mask_len(self, query_len: int) -> int:
        """Length of the attention mask for `query_len` new tokens; 0 where a recurrent state leaves nothing to mask."""
        attention = next((layer for layer in self.layers if isinstance(layer, AttentionLayer)), None)
        if attention is not None:
            return attention.get_mask_sizes(query_len)[0]
        return 0 if self.has_previous_state() else query_len

    def states(self) -> LayerStates:
        """The layers, to be returned from the trace; the offset stays with the host."""
        for layer in self.layers:
            if isinstance(layer, AttentionLayer):
                layer.offset = layer.lean_len = None
        return tuple(self.layers)

    @property
    def is_compileable(self) -> bool:
        """False: transformers would build 4D masks on the host for a cache that says yes."""
        return False


class DeviceCache(Cache):
    """Handle of a cache that lies on the device: a drop-in where transformers' generation loop expects its own.

    Attributes:
        states: one pytree per layer, arrays on the device.
        length: tokens stored, the same for every row of the batch (rows are padded on the left).
        capacity: tokens that fit.
    """

    def __init__(self, config: PreTrainedConfig, capacity: int) -> None:
        super().__init__(layers=[])
        self.config = config
        self.capacity = capacity
        self.length = 0
        self.states: LayerStates = empty_layers(config, capacity)

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"DeviceCache(length={self.length}, capacity={self.capacity}, layers={len(self.states)})"

    @property
    def is_compileable(self) -> bool:
        """False: compilation is this project's own business."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Whether a rollback leaves no trace: only attention layers can forget."""
        return all(type(layer) in (AttentionLayer, IndexedLayer) for layer in self.states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens stored."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: the handle grows as needed."""
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a recurrent state is there to continue from."""
        return self.length > 0

    def reserve(self, capacity: int) -> None:
        """Makes room for `capacity` tokens; what is stored stays."""
        if capacity <= self.capacity:
            return
        for layer in self.states:
            if isinstance(layer, AttentionLayer):
                for name in layer.POOLS:
                    if (pool := getattr(layer, name)) is not None:
                        setattr(layer, name, jnp.pad(pool, ((0, 0), (0, 0), (0, capacity - self.capacity), (0, 0))))
                layer.capacity = capacity
        self.capacity = capacity

    def _map(self, function: Any) -> None:
        self.states = jax.tree.map(function, self.states)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Rows become those at `beam_idx` int[batch]."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows at `indices` int[new_batch]."""
        rows = to_jax_array(indices)
        self._map(lambda array: jnp.take(array, rows, axis=0))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times."""
        self._map(lambda array: jnp.repeat(array, repeats, axis=0))

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``abs(tokens_to_remove)`` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"expected a number of tokens to remove that is 0 or negative, got {tokens_to_remove}")
        if tokens_to_remove and not self.is_croppable:
            raise UnsupportedModelError("a cache with recurrent states cannot be rolled back")
        self.length = max(0, self.length + tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Nothing to do: attention layers keep every token."""

    def reset(self) -> None:
        """Forgets everything."""
        self.length = 0
        self.states = empty_layers(self.config, self.capacity)

    @classmethod
    def from_dynamic(cls, cache: DynamicCache, config: PreTrainedConfig) -> DeviceCache:
        """A device copy of transformers' own dynamic cache."""
        length = 0 if not cache.layers else cache.get_seq_length()
        ours = cls(config, max(length, 1))
        ours.length = length
        if length:
            for state, layer in zip(ours.states, cache.layers, strict=True):
                _take(state, layer, length)
        return ours

    def to_dynamic(self) -> DynamicCache:
        """A copy as transformers' own dynamic cache, tensors on the CPU, cut to the tokens stored."""
        cache = DynamicCache(config=self.config)
        for layer, state in zip(cache.layers, self.states, strict=True):
            _fill(layer, state, self.length)
        return cache


def _take(state: Any, layer: Any, length: int) -> None:
    """Copies one of transformers' own layers into the device layer `state`."""
    if isinstance(state, AttentionLayer):
        pool = torch.cat([layer.keys, layer.values], -1)
        missing = length - pool.shape[2]  # forgotten by a sliding layer, so masked in every step to come
        state.pool = jnp.pad(to_jax_array(pool), ((0, 0), (0, 0), (missing, state.capacity - length), (0, 0)))
        state.k_dim = layer.keys.shape[-1]
    if isinstance(state, IndexedLayer) and layer.is_indexer_initialized:
        missing = state.capacity - length
        state.index_pool = jnp.pad(to_jax_array(layer.indexer_keys)[:, None], ((0, 0), (0, 0), (0, missing), (0, 0)))
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
    if isinstance(state, IndexedLayer) and state.index_pool is not None:
        keys = to_torch_tensor(state.index_pool[:, 0, :length])
        layer.lazy_initialization_indexer(keys)
        layer.indexer_keys = keys
    if isinstance(state, LinearAttentionCacheLayerMixin):
        for name in ("conv_states", "recurrent_states"):
            ours = getattr(state, name)
            getattr(layer, name).update({i: None if x is None else to_torch_tensor(x) for i, x in ours.items()})
        _copy_flags(state, layer)
        layer.device = torch.device("cpu")


pytree_registry.register(AttentionLayer)
pytree_registry.register(HybridLayer)
pytree_registry.register(IndexedLayer)
