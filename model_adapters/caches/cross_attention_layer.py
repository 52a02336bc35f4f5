"""The cache of an encoder-decoder model.

It consists of the decoder's own layers, and of keys and values of the encoder output. Keys and values of the encoder
output are computed in the first forward; later steps only read them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache

import pytree_registry
from model_adapters.bridge.views import jax_view, to_torch_tensor, torch_view
from model_adapters.ops.row_pages import read_row


@dataclasses.dataclass(frozen=True)
class StoredSource:
    """Where keys and values of one sequence's encoder output are among those of all.

    It is attached to the dense ones. An attention function that receives both unchanged may read them where they are
    stored; the dense ones are then dead code.

    Attributes:
        keys: ``[slots, heads, room, dim]``.
        values: ``[slots, heads, room, v_dim]``.
        slot: int32[], the sequence's.
        length: int32[], length of the encoder output without padding.
        is_fixed_len: Whether outputs have no padding, whatever their mask says.
    """

    keys: jax.Array
    values: jax.Array
    slot: jax.Array
    length: jax.Array
    is_fixed_len: bool


class CrossLayer(CacheLayerMixin):
    """Keys and values [batch, heads, encoder_len, dim] of the encoder output in one layer.

    The layer is empty at first. With `slot` set, keys and values are those of all sequences, ``[slots, heads, room,
    dim]``, and the layer is one sequence's until `read` is called.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.slot: Any = None  # int32[]
        self.length: Any = None  # int32[], of the encoder output without padding; with `slot` only
        self.padded_len = 0  # of what model code sees
        self.is_fixed_len = False  # whether all outputs have `padded_len` positions

    def use_slot(self, slot: jax.Array, length: Any, padded_len: int, *, is_fixed_len: bool) -> None:
        """Makes keys and values those of all sequences, of which `slot` int32[] is this one's."""
        self.slot, self.length = slot, jnp.asarray(length, jnp.int32)
        self.padded_len, self.is_fixed_len = padded_len, is_fixed_len

    def read(self) -> None:
        """Makes keys and values this sequence's, ``[1, heads, padded_len, dim]``."""
        if self.slot is None:
            return
        slot, length = jax_view(self.slot), jax_view(self.length)
        stored = StoredSource(jax_view(self.keys), jax_view(self.values), slot, length, self.is_fixed_len)

        def dense(pool: jax.Array) -> torch.Tensor:
            seen = torch_view(read_row(pool, slot[None], length, capacity=self.padded_len)[None])
            seen.stored_source = stored
            return seen

        self.keys, self.values = dense(stored.keys), dense(stored.values)
        self.slot, self.length, self.padded_len, self.is_fixed_len = None, None, 0, False

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether the encoder output has been stored."""
        return self.keys is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: there is one update."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores keys and values [batch, heads, encoder_len, dim] and returns them."""
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns length and offset of the keys."""
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        """Returns the length of the encoder output; 0 before it is stored."""
        return 0 if self.keys is None else self.keys.shape[2]

    def get_max_length(self) -> int:
        """Returns the length of the encoder output."""
        return self.get_seq_length()

    def cut(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of the first `length` keys and values, on the host."""
        keys, values = (to_torch_tensor(jax_view(x)[:, :, :length]) for x in (self.keys, self.values))
        return keys, values


pytree_registry.register(CrossLayer)


class TraceEncoderDecoderCache(EncoderDecoderCache):
    """Both caches as model code sees them in a trace.

    `own` is a `TraceCache` of the decoder's layers.
    """

    def __init__(self, own: Any, cross: tuple[CrossLayer, ...]) -> None:
        for layer in cross:
            layer.read()
        super().__init__(own, Cache(layers=list(cross)))

    def mask_len(self, query_len: int) -> int:
        """Returns the length of the decoder's attention mask for `query_len` new tokens."""
        return self.self_attention_cache.mask_len(query_len)  # type: ignore[attr-defined]

    def states(self) -> tuple[Any, ...]:
        """Returns all layers as results of the trace, the decoder's own first.

        The layers over the encoder output follow.
        """
        return (*self.self_attention_cache.states(), *self.cross_attention_cache.layers)  # type: ignore[attr-defined]


def fill(cache: DynamicCache, states: tuple[Any, ...], length: int) -> None:
    """Copies the layers over the encoder output into transformers' own layers.

    They are cut to `length`, without padding.
    """
    layers: list[Any] = cache.layers
    for layer, state in zip(layers, states, strict=True):
        if state.keys is not None:
            keys, values = state.cut(length)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
