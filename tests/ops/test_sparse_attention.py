"""Tokens that an indexer takes and attention to these alone, beside the same by numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import sparse_attention as sparse
from model_adapters.ops.attention_args import AttentionArgs, KVScales
from model_adapters.ops.sparse_attention import (
    PackedRows,
    last_rows,
    take_blocks,
    take_tokens,
    write_block_keys,
    write_index_keys,
)

PAGE, HEADS, DIM, WIDTH, TAKEN = 4, 3, 8, 12, 5
KV_LENS, NEW = [11, 3, 17, 0, 9], [6, 3, 1, 0, 2]
"""Chunks behind tokens, a whole prompt of fewer tokens than are taken, a row that decodes, an unused one."""
PADDING = 4


class Case:
    """Sequences with keys by position, their pages in any order, and what a step gets of them."""

    def __init__(self, *, is_decode=False, seed=0):
        self.rng = np.random.default_rng(seed)
        self.kv_lens = [max(n, 0) for n in KV_LENS]
        self.new = [min(1, n) for n in self.kv_lens] if is_decode else NEW
        self.is_decode = is_decode
        pages = self.rng.permutation(np.arange(1, 31)).reshape(5, 6)
        starts = np.arange(6) if is_decode else np.cumsum([0, *self.new])
        self.rows = PackedRows(*(jnp.array(x, jnp.int32) for x in (pages, self.kv_lens, starts)), is_decode=is_decode)
        self.table, self.num_tokens = pages, 5 if is_decode else sum(self.new) + PADDING

    def queries(self):
        """Token, sequence and position of each query."""
        token = 0
        for seq, (length, new) in enumerate(zip(self.kv_lens, self.new, strict=True)):
            for offset in range(new):
                yield token + offset, seq, length - new + offset
            token += 1 if self.is_decode else new

    def numbers(self, *shape):
        return self.rng.normal(size=shape).astype(np.float32)

    def pool(self, by_position, heads, width):
        """Pages with the tokens before the new ones, NaN elsewhere; `by_position` has [seq][position, heads, dim]."""
        pool = np.full((31, heads, PAGE, width), np.nan, np.float32)
        for seq, rows in enumerate(by_position):
            for at in range(self.kv_lens[seq] - self.new[seq]):
                pool[self.table[seq, at // PAGE], :, at % PAGE, : rows.shape[2]] = rows[at]
        return jnp.array(pool)

    def new_rows(self, by_position):
        """Rows of the new tokens, [T, heads, dim]."""
        rows = np.full((self.num_tokens, *by_position[0].shape[1:]), np.nan, np.float32)
        for token, seq, at in self.queries():
            rows[token] = by_position[seq][at]
        return jnp.array(rows)


def taken_by_numpy(case, q, weights, keys, window=None):
    found = np.full((case.num_tokens, TAKEN), -1)
    for token, seq, at in case.queries():
        first = 0 if window is None else max(0, at - window + 1)
        own = keys[seq][first : at + 1, 0]
        scores = weights[token] @ np.maximum(0.5 * q[token] @ own.T, 0)
        best = first + np.argsort(-scores, kind="stable")[:TAKEN]
        found[token, : len(best)] = best
    return found


@pytest.mark.parametrize("is_decode", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_an_indexer_takes_the_highest_scores(is_decode, window):
    case = Case(is_decode=is_decode)
    keys = [case.numbers(length, 1, DIM) for length in case.kv_lens]
    q, weights = case.numbers(case.num_tokens, HEADS, DIM), case.numbers(case.num_tokens, HEADS)
    pool = write_index_keys(case.new_rows(keys)[:, 0], case.pool(keys, 1, WIDTH), case.rows)
    found = take_tokens(jnp.array(q), jnp.array(weights), pool, case.rows, scale=0.5, num_taken=TAKEN, window=window)
    expected = taken_by_numpy(case, q, weights, keys, window)
    np.testing.assert_array_equal(np.sort(found, axis=1), np.sort(expected, axis=1))


def test_of_equal_scores_the_first_is_taken():
    case = Case()
    keys = [np.ones((length, 1, DIM), np.float32) for length in case.kv_lens]
    pool = write_index_keys(case.new_rows(keys)[:, 0], case.pool(keys, 1, WIDTH), case.rows)
    ones = jnp.ones((case.num_tokens, HEADS, DIM))
    found = take_tokens(ones, ones[..., 0], pool, case.rows, scale=0.5, num_taken=TAKEN)
    for token, _, at in case.queries():
        np.testing.assert_array_equal(found[token], [n if n <= at else -1 for n in range(TAKEN)])


def attended_by_numpy(case, q, keys, values, taken, scale, sinks=None, softcap=None):
    out = np.zeros((case.num_tokens, q.shape[1], values[0].shape[2]), np.float32)
    for token, seq, _ in case.queries():
        own = [n for n in taken[token] if n >= 0]
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // keys[0].shape[1])
            scores = scale * keys[seq][own, kv_head] @ q[token, head]
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            weights = np.exp(scores)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
            out[token, head] = weights @ values[seq][own, kv_head] / total
    return out


@pytest.mark.parametrize("is_decode", [False, True])
@pytest.mark.parametrize(
    ("heads", "features"),
    [(1, {}), (2, {}), (2, {"softcap": 3.0}), (1, {"sinks": True}), (1, {"value_begin": 2}), (1, {"kv_scales": True})],
)
def test_attention_to_the_taken_tokens_alone(is_decode, heads, features, monkeypatch):
    monkeypatch.setattr(sparse, "MAX_BATCH_BYTES", 1500)  # of several queries, of which one is left over
    case, features = Case(is_decode=is_decode, seed=1), dict(features)
    begin = features.get("value_begin")
    keys = [case.numbers(length, heads, DIM) for length in case.kv_lens]
    values = [x[..., begin : begin + 4] if begin else case.numbers(len(x), heads, 4) for x in keys]
    q = case.numbers(case.num_tokens, 4, DIM)
    taken = taken_by_numpy(case, case.numbers(case.num_tokens, 2, DIM), case.numbers(case.num_tokens, 2), keys)
    sinks, scales = None, (1.0, 1.0)
    if features.pop("sinks", False):
        sinks = case.numbers(4)
        features["sinks"] = jnp.array(sinks)
    stored = [x if begin else np.concatenate([x, y], axis=2) for x, y in zip(keys, values, strict=True)]
    pool = case.pool(stored, heads, WIDTH)
    if features.pop("kv_scales", False):
        scales = 0.02, 0.03
        features["kv_scales"] = KVScales(*(jnp.array([scale]) for scale in scales))
        keys, values = (
            [(np.rint(x / by).clip(-127, 127) * by).astype(np.float32) for x in rows]
            for rows, by in zip((keys, values), scales, strict=True)
        )
        by_column = np.repeat([*scales, 1.0], [DIM, 4, 0])
        pool = jnp.nan_to_num(jnp.rint(pool / by_column), nan=77).clip(-127, 127).astype(jnp.int8)
    args = AttentionArgs(0.3, **features)
    new = case.new_rows(keys), case.new_rows(values)
    attend = jax.jit(sparse.sparse_attention)
    out, written = attend(jnp.array(q), *new, pool, case.rows, jnp.array(taken, jnp.int32), args)
    wanted = attended_by_numpy(case, q, keys, values, taken, 0.3, sinks, features.get("softcap"))
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    for token, seq, at in case.queries():
        slot = np.asarray(written[case.table[seq, at // PAGE], :, at % PAGE], np.float32)
        np.testing.assert_allclose(slot[:, :DIM] * scales[0], new[0][token], atol=1e-6)


def test_what_does_not_fit_is_refused():
    case = Case()
    q, pool = jnp.zeros((case.num_tokens, HEADS, DIM)), jnp.zeros((31, 1, PAGE, WIDTH))
    with pytest.raises(InvalidArgumentError, match=r"num_taken within 1 \.\. 24, got 25"):
        take_tokens(q, q[..., 0], pool, case.rows, scale=1.0, num_taken=25)
    with pytest.raises(InvalidArgumentError, match="weights of shape"):
        take_tokens(q, q[:, :1, 0], pool, case.rows, scale=1.0, num_taken=2)
    with pytest.raises(InvalidArgumentError, match=r"expected a pool \[pages, 1, page, 8 or more\]"):
        write_index_keys(q[:, 0], pool[..., :4], case.rows)
    args, taken = AttentionArgs(1.0, window=3), jnp.zeros((case.num_tokens, 2), jnp.int32)
    with pytest.raises(InvalidArgumentError, match="window is not implemented; leave it out"):
        sparse.sparse_attention(q, q[:, :1], q[:, :1, :4], pool, case.rows, taken, args)


def as_block_keys(case, keys, size):
    """By sequence, what stands in the places of tokens: a block's key in that of its last one."""
    return [np.where((np.arange(len(own)) % size == size - 1)[:, None, None], own, np.nan) for own in keys]


@pytest.mark.parametrize("is_decode", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_an_indexer_takes_blocks_and_what_is_behind_them(size, is_decode):
    case = Case(is_decode=is_decode)
    keys = [case.numbers(length, 1, DIM) for length in case.kv_lens]
    q = case.numbers(case.num_tokens, HEADS, DIM)
    pool = case.pool(as_block_keys(case, keys, size), 1, WIDTH)
    pool = write_block_keys(case.new_rows(keys)[:, 0], pool, case.rows, size)
    found = take_blocks(jnp.array(q), pool, case.rows, num_blocks=2, block_size=size)
    assert found.shape == (case.num_tokens, 3 * size - 1)
    expected = np.full(found.shape, -1)
    for token, seq, at in case.queries():
        num = (at + 1) // size
        scores = np.maximum(q[token] @ keys[seq][size - 1 : num * size : size, 0].T, 0).sum(0)
        blocks = np.argsort(-scores, kind="stable")[:2]
        taken = [*(blocks[:, None] * size + np.arange(size)).reshape(-1), *range(num * size, at + 1)]
        expected[token, : len(taken)] = taken
    np.testing.assert_array_equal(np.sort(found, axis=1), np.sort(expected, axis=1))


@pytest.mark.parametrize("is_decode", [False, True])
def test_the_last_rows_of_each_token(is_decode):
    case = Case(is_decode=is_decode)
    stored = [case.numbers(length, 1, DIM) for length in case.kv_lens]
    pool = write_index_keys(case.new_rows(stored)[:, 0], case.pool(stored, 1, DIM), case.rows)
    found = np.asarray(last_rows(pool, case.rows, case.num_tokens, 3))
    for token, seq, at in case.queries():
        first = max(0, at - 2)
        np.testing.assert_array_equal(found[token, 3 - (at + 1 - first) :], stored[seq][first : at + 1, 0])
