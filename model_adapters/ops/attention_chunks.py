"""Chunked attention as rows of plain causal attention, a row for each chunk.

In a layer with chunked attention (Llama 4) a token sees the tokens of its own chunk up to itself, and no others: what
a row of a paged attention op does, whose pages are those of the chunk alone. So no kernel needs to know chunks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model_adapters.ops.searchsorted import num_at_most


def decode_chunks(page_table: jax.Array, kv_lens: jax.Array, chunk: int, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Returns page table and length of the chunk of each sequence's last token.

    Args:
        page_table: int32[S, pages].
        kv_lens: int32[S], length of each sequence with its new token; 0 for an unused row.
        chunk: Tokens of a chunk, a multiple of `page_size`.
        page_size: Tokens of a page.

    Returns:
        int32[S, pages of a chunk] and int32[S].
    """
    index = jnp.maximum(kv_lens - 1, 0) // chunk
    rows = jnp.arange(len(kv_lens), dtype=jnp.int32)
    return _pages_of(page_table, rows, index, chunk // page_size), kv_lens - index * chunk


def chunks_of_step(
    page_table: jax.Array, kv_lens: jax.Array, cu_q_lens: jax.Array, num_tokens: int, chunk: int, page_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns page table, lengths and beginnings of the chunks of a step's new tokens.

    The tokens of a sequence may be in several chunks, which become rows in the order of their tokens. There is room for
    the most that a step can have: each sequence begins one, and each border of chunks inside of its tokens another one.

    Args:
        page_table: int32[S, pages].
        kv_lens: int32[S], length of each sequence with its new tokens; 0 for an unused row.
        cu_q_lens: int32[S + 1], where each sequence's tokens begin; the last entry is the end of all.
        num_tokens: Tokens of the step, with padding.
        chunk, page_size: As of `decode_chunks`.

    Returns:
        int32[R, pages of a chunk], int32[R] and int32[R + 1], of R rows; those behind the last chunk have no tokens.
    """
    num_seqs = len(kv_lens)
    first = kv_lens - jnp.diff(cu_q_lens)  # position of each sequence's first new token
    first_chunk = first // chunk
    num_chunks = jnp.where(kv_lens > 0, jnp.maximum(kv_lens - 1, 0) // chunk - first_chunk + 1, 0)
    ends = jnp.cumsum(num_chunks, dtype=jnp.int32)
    row = jnp.arange(2 * num_seqs + num_tokens // chunk, dtype=jnp.int32)
    is_used = row < ends[-1]
    seq = jnp.minimum(num_at_most(ends, row), num_seqs - 1)
    index = first_chunk[seq] + row - (ends - num_chunks)[seq]
    begin, end = jnp.maximum(first[seq], index * chunk), jnp.minimum(kv_lens[seq], (index + 1) * chunk)
    starts = jnp.where(is_used, cu_q_lens[seq] + begin - first[seq], cu_q_lens[-1])
    lens = jnp.where(is_used, end - index * chunk, 0)
    table = _pages_of(page_table, seq, jnp.where(is_used, index, 0), chunk // page_size)
    return table, lens, jnp.concatenate([starts, cu_q_lens[-1:]])


def _pages_of(page_table: jax.Array, rows: jax.Array, index: jax.Array, num_pages: int) -> jax.Array:
    """Returns the pages int32[R, num_pages] of chunk `index` of each row."""
    columns = index[:, None] * num_pages + jnp.arange(min(num_pages, page_table.shape[1]), dtype=jnp.int32)
    return page_table[rows[:, None], jnp.minimum(columns, page_table.shape[1] - 1)]
