"""Latent attention on pages: they hold latents, and keys and values are never expanded.

Attention with latents (DeepSeek-AI 2024, multi-head latent attention) caches a token as one latent, shared by all
heads, and a rotated part of its key; ``expand_kv`` makes keys and values of every head of them, by a linear map. So

    query . (up_keys @ latent) = (up_keys.T @ query) . latent
    sum(weight * (up_values @ latent)) = up_values @ sum(weight * latent)

and the op attends as with one head of keys, which are latent and rotated part, and of values, which are latents. All
architectures have the same code for ``expand_kv``; it is recognised by that, and other code is left as it is.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from model_adapters.bridge.views import jax_view
from model_adapters.caches.layers import KVWrite
from model_adapters.caches.packed_batch import NotPackableError
from model_adapters.caches.paged_layers import LatentWrite, PagedWrite
from model_adapters.ops.compressed_weight import lora_of
from model_adapters.program.trace_context import replaced_methods, same_code

READ_BY_HEAD = "kv_b_proj"
"""Layer whose matrix attention to latents takes by head: `pack_weights` leaves it as it is."""


def intercepted(module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Makes latent attention in `module` annotate its keys, inside the context."""
    return replaced_methods(
        (child, "expand_kv", _expand)
        for child in module.modules()
        if same_code(type(child), DeepseekV3Attention, "expand_kv") and "expand_kv" not in vars(child)
    )


def _expand(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns all heads' keys and values, annotated if the cache holds what they are made of."""
    keys, values = type(self).expand_kv(self, kv_nope, k_rot)
    paged: PagedWrite | None = getattr(kv_nope, "paged_write", None)
    dense: KVWrite | None = getattr(kv_nope, "cache_write", None)
    if paged is not None and k_rot is paged.values:
        up_keys, up_values = _up_projections(self)
        keys.latent_write = LatentWrite(paged, kv_nope, k_rot, values, up_keys, up_values)
    elif dense is not None and dense.pool_before is None and k_rot is dense.values_out:
        dense.layer.keeps_latents = True
    return keys, values


def _up_projections(attention: Any) -> tuple[Any, Any]:
    """Returns what multiplies a latent to the keys and values of each head.

    The shapes are [heads, key dim without the rotated part, latent dim] and [heads, value dim, latent dim].

    Raises:
        NotPackableError: more than one product with one matrix makes keys and values of a latent.
    """
    up = getattr(attention, READ_BY_HEAD)
    if type(up).forward is not torch.nn.Linear.forward or up.bias is not None:
        raise NotPackableError("latents are expanded by more than one matrix")
    weight = jax_view(up.weight)
    if lora_of(weight) is not None:
        raise NotPackableError("latents are expanded by an adapter of each request")
    by_head = weight.reshape(-1, attention.qk_nope_head_dim + attention.v_head_dim, weight.shape[1])
    return by_head[:, : attention.qk_nope_head_dim], by_head[:, attention.qk_nope_head_dim :]
