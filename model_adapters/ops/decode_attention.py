"""Attention of one new token per row to a paged cache, with the write of that token's key and value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.ops import registry
from model_adapters.ops.cpu import ffi
from model_adapters.ops.kv_pool import (
    check_arrays,
    check_features,
    check_int_array,
    expect,
    softmax_times_values,
    split,
    write_tokens_at,
)

OP = "decode_attention"


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
    """Writes the new token of every row to the cache and attends its query to what the row can see.

    Args:
        q: Queries ``[B, Hq, D]``; query head ``i`` reads kv head ``i // (Hq // H)``.
        k: The new token's keys ``[B, H, D]``.
        v: The new token's values ``[B, H, Dv]``.
        pool: Pages ``[P, H, page, W]``, keys at ``[0:D]`` and values at ``[D:D+Dv]`` of the last axis
            (``W >= D + Dv``), of a float dtype or int8. Donate it: it is updated in place.
        page_table: ``int32[B, pages_per_seq]``, the page of each run of ``page`` positions. For one contiguous cache
            per row: ``P = B``, ``page`` the capacity, and ``arange(B)[:, None]``.
        lens: ``int32[B]``, the length of each row with its new token, which is written at position ``lens - 1``. A
            length beyond the row's pages writes nothing and attends to what they hold; 0 writes nothing, gives zeros.
        starts: ``int32[B]``, the first visible position (left padding).
        sinks: ``[Hq]`` logits that take part in the softmax and carry no value, or None.
        scale: Multiplies the products of queries and keys.
        window: Attend to the last `window` positions, the new one among them; None for all.
        softcap: Scores ``s`` become ``softcap * tanh(s / softcap)``; None for none.
        alibi: ``float32[Hq]`` slopes: ``slope * (key position - query position)`` is added to the scaled scores
            (Press et al., 2022); None for none. Not together with `softcap`.
        k_scale: ``float32[H]``, for an int8 pool alone: keys are stored as ``round(x / k_scale)`` within -127 .. 127.
        v_scale: ``float32[H]``, the same for values.

    Returns:
        ``[B, Hq, Dv]`` in q's dtype (softmax and sums in float32; zeros where ``lens <= starts``), and the pool.
        Page numbers outside the pool are not written to, and read as the nearest page.

    Raises:
        InvalidArgumentError: shapes that do not fit together, an int8 pool without scales or scales without one, a
            window or soft cap that is not positive, a soft cap together with alibi.
    """
    check_arrays(OP, q, k, v, pool, page_table, k_scale, v_scale)
    batch, query_heads, _ = q.shape
    expect(OP, "page_table rows", batch, page_table.shape[0])
    page_table = check_int_array(OP, "page_table", page_table, page_table.shape)
    lens = check_int_array(OP, "lens", lens, (batch,))
    starts = check_int_array(OP, "starts", starts, (batch,))
    check_features(OP, query_heads, sinks, window, softcap, alibi)
    out, pool = registry.call(
        OP,
        q,
        k,
        v,
        pool,
        page_table,
        lens,
        starts,
        sinks,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi=alibi,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return out, pool


def write_token(
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> jax.Array:
    """The pool with each row's new key and value at position ``lens - 1``; without one, nothing is written."""
    rows = jnp.arange(page_table.shape[0], dtype=jnp.int32)
    return write_tokens_at(pool, page_table, rows, lens.astype(jnp.int32) - 1, k, v, k_scale, v_scale)


@registry.define(OP, "one query per row on a paged cache, with the write of the new token")
def reference(
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
    """Gathers each row's pages and computes in float32; right for every shape, dtype and platform."""
    batch, query_heads, dim = q.shape
    heads = k.shape[1]
    pool = write_token(k, v, pool, page_table, lens, k_scale, v_scale)
    gathered = jnp.take(pool, page_table, axis=0, mode="clip")  # [B, pages, H, page, W]
    gathered = jnp.moveaxis(gathered, 2, 1).reshape(batch, heads, -1, pool.shape[3])
    keys, values = split(gathered, dim, v.shape[2], k_scale, v_scale)
    grouped = q.reshape(batch, heads, query_heads // heads, dim).astype(jnp.float32)
    scores = jnp.einsum("bhgd,bhsd->bhgs", grouped, keys, precision=jax.lax.Precision.HIGHEST) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    positions = jnp.arange(keys.shape[2], dtype=jnp.int32)
    if alibi is not None:
        behind = (positions - (lens[:, None] - 1)).astype(jnp.float32)  # [B, S]
        scores = scores + alibi.astype(jnp.float32).reshape(1, heads, -1, 1) * behind[:, None, None]
    first = starts if window is None else jnp.maximum(starts, lens - window)
    visible = (positions >= first[:, None]) & (positions < lens[:, None])  # [B, S]
    sink = None if sinks is None else sinks.astype(jnp.float32).reshape(1, heads, -1, 1)
    out = softmax_times_values(scores, visible[:, None, None], values, visible[:, None, :, None], sink)
    return out.reshape(batch, query_heads, -1).astype(q.dtype), pool


def _kernel_refuses(q: jax.Array, k: jax.Array, v: jax.Array, pool: jax.Array, *args: Any, **kwargs: Any) -> str | None:
    return ffi.refuses_attention(q, k, v, pool)


registry.register(OP, "cpu-ffi", ("cpu",), refuses=_kernel_refuses)(ffi.decode_attention)
