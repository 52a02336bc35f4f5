"""Mask of a step for which LED and FSMT make none.

Unused capacity of a cache of fixed shapes is masked.
"""

from __future__ import annotations

from typing import Any

import torch


def stored_mask(cache: Any, layer_idx: int, query: torch.Tensor, num_new: int) -> torch.Tensor | None:
    """Returns an additive mask: zero for stored keys, the least number for unused capacity.

    Keys count as stored after this forward; the number is the least one of the dtype.

    Args:
        cache: The cache before the layer's update, or None.
        layer_idx: Index of the layer.
        query: Queries [..., head_dim], whose dtype the mask gets.
        num_new: Number of tokens of this forward.

    Returns:
        float[num_keys]; None where all keys are stored ones.
    """
    layer = None if cache is None else getattr(cache, "self_attention_cache", cache).layers[layer_idx]
    if layer is None or not layer.is_initialized:
        return None
    positions = torch.arange(layer.get_mask_sizes(num_new)[0])
    least = torch.finfo(query.dtype).min
    return torch.where(positions < layer.get_seq_length() + num_new, 0.0, least).to(query.dtype)
