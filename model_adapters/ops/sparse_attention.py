"""Sparse attention on pages: an indexer takes tokens of each query, attention reads these.

An indexer (DeepSeek-AI 2025, DeepSeek-V3.2) has keys of its own, one for each token, in a pool of pages that shares its
page table with the pool of the layer's attention. `take_tokens` reads all of them; `sparse_attention` gathers as many
tokens for a query as are taken, however long its sequence is. Both are JAX's own operations on every platform and mesh.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.attention_args import AttentionArgs, unsupported_field
from model_adapters.ops.kv_pool import (
    check_arrays,
    check_int_array,
    checked_args,
    expect,
    quantize,
    softmax_times_values,
    split,
    token_positions,
)
from model_adapters.ops.paged_attention import block_len, by_block, padded
from model_adapters.ops.row_pages import write_token_rows

MAX_BATCH_BYTES = 64 << 20  # of what is gathered for queries that are computed at a time
NO_TOKEN = -1
SUPPORTED_ARGS = frozenset({"softcap", "sinks", "kv_scales", "value_begin"})
"""Fields of `AttentionArgs` that `sparse_attention` takes: a window is for `take_tokens`."""
EXACT = jax.lax.Precision.HIGHEST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """The sequences of a packed step, as the ops of pages take them.

    Attributes:
        page_table: int32[S, pages_per_seq].
        kv_lens: int32[S], length of each sequence with its new tokens; 0 for an unused row.
        cu_q_lens: int32[S + 1], where the tokens of each begin, and the number of tokens in use.
        is_decode: Every sequence has one new token, in the order of the rows: T = S.
    """

    page_table: jax.Array
    kv_lens: jax.Array
    cu_q_lens: jax.Array
    is_decode: bool = dataclasses.field(default=False, metadata={"static": True})

    def tokens(self, num_tokens: int) -> tuple[jax.Array, jax.Array]:
        """Returns sequence and position of each of T tokens, int32[T]; padding has position -1."""
        return token_positions(num_tokens, self.kv_lens, self.cu_q_lens)


def write_index_keys(keys: jax.Array, pool: jax.Array, rows: PackedRows) -> jax.Array:
    """Returns the pool of an indexer with the keys of the new tokens; in place if donated.

    Args:
        keys: ``[T, D]``.
        pool: ``[P, 1, page, W]`` of a float dtype, ``W >= D``.
        rows: The sequences of the step.

    Raises:
        InvalidArgumentError: shapes that do not fit together.
    """
    _check_index_pool("write_index_keys", pool, keys.shape[1])
    seqs, positions = rows.tokens(len(keys))
    return write_token_rows(pool, rows.page_table, seqs, positions, _to_width(keys[:, None].astype(pool.dtype), pool))


def take_tokens(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    rows: PackedRows,
    *,
    scale: float,
    num_taken: int,
    window: int | None = None,
) -> jax.Array:
    """Returns positions of the tokens that an indexer takes, int32[T, num_taken].

    The score of a token is ``sum over h of weights[h] * relu(scale * q[h] . key)``. A query takes the highest scores of
    the tokens that it sees: those up to its own, or the last `window` of them. Of equal scores it takes the first.
    Where it sees fewer tokens than are taken, and for padding, -1 stands in the other places.

    Args:
        q: ``float32[T, H, D]``.
        weights: ``float32[T, H]``.
        pool: ``[P, 1, page, W]``, with the keys of the new tokens.
        rows: The sequences of the step.
        scale: Factor of the products.
        num_taken: Number of tokens, at most that of the positions of a row of pages.
        window: Number of last positions that a query sees; None for all.

    Raises:
        InvalidArgumentError: shapes that do not fit together.
    """
    (num_tokens, heads, dim), capacity = q.shape, rows.page_table.shape[1] * pool.shape[2]
    _check_index_pool("take_tokens", pool, dim)
    expect("take_tokens", "weights of shape", (num_tokens, heads), weights.shape)
    if not 0 < num_taken <= capacity:
        raise InvalidArgumentError(f"take_tokens: expected num_taken within 1 .. {capacity}, got {num_taken}")

    def taken(q: jax.Array, weights: jax.Array, seq: jax.Array, positions: jax.Array) -> jax.Array:
        """Computes queries ``[n, H, D]`` of one sequence, at int32[n]."""
        pages = jnp.take(pool[:, 0], rows.page_table[seq], axis=0, mode="clip")
        scores = _index_scores(q, weights, pages.reshape(capacity, -1)[:, :dim], scale)
        behind = jnp.arange(capacity, dtype=jnp.int32) - positions[:, None]
        is_seen = (behind <= 0) & (positions < rows.kv_lens[seq])[:, None]
        if window is not None:
            is_seen &= behind > -window
        top, index = jax.lax.top_k(jnp.where(is_seen, scores, -jnp.inf), num_taken)
        return jnp.where(jnp.isneginf(top), NO_TOKEN, index)

    if rows.is_decode:
        seqs, positions = rows.tokens(num_tokens)
        num_rows = min(_num_at_once(capacity * (dim + heads + 1)), num_tokens)

        each = q[:, None], weights[:, None], seqs, positions[:, None]
        return jnp.asarray(jax.lax.map(lambda row: taken(*row)[0], each, batch_size=num_rows))
    length = block_len(num_tokens, heads, capacity)
    q, weights = padded(q, length), padded(weights, length)

    def one_block(seq: jax.Array, begin: jax.Array, positions: jax.Array) -> jax.Array:
        own_q, own_weights = (jax.lax.dynamic_slice_in_dim(x, begin, length) for x in (q, weights))
        return taken(own_q, own_weights, seq, positions)

    none = jnp.full((num_tokens, num_taken), NO_TOKEN, jnp.int32)
    return by_block(one_block, none, length, rows.kv_lens, rows.cu_q_lens)


def _index_scores(q: jax.Array, weights: jax.Array, keys: jax.Array, scale: float) -> jax.Array:
    """Returns float32[n, L] of queries ``[n, H, D]``, weights ``[n, H]`` and keys ``[L, D]``."""
    products = jnp.einsum("nhd,ld->nhl", q, keys.astype(jnp.float32), precision=EXACT)
    return jnp.einsum("nh,nhl->nl", weights, jax.nn.relu(products * scale), precision=EXACT)


def sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    rows: PackedRows,
    taken: jax.Array,
    args: AttentionArgs,
) -> tuple[jax.Array, jax.Array]:
    """Writes the new tokens and returns the attention of their queries to tokens of `taken`.

    Arrays are as in `paged_attention`. Slots that no query takes may hold anything, NaN included.

    Args:
        q: Queries ``[T, Hq, D]``.
        k: The new tokens' keys ``[T, H, D]``.
        v: The new tokens' values ``[T, H, Dv]``.
        pool: Pages ``[P, H, page, W]``. Donate it: it is updated in place.
        rows: The sequences of the step.
        taken: ``int32[T, n]``, positions that a query attends to; -1: none.
        args: Scale and features of the scores.

    Returns:
        ``[T, Hq, Dv]`` in q's dtype (softmax and sums in float32), zeros for queries that take nothing; and the pool.

    Raises:
        InvalidArgumentError: shapes that do not fit together, or a feature out of others than `SUPPORTED_ARGS`.
    """
    op = "sparse_attention"
    check_arrays(op, q, k, v, pool, rows.page_table, args)
    num_tokens, query_heads, dim = q.shape
    taken = check_int_array(op, "taken", taken, (num_tokens, taken.shape[-1]))
    args = checked_args(op, args, query_heads, rows.page_table.shape[0], num_tokens)
    if (reason := unsupported_field(args, SUPPORTED_ARGS)) is not None:
        raise InvalidArgumentError(f"{op}: expected {', '.join(sorted(SUPPORTED_ARGS))} alone: {reason}; leave it out")
    seqs, positions = rows.tokens(num_tokens)
    pool = write_token_rows(pool, rows.page_table, seqs, positions, _as_stored(k, args.written_values(v), pool, args))
    _, heads, page, width = pool.shape
    slots = pool.reshape(-1, width)
    sinks = None
    if args.sinks is not None:
        sinks = args.sinks.astype(jnp.float32).reshape(heads, query_heads // heads, 1)

    def one(query: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        own, at, seq = query
        is_taken = at != NO_TOKEN
        pages = rows.page_table[seq][jnp.clip(at // page, 0, rows.page_table.shape[1] - 1)]
        index = (pages * heads + jnp.arange(heads, dtype=jnp.int32)[:, None]) * page + at % page
        gathered = jnp.take(slots, index, axis=0, mode="clip")  # [H, n, W]
        keys, values = split(gathered, dim, args.value_columns(dim, v.shape[2]), args.kv_scales)
        by_head = own.astype(jnp.float32).reshape(heads, -1, dim)
        scores = jnp.einsum("hgd,hnd->hgn", by_head, keys, precision=EXACT) * args.scale
        if args.softcap is not None:
            scores = args.softcap * jnp.tanh(scores / args.softcap)
        out = softmax_times_values(scores, is_taken, values, is_taken[:, None], sinks)
        return out.reshape(query_heads, -1).astype(q.dtype)

    num_queries = min(_num_at_once(taken.shape[1] * (heads * width + query_heads)), num_tokens)
    return jax.lax.map(one, (q, taken, seqs), batch_size=num_queries), pool


def _num_at_once(num_numbers: int) -> int:
    """Returns how many queries, of which each takes so many numbers, are computed at a time."""
    return max(1, MAX_BATCH_BYTES // (4 * num_numbers))


def _as_stored(k: jax.Array, v: jax.Array, pool: jax.Array, args: AttentionArgs) -> jax.Array:
    """Returns keys and values ``[T, H, W]`` as the pool has them."""
    if args.kv_scales is not None:
        k, v = quantize(k, args.kv_scales.k, pool.dtype), quantize(v, args.kv_scales.v, pool.dtype)
    return _to_width(jnp.concatenate([k, v], axis=-1).astype(pool.dtype), pool)


def _to_width(tokens: jax.Array, pool: jax.Array) -> jax.Array:
    return jnp.pad(tokens, ((0, 0), (0, 0), (0, pool.shape[3] - tokens.shape[2])))


def _check_index_pool(op: str, pool: Any, dim: int) -> None:
    if pool.ndim != 4 or pool.shape[1] != 1 or pool.shape[3] < dim:
        raise InvalidArgumentError(f"{op}: expected a pool [pages, 1, page, {dim} or more], got {pool.shape}")
