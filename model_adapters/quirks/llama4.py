"""Llama 4 multiplies every token with every expert, and those not chosen with zeros.

On a CPU, where the bytes of weights are what a step waits for, tokens are multiplied with the experts that they chose.

Its layers without rotary embeddings scale queries by positions, which they count from the length of the cache.
"""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.bridge.views import torch_view
from model_adapters.caches.paged_cache import PagedTraceCache
from model_adapters.program import moe
from model_adapters.quirks.quirk import Quirk


def _forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the original, in which an expert gives zero for a token of zeros."""
    hidden = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(hidden)
    out = self.shared_expert(hidden)
    if moe.routes():
        _, ids = torch.topk(logits, self.top_k, dim=1)
        rows = hidden[:, None] * scores.gather(1, ids)[..., None]
        gate, up = moe.routed_product(rows, self.experts.gate_up_proj, ids, None, is_transposed=True).chunk(2, dim=-1)
        inner = up * self.experts.act_fn(gate)
        return out + moe.routed_product(inner, self.experts.down_proj, ids, None, is_transposed=True).sum(1), logits
    by_expert = hidden.repeat(scores.shape[1], 1) * scores.transpose(0, 1).reshape(-1, 1)
    return out + self.experts(by_expert).reshape(scores.shape[1], *hidden.shape).sum(dim=0), logits


class _CountedCache:
    """A cache of a packed step whose length is one for each token.

    Added to the token's place in the step, it is the token's position.
    """

    def __init__(self, cache: PagedTraceCache) -> None:
        self._cache = cache

    def get_seq_length(self, layer_idx: int) -> torch.Tensor:
        """Returns int64[T], the position of each token of the step minus its place there."""
        positions = torch_view(self._cache.paged_layers[layer_idx].batch.positions)
        return positions - torch.arange(positions.shape[0])

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the new keys and values, as the cache does."""
        return self._cache.update(*args, **kwargs)


def _attention(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs the original; in a packed step with the positions of its tokens."""
    counted = {name: _CountedCache(value) for name, value in kwargs.items() if isinstance(value, PagedTraceCache)}
    result: tuple[torch.Tensor, torch.Tensor | None] = type(self).forward(self, *args, **{**kwargs, **counted})
    return result


QUIRK = Quirk(methods={"Llama4TextMoe.forward": _forward, "Llama4TextAttention.forward": _attention})
