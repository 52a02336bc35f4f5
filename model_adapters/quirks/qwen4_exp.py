"""Qwen4-Exp's indexer walks over rows and queries in Python and counts visible blocks.

It counts what each query may see (``torch.nonzero``). It also appends positions to those it keeps, so that keys and
positions end with the newest token.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from model_adapters.quirks.quirk import Quirk


def _indexer(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    cache: Any,
) -> torch.Tensor:
    """Computes the original for all rows and queries at once.

    A mask is that of causal attention and padding on the left.

    Returns:
        bool[batch, 1, queries, keys]: the tokens of the chosen blocks, and those after a query's last complete block.
    """
    rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
    batch, num_queries, _ = hidden_states.shape
    cos, sin = position_embeddings
    shape = (batch, num_queries, -1, self.index_head_dim)
    num_query_columns = self.index_n_heads * self.index_head_dim
    qk = self.index_qk_proj(hidden_states)
    q = self.q_layernorm(qk[..., :num_query_columns].reshape(shape))
    q = rotate(q, cos=cos[:, -num_queries:], sin=sin[:, -num_queries:], unsqueeze_dim=2)
    keys = qk[..., num_query_columns:].reshape(shape)[:, :, 0]
    if cache is not None:
        keys = cache.update_indexer(keys, self.layer_idx)
    visible = (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0)[:, 0]  # [B, Q, K]
    num_keys, ratio = visible.shape[-1], self.compress_ratio
    num_blocks = max(num_keys // ratio, 1)

    # What a row sees begins where its padding ends, whatever the query: so do its blocks.
    first = num_keys - visible[:, -1].sum(-1)
    at = torch.arange(num_keys, device=keys.device)
    # Fewer keys than a block has are one that is incomplete: of repeated keys, and never chosen.
    inside = torch.arange(num_blocks * ratio, device=keys.device)
    inside = (first[:, None] + inside).clamp(max=num_keys - 1)  # [B, blocks * ratio]
    grouped = torch.gather(keys, 1, inside[..., None].expand(-1, -1, keys.shape[-1]))
    pooled = grouped.view(batch, num_blocks, ratio, -1).float().mean(2).to(keys.dtype)
    starts = inside[:, ::ratio, None].expand(-1, -1, cos.shape[-1])
    block_keys = _rotated(rotate, self.k_layernorm(pooled), cos, sin, starts)
    scores = torch.relu(torch.einsum("bqhd,bkd->bqkh", q.float(), block_keys.float())).sum(-1)

    num_complete = visible.sum(-1, keepdim=True) // ratio  # [B, Q, 1]
    is_complete = torch.arange(num_blocks, device=keys.device) < num_complete
    chosen = torch.where(is_complete, scores, -1.0).topk(min(self.block_topk, num_blocks), dim=-1).indices
    is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True) & is_complete
    rank = at - first[:, None]  # [B, K], the place of a key among those that its row sees
    block = (rank // ratio).clamp(0, num_blocks - 1)[:, None].expand(-1, num_queries, -1)
    is_tail = rank[:, None] >= num_complete * ratio
    return (visible & (torch.gather(is_chosen, -1, block) & ~is_tail | is_tail))[:, None]


def _rotated(
    rotate: Any, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Returns block keys [B, blocks, dim], rotated as the first token of each."""
    chosen_cos, chosen_sin = torch.gather(cos, 1, starts), torch.gather(sin, 1, starts)
    return rotate(keys[:, :, None], cos=chosen_cos, sin=chosen_sin, unsqueeze_dim=2)[:, :, 0]


QUIRK = Quirk(right_aligned_cache=True, methods={"Qwen4ExpTextQSAIndexer.forward": _indexer})
