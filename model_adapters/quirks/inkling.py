"""Inkling counts positions by its cache, to bias scores by distance.

Each query mixes its biases of profiles. In a packed step a sequence begins anywhere: positions are those of its tokens,
and the op makes the biases.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from model_adapters.bridge.views import torch_view
from model_adapters.caches.paged_cache import PagedTraceCache
from model_adapters.quirks.quirk import Quirk


def _attention(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes ``[1, T, hidden]`` of a packed step; outside of one, it is the original."""
    cache = kwargs.get("cache")
    if not isinstance(cache, PagedTraceCache):
        result: tuple[torch.Tensor, torch.Tensor | None] = type(self).forward(self, hidden_states, **kwargs)
        return result
    convolution = {"cache": cache, "conv_mask": kwargs["conv_mask"]}
    query, weights = self.q_proj(hidden_states), self.r_proj(hidden_states).unflatten(-1, (self.num_heads, -1))
    key = self.k_sconv(self.k_proj(hidden_states), **convolution)
    value = self.v_sconv(self.v_proj(hidden_states), **convolution)
    query, key, value = (each.unflatten(-1, (-1, self.head_dim)) for each in (query, key, value))
    query, key, value = self.q_norm(query), self.k_norm(key).transpose(1, 2), value.transpose(1, 2)
    key, value = cache.update(key, value, self.layer_idx)
    if not self.is_sliding and self.config.log_scaling_n_floor is not None:
        seen = torch_view(cache.layers[self.layer_idx].batch.positions) + 1
        longer = (seen.float() / self.config.log_scaling_n_floor).clamp(min=1.0)
        factors = (1.0 + self.config.log_scaling_alpha * torch.log(longer)).view(1, -1, 1, 1)
        query, weights = ((each.float() * factors).to(each.dtype) for each in (query, weights))
    attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    out, _ = attend(
        self,
        query.transpose(1, 2),
        key,
        value,
        kwargs["attention_mask"],
        scaling=self.scaling,
        sliding_window=self.sliding_window,
        position_bias=(weights, self.rel_logits_proj.proj),
    )
    return self.o_proj(out.flatten(2)), None


QUIRK = Quirk(methods={"InklingAttention.forward": _attention})
