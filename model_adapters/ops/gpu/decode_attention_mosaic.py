"""Decode attention for Hopper through Pallas' Mosaic GPU lowering.

The new tokens are written first, by XLA, so that the kernel (`mosaic_kernel.py`) reads pages and nothing else. Where
there are fewer rows and kv heads than the GPU has room for, the keys of a row are divided into splits; each gives its
attention and the logarithm of its sum of weights, by which they are combined.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from model_adapters.ops import registry
from model_adapters.ops.attention_args import AttentionArgs
from model_adapters.ops.decode_attention import OP, write_token
from model_adapters.ops.gpu.hopper import NAME, PLATFORMS, unsupported_reason
from model_adapters.ops.gpu.split_kv import LOG2_E, NOTHING, num_splits

MAX_GROUP = 64  # rows of a warp group's product
MAX_DIMS = 448  # keys and values together: two blocks of them, queries and sums fit into shared memory
MAX_UNROLLED = 16  # splits; XLA divides a kernel of more


def _combine(outs: jax.Array, logs: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Returns attention over all splits, ``float32[B, Hq, Dv]``.

    Args:
        outs: Attention over each split, ``float32[splits, B, Hq, Dv]``.
        logs: Logarithm to base 2 of each split's sum of weights, ``float32[splits, B, Hq]``.
        sinks: Logits ``float32[Hq]`` or None.
    """
    sink = None if sinks is None else sinks[:, None] * LOG2_E
    by_split = [(out, log[..., None]) for out, log in zip(outs, logs, strict=True)]
    if len(by_split) > MAX_UNROLLED:
        by_split = [(outs, logs[..., None])]
    # Of a few splits each by itself: then all of it is one kernel for XLA, where a reduction would be three.
    tops = [log if log.ndim == 3 else jnp.max(log, axis=0) for _, log in by_split]
    top = functools.reduce(jnp.maximum, tops if sink is None else [*tops, sink])
    weights = [jnp.where(log > NOTHING, jnp.exp2(log - top), 0.0) for _, log in by_split]
    products = [out * weight for (out, _), weight in zip(by_split, weights, strict=True)]
    if len(by_split) > 1:
        total, made = sum(weights[1:], weights[0]), sum(products[1:], products[0])
    else:
        total, made = jnp.sum(weights[0], axis=0), jnp.sum(products[0], axis=0)
    total = total if sink is None else total + jnp.exp2(sink - top)
    return made / jnp.where(total == 0, 1.0, total)


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
    if (reason := unsupported_reason(q, v, pool, page_table, args)) is not None:
        return reason
    if sum(dims) > MAX_DIMS:
        return f"keys of {dims[0]} and values of {dims[1]}; the kernel has shared memory for {MAX_DIMS} together"
    if group > MAX_GROUP:
        return f"{group} query heads read one kv head; the kernel has room for {MAX_GROUP}"
    return None


@registry.register(OP, NAME, PLATFORMS, unsupported_reason=_unsupported_reason)
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
        group,
        args.scale,
        args.window,
        args.softcap,
    )
    sinks = None if args.sinks is None else args.sinks.astype(jnp.float32)
    if sizes.num_splits == 1:
        return attend(q, pool, page_table, lens, starts, sinks, sizes)[0], pool
    outs, logs = attend(q, pool, page_table, lens, starts, None, sizes)
    logs = logs[..., :group].reshape(*logs.shape[:2], query_heads)
    return _combine(outs, logs, sinks).astype(q.dtype), pool
