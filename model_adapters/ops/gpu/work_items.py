"""The work of a call as items: a run of queries and the range of keys they see.

Programs on a GPU run in no order, so that an item holds all that one program of the kernel needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.ops.attention_args import AttentionArgs, last_seen
from model_adapters.ops.searchsorted import num_at_most

FIELDS = ("seq", "begin", "end", "shift", "low", "high", "prefix")


@dataclass(frozen=True)
class SplitKVItem:
    """Tokens ``[begin, end)`` of sequence `seq`, at positions ``token + shift``.

    The keys are positions ``[low, high)``, and ``[0, prefix)`` as far as that is below `high`.
    """

    seq: Any
    begin: Any
    end: Any
    shift: Any
    low: Any
    high: Any
    prefix: Any


def decode_items(lens: jax.Array, starts: jax.Array, capacity: int, window: int | None) -> jax.Array:
    """Returns items ``int32[B, fields]``: one query per row, at position ``lens - 1``.

    Rows hold `capacity` positions. `lens` and `starts` are ``int32[B]``.
    """
    rows = jnp.arange(lens.shape[0], dtype=jnp.int32)
    low = jnp.maximum(starts, 0)
    if window is not None:
        low = jnp.maximum(low, lens - window)
    return jnp.stack([rows, rows, rows + 1, lens - 1 - rows, low, jnp.minimum(lens, capacity), jnp.zeros_like(rows)], 1)


def ragged_items(
    num_tokens: int,
    block_len: int,
    capacity: int,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    args: AttentionArgs,
    alignment: int = 1,
) -> jax.Array:
    """Returns items ``int32[num_items, fields]`` that cover all tokens and padding.

    An item has at most `block_len` queries. Where a sequence begins at no multiple of `alignment`, its items are those
    of a sequence from the multiple before, so that no other item begins or ends between two multiples. Padding is one
    more sequence at negative positions: it sees nothing and gives zeros. The number of items is enough for any division
    of the tokens into sequences; unused items are empty. `kv_lens` is ``int32[S]``, `cu_q_lens` ``int32[S + 1]``.
    """
    prefix_lens, window = args.prefix_lens, args.window
    num_seqs = kv_lens.shape[0]
    ends = jnp.clip(jnp.append(cu_q_lens[1:], jnp.int32(num_tokens)), 0, num_tokens)
    begins = jnp.clip(jnp.append(cu_q_lens[:-1], cu_q_lens[-1]), 0, num_tokens)
    first = begins - begins % alignment
    num_blocks = jnp.where(ends > begins, -(-(ends - first) // block_len), 0)
    last = jnp.cumsum(num_blocks).astype(jnp.int32)  # blocks up to and with each sequence
    num_items = min(num_tokens, (num_tokens + (num_seqs + 1) * (block_len + alignment - 2)) // block_len)
    index = jnp.arange(num_items, dtype=jnp.int32)
    seq = num_at_most(last, index)
    is_used = seq <= num_seqs
    seq = jnp.minimum(seq, num_seqs)
    block = first[seq] + (index - last[seq] + num_blocks[seq]) * block_len
    begin = jnp.where(is_used, jnp.maximum(block, begins[seq]), num_tokens)
    end = jnp.where(is_used, jnp.minimum(block + block_len, ends[seq]), num_tokens)
    known = jnp.minimum(seq, num_seqs - 1)
    is_seq = seq < num_seqs
    shift = jnp.where(is_seq, kv_lens[known] - cu_q_lens[known + 1], -num_tokens)
    prefix = jnp.zeros_like(begin)
    if prefix_lens is not None:
        prefix = jnp.where(is_seq, jnp.clip(prefix_lens[known], 0, capacity), 0)
    high = jnp.maximum(end + shift, prefix)
    if (furthest := last_seen(args, begin, end)) is not None:
        high = jnp.maximum(high, furthest + 1)
    high = jnp.minimum(high, jnp.minimum(kv_lens[known], capacity))
    high = jnp.where(is_seq & (end > begin) & (end + shift > 0), high, 0)
    low = jnp.zeros_like(begin)
    if window is not None:
        low = jnp.maximum(begin + shift - window + 1, 0)
    return jnp.stack([known, begin, end, shift, low, high, prefix], 1)
