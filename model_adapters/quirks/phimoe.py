"""PhiMoE scales rotated values by one of two numbers, chosen by length on the host."""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.program.rope import lengths_of
from model_adapters.quirks.quirk import Quirk


def _forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rope = self.config.rope_parameters
    inv_freq, scale = self.rope_init_fn(self.config)
    if rope["rope_type"] != "default":
        is_long = lengths_of(position_ids) > rope["original_max_position_embeddings"]
        scale = torch.where(is_long[..., None], rope["long_mscale"], rope["short_mscale"])
    freqs = position_ids[..., None].float() * inv_freq.to(device=x.device, dtype=torch.float)
    emb = torch.cat((freqs, freqs), dim=-1)
    return (emb.cos() * scale).to(x.dtype), (emb.sin() * scale).to(x.dtype)


QUIRK = Quirk(methods={"PhimoeRotaryEmbedding.forward": _forward})
