"""Zaya's projection has states of two kinds: last inputs, and a part of the last value.

In a packed step each is the state of a depthwise convolution: the model's own, and those that delay by a token.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.bridge.views import jax_view
from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.caches.paged_cache import PagedTraceCache
from model_adapters.caches.state_layer import convolved
from model_adapters.quirks.quirk import Quirk


def _projection(
    self: Any, hidden_states: torch.Tensor, cache: Any, *args: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes query, key and value of a packed step; outside of one, it is the original.

    Each is ``[1, T, heads, dim]``.
    """
    if not isinstance(cache, PagedTraceCache):
        result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = type(self).forward(self, hidden_states, cache, *args)
        return result
    queries, keys = self.q_proj(hidden_states), self.k_proj(hidden_states)
    states = _Delays(cache, self.layer_idx)
    mixed = _convolutions(self, states, torch.cat([queries, keys], dim=-1))
    queries, keys = (each.unflatten(-1, (-1, self.head_dim)) for each in (queries, keys))
    of_queries = (queries + keys.repeat_interleave(self.num_key_value_groups, dim=2)) * 0.5
    of_keys = of_queries.unflatten(2, (-1, self.num_key_value_groups)).mean(dim=3)
    num_queries = of_queries.shape[2]
    query, key = mixed[:, :, :num_queries] + of_queries, mixed[:, :, num_queries:] + of_keys

    delayed, bias = self.v_proj_delayed(hidden_states), self.v_proj_delayed.bias
    # In front of the first token is the projection of zeros, its bias.
    delayed = states.delayed(delayed) if bias is None else states.delayed(delayed - bias) + bias
    value = torch.cat([self.v_proj_current(hidden_states), delayed], dim=-1)
    return query, key, value.unflatten(-1, (-1, self.head_dim))


def _convolutions(self: Any, states: _Delays, inputs: torch.Tensor) -> torch.Tensor:
    """Returns both convolutions, one behind the other, of inputs [1, T, D]: [1, T, heads, dim].

    Inputs in front of the first token are zeros, so that the depthwise one leaves its bias there.
    """
    depthwise, grouped = self.conv_qk_depthwise, self.conv_qk_grouped
    made = states.convolved(inputs, jax_view(depthwise.weight.squeeze(1)))
    out: Any = 0 if grouped.bias is None else grouped.bias.view(grouped.groups, -1)
    for back in range(self.grouped_kernel_size):
        made = states.delayed(made) if back else made
        tap = grouped.weight[..., self.grouped_kernel_size - 1 - back].unflatten(0, (grouped.groups, -1))
        seen = made if depthwise.bias is None else made + depthwise.bias
        by_group = seen.unflatten(-1, (grouped.groups, -1)).transpose(1, 2)  # [1, G, T, dim]
        out = out + (by_group @ tap.mT).transpose(1, 2)
    result: torch.Tensor = out
    return result


class _Delays:
    """Convolutions of a packed layer, numbered in the order of their calls."""

    def __init__(self, cache: PagedTraceCache, layer_idx: int) -> None:
        self._cache, self._layer_idx, self._num = cache, layer_idx, 0

    def convolved(self, inputs: torch.Tensor, weight: jax.Array) -> torch.Tensor:
        """Returns the depthwise convolution of inputs [1, T, D] with weights [D, K]."""
        rows = self._cache.update_conv_state(inputs.transpose(1, 2), self._layer_idx, state_idx=self._num)
        self._num += 1
        made = convolved(rows, weight, None)
        if made is None:
            raise NotPackableError("a layer's convolution does not get what its cache returned")
        return made.transpose(1, 2)

    def delayed(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns, for each token, the inputs [1, T, D] of the one in front of it.

        Zeros are in front of a first one.
        """
        dtype = jax_view(inputs).dtype
        return self.convolved(inputs, jnp.tile(jnp.array([1, 0], dtype), (inputs.shape[2], 1)))


QUIRK = Quirk(methods={"ZayaCCAProjection.forward": _projection})
