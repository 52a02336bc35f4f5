"""DeepSeek-V4 shows a single token every compressed entry of its cache, unused ones too.

Here the cache has room for more entries than are stored.
"""

from __future__ import annotations

from typing import Any

import torch

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


QUIRK = Quirk(methods={"DeepseekV4HCACompressor.forward": _forward})
