"""Experts whose tokens are sorted by expert first, so that every product is one of grouped rows of a fixed number."""

from __future__ import annotations

from collections.abc import Callable

import torch


def routed(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The weighted sum of what its experts make of each token: [tokens, hidden].

    Args:
        hidden: [tokens, hidden].
        expert_ids: int[tokens, k]; `num_experts` and above are groups of their own at the end.
        weights: [tokens, k].
        num_experts: groups that have weights.
        experts: called with rows [tokens * k, hidden] sorted by expert, the ends int32[num_experts] of the groups
            among them, and the rows' experts int[tokens * k]; returns as many rows.
    """
    num_tokens, num_chosen = expert_ids.shape
    flat = expert_ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    out = experts(hidden[order // num_chosen], group_ends(flat, num_experts), flat[order])
    out = out * weights.reshape(-1)[order][:, None]
    back = torch.argsort(order)
    return out[back].reshape(num_tokens, num_chosen, -1).sum(1)


def group_ends(expert_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int32[num_experts]: where each expert's rows end once the rows are sorted by expert."""
    counted = expert_ids.reshape(-1)[None] <= torch.arange(num_experts, device=expert_ids.device)[:, None]
    return counted.sum(1).to(torch.int32)
