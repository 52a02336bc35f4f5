"""Decode attention on GPUs: one query per row, the keys of a row cut into splits until the GPU is full."""

from __future__ import annotations

from typing import Any

import jax

from model_adapters.ops import registry
from model_adapters.ops.decode_attention import OP, write_token
from model_adapters.ops.gpu.calls import NAME, attend, compute_dtype, round_up_to_power, tile_for, why_not
from model_adapters.ops.gpu.flash import Features
from model_adapters.ops.gpu.items import decode_items

MIN_ROWS = 16  # of a product on tensor cores


def _refuses(
    q: jax.Array, k: jax.Array, v: jax.Array, pool: jax.Array, page_table: jax.Array, *args: Any, **kwargs: Any
) -> str | None:
    return why_not(q, v, pool, page_table)


@registry.register(OP, NAME, ("gpu",), refuses=_refuses)
def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    starts: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The op's Pallas kernel; the new token is written before, by a scatter of rows that XLA keeps in place."""
    pool = write_token(k, v, pool, page_table, lens, k_scale, v_scale)
    group, capacity = q.shape[1] // pool.shape[1], page_table.shape[1] * pool.shape[2]
    features = Features(compute_dtype(q, pool), scale, window, softcap, has_prefix=False)
    num_rows = max(MIN_ROWS, round_up_to_power(group))
    reach = capacity if window is None else min(capacity, window)
    tile = tile_for(num_rows, 1, q.shape[0], pool, group, reach, q.shape[2], v.shape[2])
    items = decode_items(lens, starts, capacity, window)
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
