"""Attention to the last tokens and to entries that compress blocks, on pages (DeepSeek-V4).

What an entry is made of has pages of its own, of which a sequence keeps the last; an entry has a row of another pool,
whose pages have a row for each block. Both share their page tables' layout with the layer's own pages. All are JAX's
own operations on every platform. On a mesh each device has all pages; attention is divided by heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.attention_args import AttentionArgs, unsupported_field
from model_adapters.ops.kv_pool import expect, softmax_times_values
from model_adapters.ops.row_pages import write_token_rows
from model_adapters.ops.sparse_attention import (
    EXACT,
    NO_TOKEN,
    PackedRows,
    by_chunk,
    num_at_once,
    rows_at,
    to_width,
)
from model_adapters.ops.spmd import heads_on_each_device, replicated_on_mesh

SUPPORTED_ARGS = frozenset({"window", "sinks"})
"""Fields of `AttentionArgs` that `compressed_attention` takes."""


def num_completed(num_tokens: int, num_seqs: int, rate: int) -> int:
    """Returns how many blocks of `rate` tokens the new tokens of a step can complete at most."""
    return min(num_tokens, num_tokens // rate + num_seqs)


@replicated_on_mesh
def last_rows_of_blocks(
    pool: jax.Array, rows: PackedRows, num_tokens: int, rate: int, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what the last `count` tokens of completed blocks have.

    Args:
        pool: ``[P, 1, page, W]``, with a row of each token.
        rows: The sequences of the step.
        num_tokens: T.
        rate: Tokens of a block.
        count: Tokens that are wanted, at least `rate`.

    Returns:
        Rows ``[M, count, W]``, zeros in front of a sequence; sequences int32[M] and positions int32[M] of the last
        tokens of the blocks, -1 behind all blocks, whose number M bounds (`num_completed`).
    """
    seqs, positions = rows.tokens(num_tokens)
    most = num_completed(num_tokens, len(rows.kv_lens), rate)
    is_last = (positions >= 0) & ((positions + 1) % rate == 0)
    (token,) = jnp.nonzero(is_last, size=most, fill_value=num_tokens)
    at = jnp.where(token < num_tokens, jnp.take(positions, token, mode="clip"), NO_TOKEN)
    seq = jnp.take(seqs, token, mode="clip")
    places = at[:, None] - jnp.arange(count - 1, -1, -1, dtype=jnp.int32)
    found = rows_at(pool, rows.page_table[seq], places)
    return jnp.where((places >= 0)[..., None], found, 0), seq, at


@replicated_on_mesh
def write_entries(
    entries: jax.Array, pool: jax.Array, rows: PackedRows, seqs: jax.Array, positions: jax.Array
) -> jax.Array:
    """Returns the pool with the entries ``[M, D]`` of blocks; in place if donated.

    Args:
        entries: ``[M, D]``.
        pool: ``[P, 1, rows, W]``.
        rows: The sequences of the step, with the tokens of a row of the pool.
        seqs: ``int32[M]``.
        positions: ``int32[M]``, of the last token of each block; a negative one writes nothing.
    """
    tokens = to_width(entries[:, None].astype(pool.dtype), pool)
    return write_token_rows(pool, rows.page_table, seqs, rows.places(positions, pool), tokens)


@heads_on_each_device(("q", "k", "pool", "rows", "entries", "entry_rows", "taken"))
def compressed_attention(
    q: jax.Array,
    keys: jax.Array,
    pool: jax.Array,
    rows: PackedRows,
    entries: jax.Array,
    entry_rows: PackedRows,
    taken: jax.Array | None,
    args: AttentionArgs,
) -> tuple[jax.Array, jax.Array]:
    """Writes the new tokens and returns attention to the last tokens and to entries.

    Keys are values. Slots that no query sees may hold anything, NaN included.

    Args:
        q: Queries ``[T, Hq, D]``.
        keys: The new tokens' keys ``[T, 1, D]``.
        pool: Pages ``[P, 1, page, W]`` of tokens. Donate it: it is updated in place.
        rows: The sequences of the step, with the pages of `pool`.
        entries: Pages ``[P, 1, rows, W]`` of entries, with those of completed blocks.
        entry_rows: The sequences of the step, with the pages of `entries`.
        taken: ``int32[T, n]``, numbers of the blocks whose entries a query sees, -1: none; None: those of all blocks
            that it sees all tokens of.
        args: Scale, window and sinks.

    Returns:
        ``[T, Hq, D]`` in q's dtype (softmax and sums in float32), and the pool.

    Raises:
        InvalidArgumentError: shapes that do not fit together, no window, or a feature out of others than
            `SUPPORTED_ARGS`.
    """
    op, (num_tokens, heads, dim) = "compressed_attention", q.shape
    expect(op, "keys of shape", (num_tokens, 1, dim), keys.shape)
    if (reason := unsupported_field(args, SUPPORTED_ARGS)) is not None or args.window is None:
        raise InvalidArgumentError(f"{op}: expected a window, perhaps sinks, and nothing else: {reason or 'no window'}")
    seqs, positions = rows.tokens(num_tokens)
    tokens = to_width(keys.astype(pool.dtype), pool)
    pool = write_token_rows(pool, rows.page_table, seqs, positions, tokens)
    rate = entry_rows.row_len
    if taken is None:
        blocks = jnp.arange(entry_rows.num_positions(entries) // rate, dtype=jnp.int32)
        taken = jnp.where(blocks < ((positions + 1) // rate)[:, None], blocks, NO_TOKEN)
    back = jnp.arange(min(args.window, rows.num_positions(pool)), dtype=jnp.int32)
    sinks = None if args.sinks is None else args.sinks.astype(jnp.float32)[:, None]

    def some(queries: jax.Array, taken: jax.Array, seqs: jax.Array, positions: jax.Array) -> jax.Array:
        """Computes ``[n, Hq, D]`` of n queries, which see entries int32[n, m]."""
        at = positions[:, None] - back
        places = entry_rows.places((taken + 1) * rate - 1, entries)
        found = rows_at(pool, rows.page_table[seqs], at), rows_at(entries, entry_rows.page_table[seqs], places)
        values = jnp.concatenate([each[..., :dim].astype(jnp.float32) for each in found], axis=1)
        visible = jnp.concatenate([at >= 0, taken != NO_TOKEN], axis=1)
        scores = jnp.einsum("qhd,qnd->qhn", queries.astype(jnp.float32), values, precision=EXACT) * args.scale
        return softmax_times_values(scores, visible[:, None], values, visible[..., None], sinks).astype(q.dtype)

    num_queries = num_at_once((len(back) + taken.shape[1]) * (dim + heads))
    return by_chunk(some, (q, taken, seqs, positions), num_queries), pool
