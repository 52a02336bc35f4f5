"""Switch Transformers loop over chosen experts, which only the host could count.

They are the experts that tokens chose.
"""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.program.moe import sum_of_modules
from model_adapters.quirks.quirk import Quirk


def _forward(
    self: Any, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
) -> torch.Tensor:
    chosen = selected_experts[:, 0] > 0  # of [tokens, 1, experts], one-hot; all zero past an expert's capacity
    return sum_of_modules(self, hidden_states, chosen, routing_weights * chosen.to(routing_weights.dtype))


QUIRK = Quirk(methods={"SwitchTransformersExperts.forward": _forward})
