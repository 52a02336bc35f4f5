"""Decode attention on GPUs: one query per row, the keys of a row cut into splits until the GPU is full."""

from __future__ import annotations

from typing import Any

import jax

from model_adapters.ops import registry
from model_adapters.ops.decode_attention import OP, write_token
from model_adapters.ops.gpu.launch import NAME, attend, features_of, least_rows, tile_for, why_not
from model_adapters.ops.gpu.work_items import decode_items


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
    capacity = page_table.shape[1] * pool.shape[2]
    features = features_of(q, pool, scale=scale, window=window, softcap=softcap, has_prefix=False)
    num_rows = least_rows(q.shape[1] // pool.shape[1])
    tile = tile_for(num_rows, 1, q.shape[0], q, v, pool, capacity if window is None else min(capacity, window))
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
