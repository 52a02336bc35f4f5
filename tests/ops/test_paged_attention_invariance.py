"""What a token gets from the C++ kernel is the same to the last bit, whatever it is computed beside."""

import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_oracle import paged_case
from thorough import pairs

from model_adapters.ops import decode_attention, paged_attention, use

DTYPES = (("float32", None), ("bfloat16", None), ("float32", "bfloat16"), ("bfloat16", "int8"))
FEATURES = ({}, {"window": 100, "sinks": True}, {"softcap": 5.0}, {"alibi": True})
NUM_TOKENS = 700  # more than one span of positions, whatever its length below that


@functools.cache
def compiled():
    return jax.jit(lambda *args: paged_attention(*args), donate_argnums=3)


def attend(case, pool, tokens, kv_lens, q_lens, seqs):
    """One call for `tokens` of the case's arrays, which belong to rows `seqs` of its page table."""
    cu = jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32)
    table, lens = case.page_table[jnp.asarray(seqs)], jnp.asarray(kv_lens, jnp.int32)
    with use("paged_attention", "cpu-ffi"):
        return compiled()(case.q[tokens], case.k[tokens], case.v[tokens], pool, table, lens, cu, case.attention_args)


def prompt(dtype, pool_dtype, features, num_tokens=NUM_TOKENS, **options):
    defaults = {"heads": 2, "group": 3, "dim": 40, "page": 16}
    return paged_case(
        q_lens=(num_tokens,), kv_lens=(num_tokens,), dtype=dtype, pool_dtype=pool_dtype, **defaults | features | options
    )


def in_chunks(case, sizes):
    pool, outs, done = jnp.array(case.pool, copy=True), [], 0
    for size in sizes:
        out, pool = attend(case, pool, slice(done, done + size), [done + size], [size], [0])
        outs.append(np.asarray(out))
        done += size
    return np.concatenate(outs), np.asarray(pool)


def assert_same_bits(got, expected):
    assert got.dtype == expected.dtype
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize(("features", "dtypes"), pairs(FEATURES, DTYPES, one_in=2), ids=str)
def test_however_a_prompt_is_cut(features, dtypes):
    case = prompt(*dtypes, features)
    whole, pool = in_chunks(case, [NUM_TOKENS])
    assert np.isfinite(whole.astype(np.float32)).all()
    for sizes in ([1, 2, 61, 64, 63, 509], [511, 1, 1, 1, 186], [16] * 43 + [12]):
        assert sum(sizes) == NUM_TOKENS
        out, after = in_chunks(case, sizes)
        assert_same_bits(out, whole)
        assert_same_bits(after, pool)


@pytest.mark.parametrize(("dtype", "pool_dtype"), DTYPES)
def test_whatever_else_is_in_the_batch(dtype, pool_dtype):
    q_lens, kv_lens = (1, 130, 1, 40, 1, 7), (9, 130, 530, 600, 65, 71)
    case = paged_case(
        q_lens=q_lens, kv_lens=kv_lens, heads=2, group=4, dim=64, page=32, dtype=dtype, pool_dtype=pool_dtype, padding=3
    )
    tokens = slice(0, sum(q_lens))
    together, _ = attend(case, jnp.array(case.pool, copy=True), tokens, kv_lens, q_lens, range(6))
    begin = 0
    for s, (num, length) in enumerate(zip(q_lens, kv_lens, strict=True)):
        alone, _ = attend(case, jnp.array(case.pool, copy=True), slice(begin, begin + num), [length], [num], [s])
        assert_same_bits(np.asarray(alone), np.asarray(together[begin : begin + num]))
        begin += num


@pytest.mark.parametrize(("dtype", "pool_dtype"), DTYPES)
@pytest.mark.parametrize("features", FEATURES, ids=lambda f: ",".join(f) or "plain")
def test_a_decode_step_gives_what_the_prompt_gave(dtype, pool_dtype, features):
    case = prompt(dtype, pool_dtype, features)
    whole, pool = in_chunks(case, [NUM_TOKENS])
    for length in (1, 64, 65, 513, NUM_TOKENS):
        token = slice(length - 1, length)
        with use("decode_attention", "cpu-ffi"):
            out, after = decode_attention(
                case.q[token],
                case.k[token],
                case.v[token],
                jnp.asarray(pool),
                case.page_table,
                jnp.array([length], jnp.int32),
                jnp.zeros(1, jnp.int32),
                case.attention_args,
            )
        assert_same_bits(np.asarray(out), whole[token])
        assert_same_bits(np.asarray(after), pool)


def digest():
    """Of a call with one kv head, whose long context threads share span by span, and of one with many rows."""
    found = hashlib.sha256()
    for case in (
        prompt("bfloat16", None, {}, num_tokens=3001, heads=1, group=5, dim=128),
        paged_case(q_lens=(1,), kv_lens=(3001,), heads=1, group=7, dim=128, page=64),
        paged_case(q_lens=(1, 90, 1, 1), kv_lens=(800, 90, 1, 300), heads=4, dim=64),
    ):
        with use("paged_attention", "cpu-ffi"):
            out, _ = paged_attention(*case.args)
        found.update(np.asarray(out).tobytes())
    return found.hexdigest()


def test_however_many_threads_there_are():
    """A process that may use one processor, beside this one."""
    script = """
import os, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sys.path.insert(0, sys.argv[1])
from test_paged_attention_invariance import digest
print(digest())
"""
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", script, here], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == digest()


def test_a_request_of_nan_stays_by_itself():
    """Its neighbours' results are the same to the last bit as beside a request of numbers."""
    q_lens, kv_lens = (1, 70, 1, 90), (130, 70, 200, 90)
    case = paged_case(q_lens=q_lens, kv_lens=kv_lens, heads=2, group=4, dim=64, dtype="bfloat16")
    tokens = slice(0, sum(q_lens))
    bad = slice(1, 71)
    with_nan = case.with_(**{name: getattr(case, name).at[bad].set(jnp.nan) for name in "qkv"})
    expected, _ = attend(case, jnp.array(case.pool, copy=True), tokens, kv_lens, q_lens, range(4))
    got, _ = attend(with_nan, jnp.array(case.pool, copy=True), tokens, kv_lens, q_lens, range(4))
    assert np.isnan(np.asarray(got[bad], np.float32)).all()
    for kept in (slice(0, 1), slice(71, 162)):
        assert_same_bits(np.asarray(got[kept]), np.asarray(expected[kept]))


def test_no_tokens_at_all():
    case = prompt("float32", None, {})
    out, pool = attend(case, jnp.array(case.pool, copy=True), slice(0, 0), [0], [0], [0])
    assert out.shape == (0, 6, 40)
    assert_same_bits(np.asarray(pool), np.asarray(case.pool))
