"""Inkling 2 counts distances by its cache; each token has sinks and convolutions of its own.

In a packed step the op of attention makes the biases, of weights and profiles, and takes the sinks; a convolution
multiplies windows of the tokens' inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.caches.paged_cache import PagedTraceCache
from model_adapters.caches.state_layer import windows_of
from model_adapters.quirks.quirk import Quirk


def _attention(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the original; in a packed step without distances, which the cache does not know."""
    if isinstance(kwargs.get("cache"), PagedTraceCache):
        kwargs["relative_distance"] = None
    return type(self).forward(self, *args, **kwargs)


def _biases(
    self: Any, hidden_states: torch.Tensor, relative_distance: torch.Tensor | None, position_ids: torch.Tensor
) -> Any:
    """Computes the original; without distances, weights [1, T, heads, R] and profiles [R, E]."""
    if relative_distance is not None:
        return type(self).forward(self, hidden_states, relative_distance, position_ids)
    weights = self.linear(hidden_states).unflatten(-1, (self.num_heads, -1))
    return self.norm(weights, position_ids), self.proj


def _convolution(
    self: Any,
    hidden_states: torch.Tensor,
    dynamic_input: torch.Tensor,
    cache: Any = None,
    conv_mask: torch.Tensor | None = None,
    cache_offset: int = 0,
    **kwargs: Any,
) -> torch.Tensor:
    """Computes ``[1, T, D]`` of a packed step; outside of one, it is the original."""
    if not isinstance(cache, PagedTraceCache):
        given = {"cache": cache, "conv_mask": conv_mask, "cache_offset": cache_offset}
        original: torch.Tensor = type(self).forward(self, hidden_states, dynamic_input, **given, **kwargs)
        return original
    width, inputs = self.conv_kernel_size, hidden_states.float()
    layer_idx = self.layer_idx + cache_offset
    windows = windows_of(cache.update_conv_state(inputs.transpose(1, 2), layer_idx, state_idx=self.conv_idx), width)
    if windows is None or conv_mask is not None:
        raise NotPackableError("a layer's convolution does not get what its cache returned")
    # The newest input is the last of a window, and the first of the weights.
    windows = windows.unflatten(-1, (self.num_heads, -1))  # [1, T, width, heads, dim]
    own = self.weight_proj(dynamic_input).float().unflatten(-1, (self.num_heads, width)).mT.flip(2)
    static = self.static_weight.float().flip(0).unflatten(-1, (self.num_heads, -1))
    mixed = (windows * (static + own[..., None])).sum(2).flatten(2)
    return ((mixed + inputs) / math.sqrt(2 * width + 1)).to(hidden_states.dtype)


_METHODS: dict[str, Callable[..., Any]] = {
    "SlidingAttention": _attention,
    "FullAttention": _attention,
    "RelativePositionBias": _biases,
    "DynamicShortConvolution": _convolution,
}
QUIRK = Quirk(
    packed_interface=True,
    methods={
        f"{model}{name}.forward": function
        for model in ("Inkling2", "Inkling2Loop")
        for name, function in _METHODS.items()
    },
)
