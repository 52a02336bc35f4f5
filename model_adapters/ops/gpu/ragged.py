"""Attention of ragged runs of new tokens on GPUs: prefill, chunks of one, and chunks mixed with rows that decode."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.ops import registry
from model_adapters.ops.gpu.calls import NAME, attend, compute_dtype, round_up_to_power, tile_for, why_not
from model_adapters.ops.gpu.flash import Features
from model_adapters.ops.gpu.items import ragged_items
from model_adapters.ops.paged_attention import OP, write_tokens

MIN_ROWS = 16  # of a product on tensor cores
MAX_ROWS = 128
MAX_SUMS = 128 * 128  # float32 numbers of all rows that 8 warps hold without spilling
MAX_FLOAT32_ROWS = 32  # such products are done by threads, with both operands in registers


def _num_rows(num_tokens: int, group: int, value_dim: int, dtype: Any) -> int:
    """Rows of a tile: as many as there is work and room for, no less than the query heads of one token."""
    most = MAX_FLOAT32_ROWS if dtype == jnp.float32 else MAX_ROWS
    while most > MIN_ROWS and (most >= 2 * num_tokens * group or most * value_dim > MAX_SUMS):
        most //= 2
    return max(most, round_up_to_power(group))


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
    pool = write_tokens(k, v, pool, page_table, kv_lens, cu_q_lens, k_scale, v_scale)
    num_tokens, group, capacity = q.shape[0], q.shape[1] // pool.shape[1], page_table.shape[1] * pool.shape[2]
    dtype = compute_dtype(q, pool)
    features = Features(dtype, scale, window, softcap, has_prefix=prefix_lens is not None)
    num_rows = _num_rows(num_tokens, group, v.shape[2], dtype)
    num_queries = num_rows // group
    items = ragged_items(num_tokens, num_queries, capacity, kv_lens, cu_q_lens, prefix_lens, window)
    reach = capacity if window is None or prefix_lens is not None else min(capacity, window + num_queries - 1)
    tile = tile_for(num_rows, num_queries, items.shape[0], pool, group, reach, q.shape[2], v.shape[2])
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
