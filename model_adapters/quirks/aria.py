"""Aria's experts cut sorted tokens by counts that the host reads.

This holds until transformers has the experts as one implementation.
"""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.quirks.quirk import Quirk


def _grouped_experts(self: Any, input: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
    ends = tokens_per_expert.cumsum(0).to(torch.int32)
    return torch._grouped_mm(input, self.weight, offs=ends)


QUIRK = Quirk(methods={"AriaGroupedExpertsGemm.forward": _grouped_experts})
