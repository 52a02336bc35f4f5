"""Attention of ragged runs of new tokens on GPUs: prefill, chunks of one, and chunks mixed with rows that decode."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.ops import registry
from model_adapters.ops.gpu.launch import NAME, attend, features_of, least_rows, max_queries, tile_for, why_not
from model_adapters.ops.gpu.work_items import ragged_items, token_places
from model_adapters.ops.kv_pool import write_tokens_at
from model_adapters.ops.paged_attention import OP

MAX_ROWS = 128
MAX_FLOAT32_ROWS = 32  # over a pool in float32
MAX_TERM_ROWS = 16  # of float32 over a narrower pool
MAX_QUERIES = 128 * 128  # numbers in the queries of a tile that leave room for another program beside this one


def _num_rows(q: jax.Array, v: jax.Array, pool: jax.Array) -> int:
    """Rows of a tile: as many as there is work and room for, no less than the query heads of one token."""
    group, dim = q.shape[1] // pool.shape[1], max(q.shape[2], v.shape[2])
    rows = MAX_ROWS
    if q.dtype == jnp.float32:
        rows = MAX_FLOAT32_ROWS if pool.dtype == jnp.float32 else MAX_TERM_ROWS
    room = min(MAX_QUERIES, max_queries(q))
    while rows > least_rows(group) and (rows >= 2 * q.shape[0] * group or rows * dim > room):
        rows //= 2
    return max(rows, least_rows(group))


def _refuses(
    q: jax.Array, k: jax.Array, v: jax.Array, pool: jax.Array, page_table: jax.Array, *args: Any, **kwargs: Any
) -> str | None:
    return why_not(q, v, pool, page_table)


@registry.register(OP, NAME, ("gpu",), refuses=_refuses)
def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi: jax.Array | None = None,
    prefix_lens: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The op's Pallas kernel; new tokens are written before, by a scatter of rows that XLA keeps in place."""
    seqs, positions = token_places(q.shape[0], kv_lens, cu_q_lens)
    pool = write_tokens_at(pool, page_table, seqs, positions, k, v, k_scale, v_scale)
    capacity, num_rows = page_table.shape[1] * pool.shape[2], _num_rows(q, v, pool)
    num_queries = num_rows // (q.shape[1] // pool.shape[1])
    features = features_of(q, pool, scale=scale, window=window, softcap=softcap, has_prefix=prefix_lens is not None)
    items = ragged_items(q.shape[0], num_queries, capacity, kv_lens, cu_q_lens, prefix_lens, window)
    reach = capacity if window is None or prefix_lens is not None else min(capacity, window + num_queries - 1)
    tile = tile_for(num_rows, num_queries, items.shape[0], q, v, pool, reach)
    out = attend(
        items,
        q,
        pool,
        page_table,
        sinks,
        alibi,
        k_scale,
        v_scale,
        value_dim=v.shape[2],
        features=features,
        tile=tile,
        name=OP,
    )
    return out, pool
