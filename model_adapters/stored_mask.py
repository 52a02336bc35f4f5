"""A mask for attention that its code gives none, since all that a cache has is seen: ours has room that is empty."""

from __future__ import annotations

from typing import Any

import torch


def stored_mask(cache: Any, layer_idx: int, query: torch.Tensor, num_new: int) -> torch.Tensor | None:
    """Zeros for what a layer of `cache` has stored once `num_new` tokens are, and the least number for what is behind.

    Args:
        cache: as model code has it before the layer's update, or None.
        layer_idx: of the layer.
        query: of the dtype that the mask is to have.
        num_new: tokens of this forward.

    Returns:
        float[num_keys]; None where all keys are stored ones.
    """
    layer = None if cache is None else getattr(cache, "self_attention_cache", cache).layers[layer_idx]
    if layer is None or not layer.is_initialized:
        return None
    positions = torch.arange(layer.get_mask_sizes(num_new)[0])
    least = torch.finfo(query.dtype).min
    return torch.where(positions < layer.get_seq_length() + num_new, 0.0, least).to(query.dtype)
