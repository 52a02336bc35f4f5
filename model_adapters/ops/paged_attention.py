"""Attention of ragged runs of new tokens to a paged cache, with the write of the tokens.

For prefill, chunked prefill, and chunks mixed with rows that decode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from model_adapters.ops import registry, spmd
from model_adapters.ops.attention_args import AttentionArgs, DistanceBiases, KVScales, added_biases, unsupported_field
from model_adapters.ops.cpu import attention as kernels
from model_adapters.ops.kv_pool import (
    check_arrays,
    check_int_array,
    checked_args,
    softmax_times_values,
    split,
    token_positions,
    write_tokens_at,
)
from model_adapters.ops.searchsorted import num_at_most

OP = "paged_attention"
MAX_BLOCK_LEN = 64  # queries of the reference at a time
MAX_SCORES_BYTES = 64 << 20  # of one block of queries


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
    """Writes the new tokens to the cache and returns the attention of their queries.

    The query at position ``p`` of sequence ``s`` sees the keys ``j`` with ``p - window < j <= p``, and those with
    ``j < prefix_lens[s]`` or ``p <= j <= sees_until``; never one from ``kv_lens[s]`` on. Unused slots may hold
    anything, NaN included: no output depends on them. Page 0 is the null page: table entries that are not read may
    point at it.

    Args:
        q: Queries ``[T, Hq, D]``, the new tokens of S sequences one after the other; query head ``i`` reads kv head
            ``i // (Hq // H)``. Rows from ``cu_q_lens[S]`` on are padding: nothing is written for them, and their
            output is zero, or that of the row before them.
        k: The new tokens' keys ``[T, H, D]``.
        v: The new tokens' values ``[T, H, Dv]``.
        pool: Pages ``[P, H, page, W]``, keys at ``[0:D]`` and values at ``[D:D+Dv]`` of the last axis
            (``W >= D + Dv``; see `AttentionArgs.value_begin`), of a float dtype or int8. Donate it: it is updated in
            place.
        page_table: ``int32[S, pages_per_seq]``, the page of each run of ``page`` positions.
        kv_lens: ``int32[S]``, the length of each sequence with its new tokens; 0 for an unused row.
        cu_q_lens: ``int32[S + 1]``, ascending from 0: sequence ``s`` has the tokens ``cu_q_lens[s]`` to
            ``cu_q_lens[s + 1]``, the last of them at position ``kv_lens[s] - 1``. A token at a negative position or
            beyond the row's pages writes nothing; one at a negative position gives zeros.
        args: Scale and features of the scores.

    Returns:
        ``[T, Hq, Dv]`` in q's dtype (softmax and sums in float32), and the pool. Page numbers outside the pool are
        not written to, and read as the nearest page.

    Raises:
        InvalidArgumentError: shapes that do not fit together, a pool in 8 bits without scales or scales without one, a
            window or soft cap that is not positive, a soft cap together with ALiBi.
    """
    check_arrays(OP, q, k, v, pool, page_table, args)
    num_seqs = page_table.shape[0]
    page_table = check_int_array(OP, "page_table", page_table, page_table.shape)
    kv_lens = check_int_array(OP, "kv_lens", kv_lens, (num_seqs,))
    cu_q_lens = check_int_array(OP, "cu_q_lens", cu_q_lens, (num_seqs + 1,))
    args = checked_args(OP, args, q.shape[1], num_seqs, q.shape[0])
    out, pool = registry.call(OP, q, k, v, pool, page_table, kv_lens, cu_q_lens, args)
    return out, pool


def write_tokens(
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    kv_scales: KVScales | None = None,
) -> jax.Array:
    """Returns the pool with all new keys and values.

    Shapes and positions are those of :func:`paged_attention`.
    """
    seqs, positions = token_positions(k.shape[0], kv_lens, cu_q_lens)
    return write_tokens_at(pool, page_table, seqs, positions, k, v, kv_scales)


def block_len(num_tokens: int, query_heads: int, capacity: int) -> int:
    """Returns how many queries to compute at a time, a power of two.

    Their scores are within ``MAX_SCORES_BYTES`` if possible.
    """
    block = MAX_BLOCK_LEN
    while block > 1 and (block >= 2 * num_tokens or block * query_heads * capacity * 4 > MAX_SCORES_BYTES):
        block //= 2
    return block


def by_block(
    compute: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    out: jax.Array,
    length: int,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
) -> jax.Array:
    """Computes ``out[T, ...]`` in blocks of `length` tokens, each of one sequence.

    Args:
        compute: Returns ``[length, ...]`` of a sequence int32[], the number int32[] of a block's first token, and the
            positions int32[length] of its tokens, of which those from the end of the sequence on do not count.
        out: What tokens have that are in no sequence.
        length: Tokens of a block.
        kv_lens: ``int32[S]``.
        cu_q_lens: ``int32[S + 1]``, as in `paged_attention`.
    """
    num_tokens, num_seqs = out.shape[0], kv_lens.shape[0]
    q_lens = jnp.maximum(cu_q_lens[1:] - cu_q_lens[:-1], 0)
    num_blocks = -(-q_lens // length)  # of each sequence
    ends = jnp.cumsum(num_blocks)
    most = min(num_tokens, (num_tokens + num_seqs * (length - 1)) // length)  # however the tokens are shared out

    def one_block(block: jax.Array, out: jax.Array) -> jax.Array:
        seq = num_at_most(ends, block)
        begin = cu_q_lens[seq] + (block - ends[seq] + num_blocks[seq]) * length
        positions = kv_lens[seq] - cu_q_lens[seq + 1] + begin + jnp.arange(length, dtype=jnp.int32)
        # What is behind the end of a sequence the next one overwrites.
        return jax.lax.dynamic_update_slice_in_dim(out, compute(seq, begin, positions), begin, axis=0)

    def step(block: jax.Array, out: jax.Array) -> jax.Array:
        return jax.lax.cond(block < ends[-1], one_block, lambda _, out: out, block, out)

    return jax.lax.fori_loop(0, most, step, padded(out, length))[:num_tokens]


def padded(tokens: jax.Array, length: int) -> jax.Array:
    """Returns ``tokens[T, ...]`` and a block of zeros, without which a last slice is moved back."""
    return jnp.pad(tokens, ((0, length), *[(0, 0)] * (tokens.ndim - 1)))


@registry.define(OP, "runs of new queries on a paged cache, with the write of their keys and values")
def reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    args: AttentionArgs,
) -> tuple[jax.Array, jax.Array]:
    """Computes blocks of queries, each on the gathered pages of its sequence, in float32.

    Supports every shape, dtype and platform. Memory: scores of one block, keys and values of one sequence.
    """
    num_tokens, query_heads, _ = q.shape
    num_seqs, pages_per_seq = page_table.shape
    pool = write_tokens(k, args.written_values(v), pool, page_table, kv_lens, cu_q_lens, args.kv_scales)
    out = jnp.zeros((num_tokens, query_heads, v.shape[2]), q.dtype)
    if num_tokens == 0 or num_seqs == 0:
        return out, pool
    length = block_len(num_tokens, query_heads, pages_per_seq * pool.shape[2])
    q = padded(q, length)
    until = None if args.sees_until is None else padded(args.sees_until, length)
    biases = args.distance_biases
    weights = None if biases is None else padded(biases.weights, length)
    by_position = None if args.position_biases is None else padded(args.position_biases, length)
    token_sinks = None if args.token_sinks is None else padded(args.token_sinks, length)

    def one_block(seq: jax.Array, begin: jax.Array, positions: jax.Array) -> jax.Array:
        prefix_len = jnp.int32(0) if args.prefix_lens is None else args.prefix_lens[seq]
        queries = jax.lax.dynamic_slice_in_dim(q, begin, length)
        last = positions
        if until is not None:
            last = jnp.maximum(last, jax.lax.dynamic_slice_in_dim(until, begin, length))
        own = args
        if weights is not None and biases is not None:
            of_block = jax.lax.dynamic_slice_in_dim(weights, begin, length)
            own = dataclasses.replace(own, distance_biases=DistanceBiases(of_block, biases.profiles))
        if by_position is not None:
            own = dataclasses.replace(own, position_biases=jax.lax.dynamic_slice_in_dim(by_position, begin, length))
        if token_sinks is not None:
            own = dataclasses.replace(own, token_sinks=jax.lax.dynamic_slice_in_dim(token_sinks, begin, length))
        # Rows beyond the end of a sequence are zeros.
        return _attend(queries, pool, page_table[seq], (positions, last), kv_lens[seq], prefix_len, v.shape[2], own)

    return by_block(one_block, out, length, kv_lens, cu_q_lens), pool


def _attend(
    q: jax.Array,
    pool: jax.Array,
    pages: jax.Array,
    positions_and_last: tuple[jax.Array, jax.Array],
    kv_len: jax.Array,
    prefix_len: jax.Array,
    value_dim: int,
    args: AttentionArgs,
) -> jax.Array:
    """Returns attention ``[n, Hq, Dv]`` of queries ``q[n, Hq, D]`` of one sequence.

    `pages` are ``int32[pages_per_seq]``, positions and the last ones that they see ``int32[n]``. Queries at a negative
    position, or from `kv_len` on, give zeros.
    """
    positions, last = positions_and_last
    length, query_heads, dim = q.shape
    heads = pool.shape[1]
    group = query_heads // heads
    gathered = jnp.take(pool, pages, axis=0, mode="clip")  # [pages, H, page, W]
    gathered = jnp.moveaxis(gathered, 1, 0).reshape(heads, -1, pool.shape[3])
    keys, values = split(gathered, dim, args.value_columns(dim, value_dim), args.kv_scales)
    # The query heads of a group are further rows of one product with their kv head: [H, group * n, D].
    rows = jnp.moveaxis(q.reshape(length, heads, group, dim), 0, 2).reshape(heads, group * length, dim)
    exact = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("hrd,hsd->hrs", rows.astype(jnp.float32), keys, precision=exact) * args.scale
    if args.softcap is not None:
        scores = args.softcap * jnp.tanh(scores / args.softcap)
    at = jnp.arange(keys.shape[1], dtype=jnp.int32)
    behind = at - positions[:, None]  # [n, S]
    if args.alibi_slopes is not None:
        bias = args.alibi_slopes.astype(jnp.float32).reshape(heads, group, 1, 1) * behind.astype(jnp.float32)
        scores = scores + bias.reshape(scores.shape)
    if args.distance_biases is not None:
        bias = args.distance_biases.of(-behind).reshape(length, heads, group, -1)
        scores = scores + jnp.moveaxis(bias, 0, 2).reshape(scores.shape)
    if args.position_biases is not None:
        by_token = jnp.moveaxis(scores.reshape(heads, group, length, -1), 2, 0)
        scores = jnp.moveaxis(added_biases(by_token, args.position_biases), 0, 2).reshape(scores.shape)
    visible = at <= last[:, None]
    if args.window is not None:
        visible &= behind > -args.window
    exists = ((positions >= 0) & (positions < kv_len))[:, None]
    visible = (visible | (at < prefix_len)) & (at < kv_len) & exists
    sinks = args.sinks
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(heads, group), length, axis=1)[..., None]
    if args.token_sinks is not None:
        by_head = args.token_sinks.astype(jnp.float32).reshape(length, heads, group)
        sinks = jnp.moveaxis(by_head, 0, 2).reshape(heads, group * length, 1)
    seen = visible.any(axis=0)[None, :, None]
    out = softmax_times_values(scores, jnp.tile(visible, (group, 1)), values, seen, sinks)
    out = jnp.moveaxis(out.reshape(heads, group, length, value_dim), 2, 0)
    return out.reshape(length, query_heads, value_dim).astype(q.dtype)


def _kernel_unsupported_reason(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    args: AttentionArgs,
) -> str | None:
    return unsupported_field(args, kernels.PAGED_ARGS) or kernels.attention_unsupported_reason(q, k, v, pool, args)


registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=_kernel_unsupported_reason)(kernels.paged_attention)
registry.register_module(OP, "gpu", "model_adapters.ops.gpu")
registry.register_module(OP, "tpu", "model_adapters.ops.tpu")
spmd.shard_by_heads(OP, ("q", "k", "v", "pool", "page_table", "kv_lens", "cu_q_lens"), divides_tokens=True)
