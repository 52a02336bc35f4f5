"""DeepSeek-V4 shows a single token every compressed entry of its cache, unused ones too.

Here the cache has room for more entries than are stored. In a packed step entries are made of the blocks that the new
tokens of each sequence complete, and attention reads them from pages of their own.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import torch

from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.caches.paged_cache import PagedTraceCache
from model_adapters.caches.paged_layers import PagedCompressedLayer
from model_adapters.ops.attention_args import AttentionArgs
from model_adapters.quirks.quirk import Quirk


def _forward(
    self: Any, hidden_states: torch.Tensor, q_residual: Any, position_ids: Any, cache: Any, layer_idx: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes the original with a mask of the entries that no token has filled."""
    original = type(self).forward
    entries, mask = original(self, hidden_states, q_residual, position_ids, cache, layer_idx)
    num_entries = entries.shape[2]
    if mask is None and num_entries and cache is not None:
        open_ones = cache.layers[layer_idx].mask_of_open(num_entries, entries.dtype)
        mask = open_ones.expand(entries.shape[0], 1, position_ids.shape[1], num_entries)
    return entries, mask


def _attention(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: Any,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes ``[1, T, hidden]`` of a packed step; without entries, it is the original."""
    if not isinstance(cache, PagedTraceCache) or self.compressor is None:
        arguments = hidden_states, position_embeddings, position_ids, attention_mask, cache
        original: tuple[torch.Tensor, torch.Tensor | None] = type(self).forward(self, *arguments, **kwargs)
        return original
    causal, layer = getattr(attention_mask, "causal_mask", None), cache.layers[self.layer_idx]
    if causal is None or causal.starts is not None or causal.window not in (None, self.sliding_window):
        raise NotPackableError("attention to compressed entries has a mask that is more than causal")
    rotate, shape = (
        sys.modules[type(self).__module__].apply_rotary_pos_emb,
        (*hidden_states.shape[:2], -1, self.head_dim),
    )
    cos, sin = position_embeddings[self.rope_layer_type]
    residual = self.q_a_norm(self.q_a_proj(hidden_states))
    query = rotate(self.q_b_norm(self.q_b_proj(residual).view(shape).transpose(1, 2)), cos, sin)
    key = rotate(self.kv_norm(self.kv_proj(hidden_states)).view(shape).transpose(1, 2), cos, sin)
    cache.update(key, key, self.layer_idx)
    taken, rate = _taken(self.compressor, hidden_states, residual, position_ids, layer), self.compressor.compress_rate
    args = AttentionArgs(self.scaling, self.sliding_window, sinks=jax_view(self.sinks))
    out = layer.attend(query, key, taken, rate, args)  # [1, T, heads, dim]
    out = rotate(out.transpose(1, 2), cos, -sin).transpose(1, 2)
    grouped = out.reshape(*hidden_states.shape[:2], self.config.o_groups, -1)
    return self.o_b_proj(self.o_a_proj(grouped).flatten(2)), None


def _taken(
    compressor: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    position_ids: torch.Tensor,
    layer: PagedCompressedLayer,
) -> jax.Array | None:
    """Stores new entries; returns the blocks that queries take, int32[T, n]; None for all."""
    _compress(compressor, hidden_states, layer, "compressor")
    indexer = getattr(compressor, "indexer", None)
    if indexer is None:
        return None
    _compress(indexer, hidden_states, layer, "indexer")
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    cos, sin = indexer.rotary_emb(hidden_states, position_ids=position_ids, layer_type=indexer.rope_layer_type)
    query = indexer.q_b_proj(residual).unflatten(-1, (-1, indexer.head_dim)).transpose(1, 2)
    query = rotate(query, cos, sin).transpose(1, 2)
    scorer = indexer.scorer
    weights = scorer.weights_proj(hidden_states).float() * scorer.weights_scaling
    return layer.take_entries(query, weights, scorer.softmax_scale, indexer.index_topk, indexer.compress_rate)


def _compress(compressor: Any, hidden_states: torch.Tensor, layer: PagedCompressedLayer, name: str) -> None:
    """Stores the new tokens of a compressor, and the entries of the blocks that they complete.

    Where blocks overlap, the first half of a token's columns is for the block behind its own, the second for its own.
    """
    rate, dim = compressor.compress_rate, compressor.head_dim
    tokens = torch.cat([compressor.kv_proj(hidden_states), compressor.gate_proj(hidden_states)], dim=-1)
    overlaps = tokens.shape[-1] == 4 * dim
    blocks = layer.store_tokens(name, tokens, rate, 2 * rate if overlaps else rate)
    kv, gate = blocks.tokens.chunk(2, dim=-1)  # [1, M, count, dim or 2 * dim]
    begin = torch_view(blocks.positions) + 1 - rate
    if overlaps:
        bias, has_before = compressor.position_bias, (begin >= rate)[None, :, None, None]
        kv = torch.cat([kv[:, :, :rate, :dim], kv[:, :, rate:, dim:]], dim=2)
        before = torch.where(has_before, gate[:, :, :rate, :dim] + bias[:, :dim], float("-inf"))
        gate = torch.cat([before, gate[:, :, rate:, dim:] + bias[:, dim:]], dim=2)
    else:
        gate = gate + compressor.position_bias
    entries = compressor.kv_norm((kv * gate.softmax(dim=2, dtype=torch.float32).to(kv.dtype)).sum(dim=2))
    begin = begin.clamp(min=0)[None]
    cos, sin = compressor.rotary_emb(entries, position_ids=begin, layer_type=compressor.rope_layer_type)
    rotate = sys.modules[type(compressor).__module__].apply_rotary_pos_emb
    layer.store_entries(name, rotate(entries[:, None], cos, sin)[:, 0], blocks, rate)


QUIRK = Quirk(methods={"DeepseekV4HCACompressor.forward": _forward, "DeepseekV4Attention.forward": _attention})
