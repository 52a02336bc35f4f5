"""Attention of ragged runs of new tokens on GPUs: prefill, chunks, and mixed steps.

The new tokens are written first, by XLA, so that the kernel (`triton_kernel.py`) reads pages and nothing else. Items
cover all tokens and the padding once (`ragged_items`), so that programs, which run in no order, write different rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model_adapters.ops import registry
from model_adapters.ops.attention_args import AttentionArgs, unsupported_field
from model_adapters.ops.gpu.launch import (
    NAME,
    attend,
    features_of,
    least_rows,
    max_queries,
    tile_for,
    unsupported_reason,
)
from model_adapters.ops.gpu.work_items import ragged_items
from model_adapters.ops.kv_pool import token_positions, write_tokens_at
from model_adapters.ops.paged_attention import OP

MAX_ROWS = 128  # rows of a tile, over a pool in 16 or 8 bits
MAX_FLOAT32_ROWS = 32  # over a pool in float32
MAX_TERM_ROWS = 16  # of float32 over a narrower pool
MAX_QUERIES = (
    128 * 128
)  # numbers in the queries of a tile that leave registers for a second program on the multiprocessor


def _num_rows(q: jax.Array, v: jax.Array, pool: jax.Array) -> int:
    """Returns rows of a tile: as many as there is work and room for.

    At least the query heads of one token.
    """
    group, dim = q.shape[1] // pool.shape[1], max(q.shape[2], v.shape[2])
    rows = MAX_ROWS
    if q.dtype == jnp.float32:
        rows = MAX_FLOAT32_ROWS if pool.dtype == jnp.float32 else MAX_TERM_ROWS
    room = min(MAX_QUERIES, max_queries(q))
    while rows > least_rows(group) and (rows >= 2 * q.shape[0] * group or rows * dim > room):
        rows //= 2
    return max(rows, least_rows(group))


SUPPORTED_ARGS = frozenset(
    {"window", "softcap", "sinks", "alibi_slopes", "prefix_lens", "kv_scales", "sees_until", "value_begin"}
)
"""Fields of `AttentionArgs` that the kernel takes for runs of queries."""


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
    return unsupported_field(args, SUPPORTED_ARGS) or unsupported_reason(q, v, pool, page_table)


@registry.register(OP, NAME, ("gpu",), unsupported_reason=_unsupported_reason)
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
    """Writes the new tokens, by a scatter in place, and runs the Pallas kernel."""
    seqs, positions = token_positions(q.shape[0], kv_lens, cu_q_lens)
    pool = write_tokens_at(pool, page_table, seqs, positions, k, args.written_values(v), args.kv_scales)
    capacity, num_rows = page_table.shape[1] * pool.shape[2], _num_rows(q, v, pool)
    num_queries = num_rows // (q.shape[1] // pool.shape[1])
    items = ragged_items(q.shape[0], num_queries, capacity, kv_lens, cu_q_lens, args)
    # A beginning that all queries see may be as far away as the pages reach, and so may the end of an image.
    window = args.window if args.prefix_lens is None and args.sees_until is None else None
    reach = capacity if window is None else min(capacity, window + num_queries - 1)
    features = features_of(q, pool, args)
    tile = tile_for(num_rows, num_queries, items.shape[0], q, v, pool, reach)
    out = attend(items, q, pool, page_table, args, value_dim=v.shape[2], features=features, tile=tile, name=OP)
    return out, pool
