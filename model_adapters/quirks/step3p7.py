"""Step 3.7 loops over the experts that are hit, which only the host could count.

It clamps what the experts compute.
"""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.program.moe import RowsTimesExperts, route_and_combine
from model_adapters.quirks.quirk import Quirk


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    def experts(x: torch.Tensor, product: RowsTimesExperts, _: torch.Tensor) -> torch.Tensor:
        return product(self._apply_gate(product(x, self.gate_up_proj)), self.down_proj)

    return route_and_combine(hidden_states, top_k_index, top_k_weights, self.num_experts, experts).to(
        hidden_states.dtype
    )


QUIRK = Quirk(methods={"Step3p7Experts.forward": _forward})
