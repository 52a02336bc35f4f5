"""The work of a ragged call as items: tokens of one sequence in one block.

Blocks of queries begin at multiples of their length on the packed axis of tokens, so that they are copied without
shifts; a sequence may begin anywhere in a block. Items are in the order of tokens, and every block has at least one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.ops.attention_args import AttentionArgs, last_seen
from model_adapters.ops.searchsorted import num_at_most
from model_adapters.ops.tpu.page_buffers import Blocks, following_of

FIELDS = ("begin", "end", "shift", "source", "low", "high", "prefix", "num_pieces", "following")


@dataclass(frozen=True)
class Item:
    """Tokens ``[begin, end)`` at positions ``token + shift``, and their keys.

    The keys are positions ``[low, high)``: `num_pieces` pieces, the first of them `source` in the flat page table; no
    piece if they see nothing. `following` is the next item with pieces.
    """

    begin: Any
    end: Any
    shift: Any
    source: Any
    low: Any
    high: Any
    prefix: Any
    num_pieces: Any
    following: Any


def items_of(
    num_tokens: int,
    block_len: int,
    blocks: Blocks,
    pages_per_seq: int,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    args: AttentionArgs,
) -> jax.Array:
    """Returns items ``int32[num_items, fields]``; `num_tokens` is a multiple of `block_len`.

    `kv_lens` is ``int32[S]``, `cu_q_lens` ``int32[S + 1]``.
    """
    prefix_lens, window = args.prefix_lens, args.window
    num_seqs = kv_lens.shape[0]
    cuts = jnp.concatenate([jnp.arange(0, num_tokens, block_len, dtype=jnp.int32), jnp.clip(cu_q_lens, 0, num_tokens)])
    begin = jnp.sort(cuts)
    end = jnp.append(begin[1:], jnp.int32(num_tokens))
    seq = num_at_most(cu_q_lens, begin) - 1
    known = jnp.clip(seq, 0, num_seqs - 1)
    shift = kv_lens[known] - cu_q_lens[known + 1]
    prefix = jnp.zeros_like(begin) if prefix_lens is None else prefix_lens[known]
    capacity = jnp.minimum(kv_lens[known], pages_per_seq * blocks.page)
    high = jnp.maximum(end + shift, prefix)
    if (furthest := last_seen(args, begin, end)) is not None:
        high = jnp.maximum(high, furthest + 1)
    high = jnp.minimum(high, capacity)
    low = jnp.zeros_like(begin)
    if window is not None:
        low = jnp.where(prefix > 0, 0, jnp.maximum(begin + shift - window + 1, 0))
    first = low // blocks.piece
    sees = (end > begin) & (seq == known) & (end + shift > 0) & (high > low)
    num_pieces = jnp.where(sees, -(-high // blocks.piece) - first, 0)
    source = known * (pages_per_seq * (blocks.page // blocks.piece)) + first
    return jnp.stack([begin, end, shift, source, low, high, prefix, num_pieces, following_of(num_pieces)], axis=1)
