"""Attention of one new token per row to a paged cache, with the write of that token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry, spmd
from model_adapters.ops.attention_args import AttentionArgs, KVScales, added_biases, unsupported_field
from model_adapters.ops.cpu import attention as kernels
from model_adapters.ops.kv_pool import (
    check_arrays,
    check_int_array,
    checked_args,
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
    args: AttentionArgs,
) -> tuple[jax.Array, jax.Array]:
    """Writes the new token of every row to the cache and returns the attention of its query.

    Args:
        q: Queries ``[B, Hq, D]``; query head ``i`` reads kv head ``i // (Hq // H)``.
        k: The new token's keys ``[B, H, D]``.
        v: The new token's values ``[B, H, Dv]``.
        pool: Pages ``[P, H, page, W]``, keys at ``[0:D]`` and values at ``[D:D+Dv]`` of the last axis
            (``W >= D + Dv``; see `AttentionArgs.value_begin`), of a float dtype or int8. Donate it: it is updated in
            place.
        page_table: ``int32[B, pages_per_seq]``, the page of each run of ``page`` positions. For one contiguous cache
            per row: ``P = B``, ``page`` the capacity, and ``arange(B)[:, None]``.
        lens: ``int32[B]``, the length of each row with its new token, which is written at position ``lens - 1``. A
            length beyond the row's pages writes nothing and attends to what they hold; 0 writes nothing and gives
            zeros, behind the last other row perhaps that one's result.
        starts: ``int32[B]``, the first visible position (left padding).
        args: Scale and features of the scores. With a window, a query also sees ``prefix_lens`` first positions.
            Not ``sees_until``: nothing is behind the newest token.

    Returns:
        ``[B, Hq, Dv]`` in q's dtype (softmax and sums in float32; zeros where ``lens <= starts``), and the pool.
        Page numbers outside the pool are not written to, and read as the nearest page.

    Raises:
        InvalidArgumentError: shapes that do not fit together, a pool in 8 bits without scales or scales without one, a
            window or soft cap that is not positive, a soft cap together with ALiBi.
    """
    check_arrays(OP, q, k, v, pool, page_table, args)
    batch, query_heads, _ = q.shape
    expect(OP, "page_table rows", batch, page_table.shape[0])
    page_table = check_int_array(OP, "page_table", page_table, page_table.shape)
    lens = check_int_array(OP, "lens", lens, (batch,))
    starts = check_int_array(OP, "starts", starts, (batch,))
    if args.sees_until is not None:
        raise InvalidArgumentError(f"{OP}: expected args without sees_until, got one; sees_until is not implemented")
    args = checked_args(OP, args, query_heads, batch, batch)
    out, pool = registry.call(OP, q, k, v, pool, page_table, lens, starts, args)
    return out, pool


def write_token(
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    kv_scales: KVScales | None = None,
) -> jax.Array:
    """Returns the pool with each row's new key and value at position ``lens - 1``.

    Rows of length 0 write nothing. Shapes are those of :func:`decode_attention`.
    """
    rows = jnp.arange(page_table.shape[0], dtype=jnp.int32)
    return write_tokens_at(pool, page_table, rows, lens.astype(jnp.int32) - 1, k, v, kv_scales)


@registry.define(OP, "one query per row on a paged cache, with the write of the new token")
def reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    starts: jax.Array,
    args: AttentionArgs,
) -> tuple[jax.Array, jax.Array]:
    """Gathers each row's pages and computes in float32.

    Supports every shape, dtype and platform.
    """
    batch, query_heads, dim = q.shape
    heads = k.shape[1]
    pool = write_token(k, args.written_values(v), pool, page_table, lens, args.kv_scales)
    gathered = jnp.take(pool, page_table, axis=0, mode="clip")  # [B, pages, H, page, W]
    gathered = jnp.moveaxis(gathered, 2, 1).reshape(batch, heads, -1, pool.shape[3])
    keys, values = split(gathered, dim, args.value_columns(dim, v.shape[2]), args.kv_scales)
    grouped = q.reshape(batch, heads, query_heads // heads, dim).astype(jnp.float32)
    scores = jnp.einsum("bhgd,bhsd->bhgs", grouped, keys, precision=jax.lax.Precision.HIGHEST) * args.scale
    if args.softcap is not None:
        scores = args.softcap * jnp.tanh(scores / args.softcap)
    positions = jnp.arange(keys.shape[2], dtype=jnp.int32)
    if args.alibi_slopes is not None:
        behind = (positions - (lens[:, None] - 1)).astype(jnp.float32)  # [B, S]
        scores = scores + args.alibi_slopes.astype(jnp.float32).reshape(1, heads, -1, 1) * behind[:, None, None]
    if args.distance_biases is not None:
        scores = scores + args.distance_biases.of(lens[:, None] - 1 - positions).reshape(scores.shape)
    if args.position_biases is not None:
        scores = added_biases(scores, args.position_biases)
    first = starts if args.window is None else jnp.maximum(starts, lens - args.window)
    visible = positions >= first[:, None]  # [B, S]
    if args.prefix_lens is not None:
        visible |= (positions < args.prefix_lens[:, None]) & (positions >= starts[:, None])
    visible &= positions < lens[:, None]
    sink = args.sinks if args.token_sinks is None else args.token_sinks
    sink = None if sink is None else sink.astype(jnp.float32).reshape(-1, heads, query_heads // heads, 1)
    out = softmax_times_values(scores, visible[:, None, None], values, visible[:, None, :, None], sink)
    return out.reshape(batch, query_heads, -1).astype(q.dtype), pool


def _kernel_unsupported_reason(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    starts: jax.Array,
    args: AttentionArgs,
) -> str | None:
    return unsupported_field(args, kernels.DECODE_ARGS) or kernels.attention_unsupported_reason(q, k, v, pool, args)


registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=_kernel_unsupported_reason)(kernels.decode_attention)
registry.register_module(OP, "gpu", "model_adapters.ops.gpu")
registry.register_module(OP, "tpu", "model_adapters.ops.tpu")
spmd.shard_by_heads(OP, ("q", "k", "v", "pool", "page_table", "lens", "starts"))
