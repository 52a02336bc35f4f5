"""Experts of a layer without numbers that only the host could count.

Tokens are sorted by expert first, so that every product is one of grouped rows of a fixed number; or each expert is
a module of its own, computed where some token chose it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters.bridge import jax_view, torch_view


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


def sum_of_modules(
    experts: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of what experts that are modules of their own make of tokens: [tokens, hidden].

    An expert that some token chose computes all tokens; one that none chose is skipped on the device.

    Args:
        experts: ``expert_0``, ``expert_1``, … from [tokens, hidden] to as much.
        hidden: [tokens, hidden].
        chosen: bool[tokens, experts].
        weights: [tokens, experts]; zero where an expert is not chosen.
    """

    def zeros(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.zeros_like(x)

    total = torch.zeros_like(hidden)
    for index in range(chosen.shape[1]):
        expert = experts[f"expert_{index}"]

        def computed(x: jax.Array, scale: jax.Array, expert: Any = expert) -> jax.Array:
            return jax_view((expert(torch_view(x)) * torch_view(scale)).to(hidden.dtype))

        arrays = jax_view(hidden), jax_view(weights[:, index, None])
        total = total + torch_view(jax.lax.cond(jax_view(chosen[:, index].any()), computed, zeros, *arrays))
    return total
