"""MiniMax keeps states of lightning attention in a cache of its own class alone.

A prompt is an unrolled loop over its blocks, and a step behind it one over its tokens. Here states are those of cache
layers, and the recurrence is Mamba-2's with steps of one: ``state = exp(-slope) * state + value key``.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import torch

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.caches.device_cache import TraceCache
from model_adapters.caches.paged_cache import PagedTraceCache
from model_adapters.caches.state_layer import only_sequence, recurrent_of
from model_adapters.ops.state_space import state_space
from model_adapters.program.batch_recurrences import UNIT_STEPS, UNIT_STEPS_LIMIT, lightning_attention
from model_adapters.quirks.quirk import Quirk

_CACHES = (TraceCache, PagedTraceCache)


def _model(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the original, which checks the class of a cache if it is told to use one."""
    if isinstance(kwargs.get("cache"), _CACHES):
        kwargs["use_cache"] = False
    return type(self).forward(self, *args, **kwargs)


def _attention(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes the original with the state of a cache layer, if there is one."""
    cache = kwargs.get("cache")
    if not isinstance(cache, _CACHES):
        result: tuple[torch.Tensor, torch.Tensor] = type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, **kwargs
        )
        return result
    masked = sys.modules[type(self).__module__].apply_mask_to_padding_states
    shape = (*hidden_states.shape[:2], self.num_attention_heads, 3 * self.head_dim)
    qkv = masked(self.act_fn(self.qkv_proj(hidden_states)), attention_mask).reshape(shape)
    out, state = _recurrence(self, cache, *qkv.split(self.head_dim, dim=3))
    out = self.norm(out.reshape(*shape[:2], -1))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * out), state


def _recurrence(
    self: Any, cache: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes ``[batch, T, heads, dim]`` and, on a dense cache, the states.

    These are ``[batch, heads, dim, dim]``.
    """
    slopes, state = jax_view(self.slope_rate)[:, 0, 0], cache.get_recurrent_state(self.layer_idx)
    if (layer := recurrent_of(state)) is None:
        q, k, v = map(jax_view, (query, key, value))
        out, states = lightning_attention(q, k, v, slopes, None if state is None else jax_view(state))
        cache.update_recurrent_state(torch_view(states), self.layer_idx)
        cache.layers[self.layer_idx].has_previous_state[0] = True  # which only a convolution sets
        return torch_view(out), torch_view(states.mT)
    q, k, v = map(only_sequence, (query, key, value))

    def run(pool: jax.Array, segments: Any) -> tuple[jax.Array, jax.Array]:
        steps = jax.numpy.full(v.shape[:2], UNIT_STEPS)
        return state_space(v, steps, -slopes, k, q, None, None, pool, segments, dt_limit=UNIT_STEPS_LIMIT)

    out = layer.run_recurrence((*v.shape[1:], k.shape[2]), run)
    cache.update_recurrent_state(layer.recurrent_handle(), self.layer_idx)
    return torch_view(out[None]), None


QUIRK = Quirk(methods={"MiniMaxModel.forward": _model, "MiniMaxLightningAttention.forward": _attention})
