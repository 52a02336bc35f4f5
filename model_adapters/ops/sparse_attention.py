"""Sparse attention on pages: an indexer takes tokens of each query, attention reads these.

An indexer (DeepSeek-AI 2025, DeepSeek-V3.2) has keys of its own, one for each token, in a pool of pages that shares its
page table with the pool of the layer's attention. `take_tokens` reads those of a sequence; `sparse_attention` gathers
as many tokens for a query as are taken, however long its sequence is. Both are JAX's own operations on every platform.
On a mesh each device has all pages of an indexer, and takes the tokens by itself; attention is divided by heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
    take_rows,
    token_positions,
)
from model_adapters.ops.paged_attention import block_len, by_block, padded
from model_adapters.ops.row_pages import write_token_rows
from model_adapters.ops.spmd import heads_on_each_device, replicated_on_mesh

MAX_BATCH_BYTES = 64 << 20  # of what is gathered for queries that are computed at a time
PART_LEN = 4096  # positions that are scored at a time, of as many as the longest sequence has
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
        page_size: Tokens of a page, if a row of a pool is of more than one of them.
        row_len: Tokens that a row of a pool is of.
    """

    page_table: jax.Array
    kv_lens: jax.Array
    cu_q_lens: jax.Array
    is_decode: bool = dataclasses.field(default=False, metadata={"static": True})
    page_size: int | None = dataclasses.field(default=None, metadata={"static": True})
    row_len: int = dataclasses.field(default=1, metadata={"static": True})

    def tokens(self, num_tokens: int) -> tuple[jax.Array, jax.Array]:
        """Returns sequence and position of each of T tokens, int32[T]; padding has position -1."""
        return token_positions(num_tokens, self.kv_lens, self.cu_q_lens)

    def num_positions(self, pool: jax.Array) -> int:
        """Returns how many tokens a row of the page table covers."""
        return int(self.page_table.shape[1] * (self.page_size or pool.shape[2]))

    def places(self, positions: jax.Array, pool: jax.Array) -> jax.Array:
        """Returns in which rows of `pool` tokens at `positions` stand; below 0 for negative ones."""
        if self.page_size is None:
            return positions
        return positions // self.page_size * pool.shape[2] + positions % self.page_size // self.row_len


@replicated_on_mesh
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
    return write_token_rows(pool, rows.page_table, seqs, positions, to_width(keys[:, None].astype(pool.dtype), pool))


@replicated_on_mesh
def take_tokens(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    rows: PackedRows,
    *,
    scale: float,
    num_taken: int,
    window: int | None = None,
    block_size: int = 1,
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
        block_size: Tokens that share a key, in the place of the last one. Results are numbers of blocks.

    Raises:
        InvalidArgumentError: shapes that do not fit together.
    """
    (num_tokens, heads, dim), capacity = q.shape, rows.num_positions(pool) // block_size
    _check_index_pool("take_tokens", pool, dim)
    expect("take_tokens", "weights of shape", (num_tokens, heads), weights.shape)
    if not 0 < num_taken <= capacity:
        raise InvalidArgumentError(f"take_tokens: expected num_taken within 1 .. {capacity}, got {num_taken}")
    part_len = min(capacity, PART_LEN)

    def taken(q: jax.Array, weights: jax.Array, tables: jax.Array, seen: jax.Array) -> jax.Array:
        # Queries ``[n, m, H, D]`` of n rows of pages, which see so many tokens int32[n, m].
        def scored(begin: jax.Array) -> tuple[jax.Array, jax.Array]:
            at = begin + jnp.arange(part_len, dtype=jnp.int32)
            keys = rows_at(pool, tables, rows.places((at + 1) * block_size - 1, pool)[None])
            is_seen = (at < seen[..., None]) & (at >= seen[..., None] - (window or capacity))
            return jnp.where(is_seen, _index_scores(q, weights, keys[..., :dim], scale), -jnp.inf), at

        return _best_of_parts(scored, -(-jnp.max(seen) // part_len), part_len, (*seen.shape, num_taken))

    if rows.is_decode:
        each = q[:, None], weights[:, None], rows.page_table, rows.kv_lens[:, None] // block_size
        return by_chunk(lambda *some: taken(*some)[:, 0], each, num_at_once(part_len * (dim + heads + 1)))
    length = block_len(num_tokens, heads, part_len)
    q, weights = padded(q, length), padded(weights, length)

    def one_block(seq: jax.Array, begin: jax.Array, positions: jax.Array) -> jax.Array:
        own_q, own_weights = (jax.lax.dynamic_slice_in_dim(x, begin, length)[None] for x in (q, weights))
        seen = jnp.where(positions < rows.kv_lens[seq], (positions + 1) // block_size, 0)
        return taken(own_q, own_weights, rows.page_table[seq][None], seen[None])[0]

    none = jnp.full((num_tokens, num_taken), NO_TOKEN, jnp.int32)
    return by_block(one_block, none, length, rows.kv_lens, rows.cu_q_lens)


def take_blocks(q: jax.Array, pool: jax.Array, rows: PackedRows, *, num_blocks: int, block_size: int) -> jax.Array:
    """Returns positions of the blocks that an indexer takes, and of last tokens, int32[T, n].

    A query takes `num_blocks` of the blocks that it sees all tokens of, and the tokens behind these, so that n is
    ``(num_blocks + 1) * block_size - 1``; -1 stands in other places. See `take_tokens`; every head has a weight of one.

    Args:
        q: ``float32[T, H, D]``.
        pool: ``[P, 1, page, W]``, with the keys of blocks in the places of their last tokens.
        rows: The sequences of the step.
        num_blocks: Number of blocks.
        block_size: Tokens of a block.

    Raises:
        InvalidArgumentError: shapes that do not fit together.
    """
    weights = jnp.ones(q.shape[:2], jnp.float32)
    blocks = take_tokens(q, weights, pool, rows, scale=1.0, num_taken=num_blocks, block_size=block_size)
    inside = blocks[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)
    inside = jnp.where(blocks[..., None] == NO_TOKEN, NO_TOKEN, inside).reshape(len(q), -1)
    seen = rows.tokens(len(q))[1][:, None] + 1
    last = seen // block_size * block_size + jnp.arange(block_size - 1, dtype=jnp.int32)
    return jnp.concatenate([inside, jnp.where(last < seen, last, NO_TOKEN)], axis=1)


@replicated_on_mesh
def last_rows(pool: jax.Array, rows: PackedRows, num_tokens: int, count: int) -> jax.Array:
    """Returns what the last `count` tokens have, each new token's own last, ``[T, count, W]``.

    In places in front of a sequence anything stands. The pool is ``[P, 1, page, W]``.
    """
    seqs, positions = rows.tokens(num_tokens)
    places = positions[:, None] - jnp.arange(count - 1, -1, -1, dtype=jnp.int32)
    return rows_at(pool, rows.page_table[seqs], places)


@replicated_on_mesh
def write_block_keys(keys: jax.Array, pool: jax.Array, rows: PackedRows, block_size: int) -> jax.Array:
    """Returns the pool with the keys of blocks, in the places of new tokens that complete them.

    `keys` are ``[T, D]``, of which those of other tokens are not used; the pool is that of `write_index_keys`.
    """
    _check_index_pool("write_block_keys", pool, keys.shape[1])
    seqs, positions = rows.tokens(len(keys))
    positions = jnp.where((positions + 1) % block_size == 0, positions, NO_TOKEN)
    return write_token_rows(pool, rows.page_table, seqs, positions, to_width(keys[:, None].astype(pool.dtype), pool))


def rows_at(pool: jax.Array, tables: jax.Array, places: jax.Array) -> jax.Array:
    """Returns rows ``[n, L, W]`` of the pool at places int32[n or 1, L] of n rows of pages.

    Of places that there are not, it returns any others.
    """
    page, places = pool.shape[2], jnp.broadcast_to(places, (len(tables), places.shape[1]))
    pages = jnp.take_along_axis(tables, jnp.clip(places // page, 0, tables.shape[1] - 1), axis=1)
    return take_rows(pool.reshape(-1, pool.shape[3]), pages * page + places % page)


def _best_of_parts(
    scored: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    num_parts: jax.Array,
    part_len: int,
    shape: tuple[int, ...],
) -> jax.Array:
    """Returns the positions int32[n, m, k] of the highest scores; -1 where there are fewer.

    `scored` returns scores ``[n, m, L]`` and positions int32[L] of `part_len` positions from the given one on.
    """

    def with_part(number: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        scores, at = scored(number * part_len)
        # Those of earlier parts come first: of equal scores `top_k` takes the first.
        top, which = jax.lax.top_k(jnp.concatenate([best[0], scores], axis=-1), shape[-1])
        places = jnp.concatenate([best[1], jnp.broadcast_to(at, scores.shape)], axis=-1)
        return top, jnp.take_along_axis(places, which, axis=-1)

    nothing = jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, NO_TOKEN, jnp.int32)
    top, best = jax.lax.fori_loop(0, num_parts, with_part, nothing)
    return jnp.where(jnp.isneginf(top), NO_TOKEN, best)


def _index_scores(q: jax.Array, weights: jax.Array, keys: jax.Array, scale: float) -> jax.Array:
    """Returns float32[n, m, L] of q ``[n, m, H, D]``, weights ``[n, m, H]``, keys ``[n, L, D]``."""
    products = jnp.einsum("nmhd,nld->nmhl", q, keys.astype(jnp.float32), precision=EXACT)
    return jnp.einsum("nmh,nmhl->nml", weights, jax.nn.relu(products * scale), precision=EXACT)


@heads_on_each_device(("q", "k", "v", "pool", "rows", "taken"))
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
    sinks = None
    if args.sinks is not None:
        sinks = args.sinks.astype(jnp.float32).reshape(heads, query_heads // heads, 1)

    def some(queries: jax.Array, at: jax.Array, seqs: jax.Array) -> jax.Array:
        """Computes ``[n, Hq, Dv]`` of n queries, their tokens int32[n, m] and sequences int32[n]."""
        num = len(queries)
        columns = jnp.clip(at // page, 0, rows.page_table.shape[1] - 1)
        pages = jnp.take_along_axis(rows.page_table[seqs], columns, axis=1)[:, None]
        index = (pages * heads + jnp.arange(heads, dtype=jnp.int32)[:, None]) * page + (at % page)[:, None]
        gathered = take_rows(pool.reshape(-1, width), index.reshape(num * heads, -1)).reshape(num, heads, -1, width)
        keys, values = split(gathered, dim, args.value_columns(dim, v.shape[2]), args.kv_scales)
        by_head = queries.astype(jnp.float32).reshape(num, heads, -1, dim)
        scores = jnp.einsum("qhgd,qhnd->qhgn", by_head, keys, precision=EXACT) * args.scale
        if args.softcap is not None:
            scores = args.softcap * jnp.tanh(scores / args.softcap)
        visible = (at != NO_TOKEN)[:, None, None]
        out = softmax_times_values(scores, visible, values, visible[..., 0, :, None], sinks)
        return out.reshape(num, query_heads, -1).astype(q.dtype)

    num_queries = num_at_once(taken.shape[1] * (heads * width + query_heads))
    return by_chunk(some, (q, taken, seqs), num_queries), pool


def by_chunk(function: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], length: int) -> jax.Array:
    """Computes ``function(*arrays)`` of at most `length` rows at a time, of arrays ``[T, ...]``."""
    num_rows = len(arrays[0])
    if num_rows <= length:
        return function(*arrays)
    filled = (jnp.pad(x, ((0, -num_rows % length), *[(0, 0)] * (x.ndim - 1))) for x in arrays)
    chunks = tuple(x.reshape(-1, length, *x.shape[1:]) for x in filled)
    out: jax.Array = jax.lax.map(lambda chunk: function(*chunk), chunks)
    return out.reshape(-1, *out.shape[2:])[:num_rows]


def num_at_once(num_numbers: int) -> int:
    """Returns how many queries, of which each takes so many numbers, are computed at a time."""
    return max(1, MAX_BATCH_BYTES // (4 * num_numbers))


def _as_stored(k: jax.Array, v: jax.Array, pool: jax.Array, args: AttentionArgs) -> jax.Array:
    """Returns keys and values ``[T, H, W]`` as the pool has them."""
    if args.kv_scales is not None:
        k, v = quantize(k, args.kv_scales.k, pool.dtype), quantize(v, args.kv_scales.v, pool.dtype)
    return to_width(jnp.concatenate([k, v], axis=-1).astype(pool.dtype), pool)


def to_width(tokens: jax.Array, pool: jax.Array) -> jax.Array:
    """Returns ``tokens[T, H, D]`` with zeros behind, as wide as the rows of the pool."""
    return jnp.pad(tokens, ((0, 0), (0, 0), (0, pool.shape[3] - tokens.shape[2])))


def _check_index_pool(op: str, pool: Any, dim: int) -> None:
    if pool.ndim != 4 or pool.shape[1] != 1 or pool.shape[3] < dim:
        raise InvalidArgumentError(f"{op}: expected a pool [pages, 1, page, {dim} or more], got {pool.shape}")
