"""Decode attention on GPUs: one query per row, keys in splits that fill the GPU.

The new tokens are written first, by XLA, so that the kernel (`triton_kernel.py`) reads pages and nothing else. A row is
an item of one query (`decode_items`); the query heads of a kv head are the rows of its products.
"""

from __future__ import annotations

import jax

from model_adapters.ops import registry
from model_adapters.ops.attention_args import AttentionArgs, unsupported_field
from model_adapters.ops.decode_attention import OP, write_token
from model_adapters.ops.gpu.launch import NAME, attend, features_of, least_rows, tile_for, unsupported_reason
from model_adapters.ops.gpu.work_items import decode_items

SUPPORTED_ARGS = frozenset({"window", "softcap", "sinks", "alibi_slopes", "kv_scales", "value_begin"})
"""Fields of `AttentionArgs` that the kernel takes for one query a row."""


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
    return unsupported_field(args, SUPPORTED_ARGS) or unsupported_reason(q, v, pool, page_table)


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
    """Writes the new tokens, by a scatter in place, and runs the Pallas kernel."""
    pool = write_token(k, args.written_values(v), pool, page_table, lens, args.kv_scales)
    capacity = page_table.shape[1] * pool.shape[2]
    features = features_of(q, pool, args)
    num_rows = least_rows(q.shape[1] // pool.shape[1])
    reach = capacity if args.window is None else min(capacity, args.window)
    tile = tile_for(num_rows, 1, q.shape[0], q, v, pool, reach)
    items = decode_items(lens, starts, capacity, args.window)
    out = attend(items, q, pool, page_table, args, value_dim=v.shape[2], features=features, tile=tile, name=OP)
    return out, pool
