"""NLLB-MoE loops over chosen experts, which only the host could count.

It also reads padding off a mask.
"""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.errors import UnsupportedModelError
from model_adapters.program.moe import sum_of_modules
from model_adapters.quirks.quirk import Quirk


def _experts(
    self: Any, hidden_states: torch.Tensor, router_mask: torch.Tensor, router_probs: torch.Tensor
) -> torch.Tensor:
    # The original takes the entries of a one-hot mask for numbers of experts: expert 1 computes the first choice, and
    # expert 0 has the weights of all others. The same is computed here.
    picked = torch.nn.functional.one_hot(router_mask, num_classes=self.num_experts)  # [tokens, experts, experts]
    weights = (picked.to(router_probs.dtype) * router_probs[..., None]).sum(1)
    if self.moe_token_dropout > 0:
        weights = weights * (1 - self.moe_token_dropout)
    return sum_of_modules(self, hidden_states, picked.sum(1) > 0, weights)


def _sparse_mlp(self: Any, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the original with the mask's entries of these tokens.

    The cache has unused capacity.
    """
    if 0 < self.router.moe_eval_capacity_token_fraction < 1:
        raise UnsupportedModelError(
            "moe_eval_capacity_token_fraction: expected 1.0, since an expert's room would depend on padding and on "
            f"other requests, got {self.router.moe_eval_capacity_token_fraction}"
        )
    batch, length, width = hidden_states.shape
    is_padding = None
    if padding_mask is not None and length > 1:  # a step's one token is none
        last = padding_mask[:, 0, -1, :length]  # which of the others the last token sees
        is_padding = (~last if last.dtype == torch.bool else last != 0).reshape(-1)
    flat = hidden_states.reshape(-1, width)
    top_1_mask, router_probs, _ = self.router(flat, is_padding)
    return self.experts(flat, top_1_mask, router_probs).reshape(batch, length, width)


QUIRK = Quirk(methods={"NllbMoeExperts.forward": _experts, "NllbMoeSparseMLP.forward": _sparse_mlp})
