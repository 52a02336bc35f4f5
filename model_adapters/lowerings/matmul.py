"""Lowerings of matrix products and attention to this project's own ops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from model_adapters import ops
from model_adapters.bridge.views import get_lowering, set_lowering
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.compressed_weight import before_turn
from model_adapters.sharding.sharded_trace import (
    SHORT_RESULT,
    divide_fused_input,
    gather_fused_result,
    gathered,
    note_squeezed,
    placement_in_trace,
)


def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    placed = placement_in_trace(weight)
    if placed is None:
        return ops.linear(x, weight, bias)
    out = ops.linear(divide_fused_input(x, placed.dims[1]), weight, bias)
    if placed.rule.axes is not None and placed.rule.axes[0] == SHORT_RESULT:
        return gathered(out)
    return gather_fused_result(out, placed.dims[0])


def _addmm(bias: jax.Array, x: jax.Array, weight: jax.Array, *, beta: float = 1.0, alpha: float = 1.0) -> jax.Array:
    out = ops.addmm(bias, x, weight, beta=beta, alpha=alpha)
    placed = placement_in_trace(weight)
    return out if placed is None else gather_fused_result(out, placed.dims[1])


def _grouped_mm(
    x: jax.Array,
    weight: jax.Array,
    offs: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_dtype: Any = None,
) -> jax.Array:
    """Computes ``torch._grouped_mm`` of `x` [rows, in], sorted by expert.

    `weight` is [experts, in, out], perhaps stored as [experts, out, in]; `offs` are the ends of the experts' rows.
    """
    if offs is None or bias is not None or x.ndim != 2 or weight.ndim != 3:
        raise NotImplementedError("grouped_mm: expected x [rows, in], weight [experts, in, out] and offs, without bias")
    sizes = jnp.diff(offs, prepend=jnp.zeros(1, offs.dtype)).astype(jnp.int32)
    if (stored := before_turn(weight)) is not None:
        return ops.grouped_matmul(x, stored, sizes, layout="enk")
    return ops.grouped_matmul(x, weight, sizes)


def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """Computes attention of [..., heads, len, dim], for queries that see no key as well.

    torchax returns NaN for them.
    """
    if dropout_p:
        raise NotImplementedError(f"scaled_dot_product_attention: expected no dropout, got {dropout_p}")
    if query.ndim < 3:
        raise NotImplementedError(f"scaled_dot_product_attention: expected at least 3 axes, got {query.ndim}")
    try:
        batch = jnp.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    except ValueError as error:
        raise RuntimeError(f"scaled_dot_product_attention: {error}") from None
    q, k, v = (jnp.broadcast_to(x, (*batch, *x.shape[-3:])).reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    if q.shape[1] == 1 != k.shape[1]:
        q = jnp.broadcast_to(q, (q.shape[0], k.shape[1], *q.shape[2:]))
    if attn_mask is not None:
        mask = jnp.broadcast_to(attn_mask, (*batch, *jnp.broadcast_shapes((1, 1, 1), attn_mask.shape[-3:])))
        attn_mask = mask.reshape(-1, *mask.shape[-3:])
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    try:
        out: Any = ops.dense_attention(q, k, v, attn_mask, ops.AttentionArgs(scale), causal=is_causal)
    except InvalidArgumentError as error:
        raise RuntimeError(str(error)) from None  # as torch has it: model code made the shapes, and no user
    return out.reshape(*batch, *out.shape[1:])


def _find_squeezed_weights() -> None:
    """Lets recurrent layers find a convolution's weight behind ``weight.squeeze(1)``."""
    squeeze = get_lowering(torch.ops.aten.squeeze)

    def noted_squeeze(x: jax.Array, dim: int | None = None) -> jax.Array:
        out = squeeze(x, dim)
        if x.ndim == 3:
            note_squeezed(x, out)
        return out

    set_lowering(torch.ops.aten.squeeze, noted_squeeze, keep_kind=True)
