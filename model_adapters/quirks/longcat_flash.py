"""LongCat Flash loops over the experts that are hit, which only the host could count.

Some experts are the identity.
"""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.program.moe import RowsTimesExperts, route_and_combine
from model_adapters.quirks.quirk import Quirk


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    num_routed = self.num_routed_experts

    def experts(x: torch.Tensor, product: RowsTimesExperts, ids: torch.Tensor) -> torch.Tensor:
        if self.gate_up_proj is None:
            return x
        gate, up = product(x, self.gate_up_proj).chunk(2, dim=-1)
        down = product(self.act_fn(gate) * up, self.down_proj)
        return torch.where((ids >= num_routed)[:, None], x, down)

    return route_and_combine(hidden_states, top_k_index, top_k_weights, num_routed, experts).to(hidden_states.dtype)


QUIRK = Quirk(methods={"LongcatFlashExperts.forward": _forward})
