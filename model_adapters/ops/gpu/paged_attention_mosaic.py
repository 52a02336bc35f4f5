"""Attention of ragged runs of new tokens for Hopper, through Pallas' Mosaic GPU lowering.

The new tokens are written first, by XLA, so that the kernel (`mosaic_prefill.py`) reads pages and nothing else. Items
cover all tokens once. They are cut at multiples of `TILE_ROWS` tokens, except where a sequence begins or ends
(`ragged_items`): queries are copied, and results stored, by tiles.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model_adapters.ops import registry
from model_adapters.ops.attention_args import AttentionArgs
from model_adapters.ops.gpu.hopper import NAME, PLATFORMS, unsupported_reason
from model_adapters.ops.gpu.work_items import ragged_items
from model_adapters.ops.kv_pool import token_positions, write_tokens_at
from model_adapters.ops.paged_attention import OP

MAX_HEADS = 8  # query heads of a tile: each has at least 8 of its 64 rows, a tile of shared memory


def _unsupported_reason(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    args: AttentionArgs,
) -> str | None:
    return unsupported_reason(q, v, pool, page_table, args)


def _num_heads(group: int) -> int:
    """Returns query heads of a tile: the largest power of two that divides `group`."""
    num_heads = MAX_HEADS
    while group % num_heads:
        num_heads //= 2
    return num_heads


@registry.register(OP, NAME, PLATFORMS, unsupported_reason=_unsupported_reason)
def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    args: AttentionArgs,
) -> tuple[jax.Array, jax.Array]:
    """Writes the new tokens, by a scatter in place, and runs the kernel for Hopper."""
    # Imported on use: the lowering takes longer to import than all other ops together.
    from model_adapters.ops.gpu.mosaic_prefill import NUM_GROUPS, TILE_ROWS, PrefillSizes, attend_runs

    seqs, positions = token_positions(q.shape[0], kv_lens, cu_q_lens)
    pool = write_tokens_at(pool, page_table, seqs, positions, k, v, args.kv_scales)
    num_tokens, query_heads, dim = q.shape
    num_pages, heads, page, _ = pool.shape
    sizes = PrefillSizes(
        dim,
        v.shape[2],
        page,
        num_pages,
        page_table.shape[1],
        _num_heads(query_heads // heads),
        args.scale,
        args.window,
        args.softcap,
    )
    block_len = NUM_GROUPS * sizes.num_queries
    num_padded = max(sizes.num_queries, num_tokens + -num_tokens % TILE_ROWS)
    q = jnp.pad(q, ((0, num_padded - num_tokens), (0, 0), (0, 0)))
    capacity = page_table.shape[1] * page
    items = ragged_items(num_tokens, block_len, capacity, kv_lens, cu_q_lens, args, TILE_ROWS)
    sinks = None if args.sinks is None else args.sinks.astype(jnp.float32)
    return attend_runs(items, q, pool, page_table, sinks, sizes)[:num_tokens], pool
