"""The cache of an encoder-decoder model.

It consists of the decoder's own layers, and of keys and values of the encoder output. Keys and values of the encoder
output are computed in the first forward; later steps only read them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache

import pytree_registry
from model_adapters.bridge.views import jax_view, to_torch_tensor


class CrossLayer(CacheLayerMixin):
    """Keys and values [batch, heads, encoder_len, dim] of the encoder output in one layer.

    The layer is empty at first.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:
        self.keys: Any = None
        self.values: Any = None

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
