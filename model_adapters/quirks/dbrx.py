"""DBRX loops over the experts that are hit, which only the host could count.

See `DbrxExperts.forward` of transformers 5.23.
"""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.program.moe import RowsTimesExperts, route_and_combine
from model_adapters.quirks.quirk import Quirk


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    w1, v1, w2 = (w.view(self.num_experts, self.ffn_hidden_size, self.hidden_size) for w in _weights(self.mlp))

    def experts(x: torch.Tensor, product: RowsTimesExperts, _: torch.Tensor) -> torch.Tensor:
        gate = self.mlp.activation_fn(product(x, w1))
        return product(gate * product(x, v1), w2, is_transposed=True)

    flat = hidden_states.reshape(-1, self.hidden_size)
    out = route_and_combine(flat, top_k_index, top_k_weights, self.num_experts, experts)
    return out.view(hidden_states.shape[0], -1, self.hidden_size)


def _weights(mlp: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return mlp.w1, mlp.v1, mlp.w2


QUIRK = Quirk(methods={"DbrxExperts.forward": _forward})
