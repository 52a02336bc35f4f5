"""Attention to the last tokens and to entries of blocks, and what entries are made of, beside the same by numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sparse_attention import DIM, HEADS, PAGE, WIDTH, Case

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.attention_args import AttentionArgs
from model_adapters.ops.compressed_attention import (
    compressed_attention,
    last_rows_of_blocks,
    num_completed,
    write_entries,
)
from model_adapters.ops.sparse_attention import take_tokens, write_index_keys

RATES = [1, 2, 3, 4, 6, 8]
"""Of which some divide a page, and some are longer than one."""
BOTH = pytest.mark.parametrize("is_decode", [False, True])


def rows_of_entries(case, rate):
    return dataclasses.replace(case.rows, page_size=PAGE, row_len=rate)


def pool_of_entries(case, entries, rate):
    """Pages with the entries of blocks before the new tokens, NaN elsewhere; `entries` is [seq][block, dim]."""
    pool = np.full((31, 1, -(-PAGE // rate), WIDTH), np.nan, np.float32)
    for seq, own in enumerate(entries):
        for block in range((case.kv_lens[seq] - case.new[seq]) // rate):
            last = (block + 1) * rate - 1
            pool[case.table[seq, last // PAGE], 0, last % PAGE // rate, :DIM] = own[block]
    return jnp.array(pool)


def completed(case, rate):
    """Sequence and position of the last token of each block that the step completes."""
    return [(seq, at) for _, seq, at in case.queries() if (at + 1) % rate == 0]


def with_new_entries(case, entries, rate):
    pool, ends = pool_of_entries(case, entries, rate), completed(case, rate)
    given = np.full((num_completed(case.num_tokens, 5, rate), DIM), np.nan, np.float32)
    seqs, positions = np.zeros(len(given), np.int32), np.full(len(given), -1, np.int32)
    for number, (seq, at) in enumerate(ends):
        given[number], seqs[number], positions[number] = entries[seq][at // rate], seq, at
    write = jax.jit(write_entries)
    return write(*map(jnp.array, (given, pool)), rows_of_entries(case, rate), *map(jnp.array, (seqs, positions)))


@BOTH
@pytest.mark.parametrize("rate", RATES)
def test_tokens_of_completed_blocks(rate, is_decode):
    case = Case(is_decode=is_decode)
    stored = [case.numbers(length, 1, DIM) for length in case.kv_lens]
    pool = jax.jit(write_index_keys)(case.new_rows(stored)[:, 0], case.pool(stored, 1, WIDTH), case.rows)
    step = jax.jit(lambda pool, rows: last_rows_of_blocks(pool, rows, case.num_tokens, rate, 2 * rate))
    found, seqs, positions = step(pool, case.rows)
    ends = completed(case, rate)
    assert list(zip(seqs.tolist(), positions.tolist(), strict=True))[: len(ends)] == ends
    assert (positions[len(ends) :] == -1).all()
    for rows, (seq, at) in zip(np.asarray(found), ends, strict=False):
        expected = np.concatenate([np.zeros((2 * rate, DIM)), stored[seq][: at + 1, 0]])[-2 * rate :]
        np.testing.assert_array_equal(rows[:, :DIM], expected.astype(np.float32))


@BOTH
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("window", [3, 50])
@pytest.mark.parametrize("num_taken", [None, 2])
def test_attention_is_that_of_numpy(rate, window, num_taken, is_decode):
    case = Case(is_decode=is_decode, seed=rate)
    keys = [case.numbers(length, 1, DIM) for length in case.kv_lens]
    entries = [case.numbers(length // rate, DIM) for length in case.kv_lens]
    q, sinks = case.numbers(case.num_tokens, HEADS, DIM), case.numbers(HEADS)
    blocks, rows = with_new_entries(case, entries, rate), rows_of_entries(case, rate)
    scores = case.numbers(case.num_tokens, HEADS)
    taken = None
    if num_taken is not None:
        given = jnp.array(q), jnp.array(scores), blocks, rows
        take = jax.jit(lambda *arrays: take_tokens(*arrays, scale=0.5, num_taken=num_taken, block_size=rate))
        taken = take(*given)
    args = AttentionArgs(0.3, window, sinks=jnp.array(sinks))
    pages = case.pool(keys, 1, WIDTH)
    step = jax.jit(lambda *arrays: compressed_attention(*arrays, args))
    out, pages = step(jnp.array(q), case.new_rows(keys), pages, case.rows, blocks, rows, taken)
    is_query = np.zeros(case.num_tokens, bool)
    for token, seq, at in case.queries():
        own = entries[seq][: (at + 1) // rate]
        if num_taken is not None:
            index = scores[token] @ np.maximum(0.5 * q[token] @ own.T, 0)
            own = own[np.argsort(-index, kind="stable")[:num_taken]]
        values = np.concatenate([keys[seq][max(0, at + 1 - window) : at + 1, 0], own]).astype(np.float64)
        weights = np.exp(0.3 * q[token] @ values.T)
        expected = weights @ values / (weights.sum(1) + np.exp(sinks))[:, None]
        np.testing.assert_allclose(out[token], expected, rtol=2e-5, atol=1e-6)
        np.testing.assert_array_equal(pages[case.table[seq, at // PAGE], 0, at % PAGE, :DIM], keys[seq][at, 0])
        is_query[token] = True
    assert is_query.sum() >= 4 and (np.asarray(out)[~is_query] == 0).all()


def test_what_does_not_fit_is_refused():
    case = Case()
    q, keys = jnp.zeros((case.num_tokens, HEADS, DIM)), jnp.zeros((case.num_tokens, 1, DIM))
    pool = jnp.zeros((31, 1, PAGE, WIDTH))
    for args, message in (
        (AttentionArgs(1.0), "no window"),
        (AttentionArgs(1.0, 4, softcap=1.0), "softcap is not implemented"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            compressed_attention(q, keys, pool, case.rows, pool, rows_of_entries(case, 1), None, args)
    with pytest.raises(InvalidArgumentError, match="keys of shape"):
        compressed_attention(q, keys[:2], pool, case.rows, pool, rows_of_entries(case, 1), None, AttentionArgs(1.0, 4))
