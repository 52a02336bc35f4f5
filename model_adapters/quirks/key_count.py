"""GPT-Neo and MPT slice tables by the number of keys, as if the newest key were the last.

GPT-Neo slices causal masks, MPT biases by distance. Both tables end with the positions.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.mpt import modeling_mpt

from model_adapters.quirks.quirk import Quirk


def _distances(self: Any, num_heads: int, sequence_length: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Computes the original for more keys.

    A cache may be a page longer than the longest sequence.
    """
    return modeling_mpt.build_mpt_alibi_tensor(num_heads, 2 * sequence_length + 512, *args, **kwargs)


def _windowed(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the original with a mask for any number of keys.

    A cache may have a page more than the table.
    """
    scores = query.to(torch.float32) @ key.to(torch.float32).transpose(-1, -2)
    num_queries, num_keys = scores.shape[-2:]
    at = torch.arange(num_keys, device=scores.device)
    distance = at[num_keys - num_queries :, None] - at
    is_seen = distance >= 0
    if self.attention_type == "local":
        is_seen = is_seen & (distance < self.config.window_size)
    scores = torch.where(is_seen, scores, torch.finfo(scores.dtype).min)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = self.attn_dropout(torch.softmax(scores, dim=-1).to(value.dtype))
    return weights @ value, weights


QUIRK = Quirk(
    right_aligned_cache=True,
    methods={"MptModel.build_mpt_alibi_tensor": _distances, "GPTNeoSelfAttention._attn": _windowed},
)
