"""Qwen4-Exp's indexer walks over rows and queries in Python and counts visible blocks.

It counts what each query may see (``torch.nonzero``). It also appends positions to those it keeps, so that keys and
positions end with the newest token. In a packed step blocks begin at multiples of their size, and the pages of an
indexer have a key of each token with its rotation until its block is complete, whose key then is in the place of its
last token. Embeddings of n-grams and a dilated convolution have states of their own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from model_adapters.bridge.views import jax_view
from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.caches.paged_cache import PagedTraceCache
from model_adapters.caches.paged_layers import PagedIndexedLayer
from model_adapters.caches.state_layer import convolved, windows_of
from model_adapters.quirks.quirk import Quirk


def _indexer(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    cache: Any,
) -> Any:
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
    if isinstance(cache, PagedTraceCache):
        return _on_pages(self, q, keys, cos, sin, cache.layers[self.layer_idx])
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


def _on_pages(
    self: Any, q: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: PagedIndexedLayer
) -> Any:
    """Returns a mask of the tokens that queries [1, T, heads, dim] of a packed step take."""
    rotate, size = sys.modules[type(self).__module__].apply_rotary_pos_emb, self.compress_ratio
    half, dim = cos.shape[-1] // 2, keys.shape[-1]
    # Both halves of a rotation are the same.
    blocks = layer.update_block_indexer(torch.cat([keys, cos[..., :half], sin[..., :half]], dim=-1), size)
    pooled = self.k_layernorm(blocks[..., :dim].float().mean(2).to(keys.dtype))
    first_cos, first_sin = (each.repeat(1, 1, 2) for each in blocks[:, :, 0, dim:].split(half, dim=-1))
    pooled = rotate(pooled[:, :, None], cos=first_cos, sin=first_sin, unsqueeze_dim=2)[:, :, 0]
    return layer.take_blocks(q, pooled, self.block_topk, size)


def _short_convolution(self: Any, hidden_states: torch.Tensor, cache: Any) -> torch.Tensor:
    """Computes ``[1, T, D]`` of a packed step; outside of one, it is the original."""
    if not isinstance(cache, PagedTraceCache):
        original: torch.Tensor = type(self)._short_conv(self, hidden_states, cache)
        return original
    rows = cache.update_conv_state(hidden_states.transpose(1, 2), self.layer_idx, state_idx=1)
    taps = self.conv1d.weight.squeeze(1)
    # Taps that dilation leaves out are zeros.
    dilated = torch.nn.functional.pad(taps[..., None], (0, self.conv1d.dilation[0] - 1)).flatten(1)
    made = convolved(rows, jax_view(dilated[:, : self.short_conv_state_len + 1]), None)
    if made is None:
        raise NotPackableError("a layer's convolution does not get what its cache returned")
    return torch.nn.functional.silu(made).transpose(1, 2)


def _ngrams(self: Any, input_ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Computes ``[1, T, D]`` of a packed step; outside of one, it is the original.

    Of a window of ids that ends with each token, the original's last result is wanted. States are ids relative to the
    end token, which stands in front of a sequence.
    """
    if not isinstance(cache, PagedTraceCache):
        original: torch.Tensor = type(self).forward(self, input_ids, cache)
        return original
    relative = (input_ids - self.eos_token_id).float()[:, None]  # ids are exact
    windows = windows_of(cache.update_conv_state(relative, self.layer_idx, state_idx=2), self.ngram_size)
    if windows is None:
        raise NotPackableError("the ids of n-grams are not what the cache returned")
    ids = windows[0, ..., 0].to(input_ids.dtype) + self.eos_token_id  # [T, n]
    of_window: torch.Tensor = type(self).forward(self, ids, None)
    return of_window[None, :, -1]


def _rotated(
    rotate: Any, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Returns block keys [B, blocks, dim], rotated as the first token of each."""
    chosen_cos, chosen_sin = torch.gather(cos, 1, starts), torch.gather(sin, 1, starts)
    return rotate(keys[:, :, None], cos=chosen_cos, sin=chosen_sin, unsqueeze_dim=2)[:, :, 0]


QUIRK = Quirk(
    right_aligned_cache=True,
    methods={
        "Qwen4ExpTextQSAIndexer.forward": _indexer,
        "Qwen4ExpTextPLELayer._short_conv": _short_convolution,
        "Qwen4ExpTextNGramEmbedding.forward": _ngrams,
    },
)
