"""Decode attention for Hopper through Pallas' Mosaic GPU lowering."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model_adapters.ops import registry
from model_adapters.ops.attention_args import AttentionArgs, unsupported_field
from model_adapters.ops.decode_attention import OP, write_token
from model_adapters.ops.gpu.hopper import NAME, PAGE_MULTIPLE, unsupported_reason
from model_adapters.ops.gpu.split_kv import LOG2_E, NOTHING, num_splits

MAX_GROUP = 64  # rows of a warp group's product
MAX_DIMS = 448  # keys and values together: two blocks of them, queries and sums fit into shared memory
SUPPORTED_ARGS = frozenset({"window", "softcap", "sinks"})
"""Fields of `AttentionArgs` that the kernel takes."""


def _combine(outs: jax.Array, logs: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Returns attention over all splits, ``float32[B, H, G, Dv]``.

    Args:
        outs: Attention over each split, ``float32[B, H, splits, G, Dv]``.
        logs: Logarithm to base 2 of each split's sum of weights, ``float32[B, H, splits, G]``.
        sinks: Logits ``[Hq]`` or None.
    """
    sink = None if sinks is None else sinks.astype(jnp.float32).reshape(1, outs.shape[1], 1, -1) * LOG2_E
    top = jnp.max(logs, axis=2, keepdims=True)
    top = top if sink is None else jnp.maximum(top, sink)
    weights = jnp.where(logs > NOTHING, jnp.exp2(logs - top), 0.0)
    total = jnp.sum(weights, axis=2, keepdims=True)
    total = total if sink is None else total + jnp.exp2(sink - top)
    weights = weights / jnp.where(total == 0, 1.0, total)
    return jnp.sum(outs * weights[..., None], axis=2)


def _unsupported_reason(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    starts: jax.Array,
    args: AttentionArgs,
) -> str | None:
    group, dims = q.shape[1] // pool.shape[1], (q.shape[2], v.shape[2])
    if (reason := unsupported_field(args, SUPPORTED_ARGS) or unsupported_reason(q, v, pool, page_table)) is not None:
        return reason
    if sum(dims) > MAX_DIMS:
        return f"keys of {dims[0]} and values of {dims[1]}; the kernel has shared memory for {MAX_DIMS} together"
    if group > MAX_GROUP:
        return f"{group} query heads read one kv head; the kernel has room for {MAX_GROUP}"
    return None


@registry.register(OP, NAME, ("gpu",), unsupported_reason=_unsupported_reason)
def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    starts: jax.Array,
    args: AttentionArgs,
) -> tuple[jax.Array, jax.Array]:
    """Writes the new tokens, by a scatter in place, and runs the kernel for Hopper."""
    # Imported on use: the lowering takes longer to import than all other ops together.
    from model_adapters.ops.gpu.mosaic_kernel import StageSizes, attend

    pool = write_token(k, v, pool, page_table, lens, args.kv_scales)
    batch, query_heads, dim = q.shape
    num_pages, heads, page, _ = pool.shape
    group, capacity = query_heads // heads, page_table.shape[1] * page
    reach = capacity if args.window is None else min(capacity, args.window)
    sizes = StageSizes(
        dim,
        v.shape[2],
        page,
        num_pages,
        page_table.shape[1],
        num_splits(batch * heads, reach),
        args.scale,
        args.window,
        args.softcap,
    )
    rows = jnp.pad(q.reshape(batch, heads, group, dim), ((0, 0), (0, 0), (0, -group % PAGE_MULTIPLE), (0, 0)))
    outs, logs = attend(rows, pool, page_table, lens, starts, sizes)
    out = _combine(outs[..., :group, :], logs[..., :group], args.sinks)
    return out.reshape(batch, query_heads, -1).astype(q.dtype), pool
