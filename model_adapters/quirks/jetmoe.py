"""JetMoe cuts its sorted tokens into lists by expert, with lengths read by the host.

Only the host could count those lengths (``tolist``).
"""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.program.moe import group_ends
from model_adapters.quirks.quirk import Quirk


def _gating(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Computes the original with the ends of the groups in place of their sizes."""
    logits = self.layer(hidden_states).float()
    chosen, indices = logits.topk(self.top_k, dim=1)
    gates = torch.softmax(chosen, dim=1).to(hidden_states.dtype).flatten()
    experts = indices.flatten()
    order = torch.argsort(experts, stable=True)
    return order, order // self.top_k, gates[order], group_ends(experts, self.num_experts), logits


def _parallel_experts(self: Any, inputs: torch.Tensor, expert_size: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(inputs, self.weight.transpose(1, 2), offs=expert_size)


QUIRK = Quirk(methods={"JetMoeTopKGating.forward": _gating, "JetMoeParallelExperts.forward": _parallel_experts})
