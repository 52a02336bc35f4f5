"""Llama 4 multiplies every token with every expert, and those not chosen with zeros.

On a CPU, where the bytes of weights are what a step waits for, tokens are multiplied with the experts that they chose.
"""

from __future__ import annotations

from typing import Any

import torch

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


QUIRK = Quirk(methods={"Llama4TextMoe.forward": _forward})
