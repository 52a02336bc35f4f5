"""GLM 5's indexer drops pools of keys that no row has; only the host could count them.

Here they stay and are marked, so that none is selected.
"""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.quirks.quirk import Quirk


def _get_pooled_states(self: Any, packed_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys, gates, seen = packed_states.split([self.head_dim, self.head_dim, 1], -1)
    batch, length = keys.shape[:2]
    size = self.index_kpool
    num_pools = -(-length // size)
    is_seen = seen[..., 0].bool()
    none = torch.full((batch,), length, dtype=torch.long, device=keys.device)
    first = torch.where(is_seen.any(1), is_seen.long().argmax(1), none)
    indices = first[:, None, None] + torch.arange(num_pools * size, device=keys.device).view(1, num_pools, size)
    inside = indices.clamp(0, length - 1).reshape(batch, -1, 1)

    def taken(x: torch.Tensor) -> torch.Tensor:
        return x.gather(1, inside.expand(-1, -1, x.shape[-1])).reshape(batch, num_pools, size, -1)

    is_real = taken(seen)[..., 0].bool() & (indices < length)
    scores = taken(gates).float() + self.index_kpool_compress_ape.float()
    shares = scores.masked_fill(~is_real[..., None], float("-inf")).softmax(2)
    pooled = (torch.nan_to_num(shares).to(keys.dtype) * taken(keys)).sum(2)
    return pooled, indices.masked_fill(~is_real, -1), is_real.all(-1)


QUIRK = Quirk(methods={"Glm5NextTextIndexer.get_pooled_states": _get_pooled_states})
