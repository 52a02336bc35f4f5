"""Attention within texts of many lengths in one row, beside NumPy in float64, text by text."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_oracle import assert_close, softmax

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import AttentionArgs, registry, use, varlen_attention

IMPLEMENTATIONS = ["cpu-ffi", "reference"]
HEADS, GROUP, DIM, VALUE_DIM = 2, 2, 20, 36


def case(lens, *, padding=0, dtype="float32", seed=0, reach=None, **features):
    """Arguments of texts of `lens`; each token sees `reach` tokens behind it, None: all of its text."""
    rng, total = np.random.default_rng(seed), sum(lens) + padding
    arrays = [rng.standard_normal((total, HEADS * GROUP, DIM))]
    arrays += [rng.standard_normal((HEADS, total, dim)) for dim in (DIM, VALUE_DIM)]
    cu = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    until = np.zeros(total, np.int32)
    for begin, end in itertools.pairwise(cu):
        places = np.arange(end - begin)
        until[begin:end] = end - begin - 1 if reach is None else np.minimum(places + reach, end - begin - 1)
    args = AttentionArgs(0.3, sees_until=jnp.asarray(until), **features)
    return *(jnp.asarray(each, dtype) for each in arrays), jnp.asarray(cu), args


def exact(q, k, v, cu, args):
    """float64[T, Hq, Dv], query by query; padding gives zeros."""
    q, k, v = (np.asarray(each, np.float64) for each in (q, k, v))
    until = None if args.sees_until is None else np.asarray(args.sees_until)
    out = np.zeros((*q.shape[:2], v.shape[2]))
    for begin, end in itertools.pairwise(np.asarray(cu)):
        for token in range(begin, end):
            last = begin + max(token - begin, 0 if until is None else until[token])
            first = begin if args.window is None else max(begin, token - args.window + 1)
            keys = slice(first, min(last, end - 1) + 1)
            for head in range(q.shape[1]):
                scores = k[head // GROUP, keys] @ q[token, head] * args.scale
                scores = scores if args.softcap is None else args.softcap * np.tanh(scores / args.softcap)
                sink = None if args.sinks is None else float(args.sinks[head])
                out[token, head] = softmax(scores, sink) @ v[head // GROUP, keys]
    return out


FEATURES = {
    "all of the text": {},
    "a window": {"reach": 5, "window": 6},
    "causal": {"reach": 0},
    "soft cap and sinks": {"softcap": 2.0, "sinks": jnp.array([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_each_text_is_seen_by_itself(implementation, features, dtype):
    arguments = case((1, 70, 3, 0, 130, 8), dtype=dtype, **features)
    with use("varlen_attention", implementation), registry.record_calls() as calls:
        found = jax.jit(lambda *given: varlen_attention(*given))(*arguments)  # traced anew
    assert calls == {("varlen_attention", implementation)}
    assert_close(found, exact(*arguments))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 90), min_size=1, max_size=6), st.integers(0, 5))
def test_any_lengths(lens, padding):
    q, k, v, cu, args = case(lens, padding=padding)
    total, most = sum(lens) + padding, 6 * 90 + 5
    longer = [jnp.pad(q, ((0, most - total), (0, 0), (0, 0)))]  # one shape, so that one program is compiled
    longer += [jnp.pad(each, ((0, 0), (0, most - total), (0, 0))) for each in (k, v)]
    ends = jnp.pad(cu, (0, 7 - len(cu)), mode="edge")
    args = dataclasses.replace(args, sees_until=jnp.pad(args.sees_until, (0, most - total)))
    found = np.asarray(jax.jit(varlen_attention)(*longer, ends, args))
    assert_close(found[: sum(lens)], exact(q, k, v, cu, args)[: sum(lens)])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_of_one_text_or_of_padding_reaches_no_other(implementation):
    q, k, v, cu, args = case((7, 66, 5), padding=9)
    wanted = exact(q, k, v, cu, args)
    q, k, v = q.at[:7].set(jnp.nan), k.at[:, :7].set(jnp.nan), v.at[:, :7].set(jnp.nan)
    k, v = k.at[:, 78:].set(jnp.nan), v.at[:, 78:].set(jnp.nan)
    with use("varlen_attention", implementation):
        found = np.asarray(jax.jit(varlen_attention)(q, k, v, cu, args))
    assert np.isnan(found[:7]).all()
    assert_close(found[7:78], wanted[7:78])


def test_a_text_is_bit_equal_beside_any_others():
    lens = (66, 130, 9)
    q, k, v, cu, args = case(lens)
    found = np.asarray(varlen_attention(q, k, v, cu, args))
    for begin, length in zip(np.asarray(cu), lens, strict=False):
        own = slice(begin, begin + length)
        alone = dataclasses.replace(args, sees_until=args.sees_until[own])
        ends = jnp.array([0, length], jnp.int32)
        assert np.array_equal(np.asarray(varlen_attention(q[own], k[:, own], v[:, own], ends, alone)), found[own])


def test_what_does_not_fit_is_refused():
    q, k, v, cu, args = case((4, 3))
    with pytest.raises(InvalidArgumentError, match="expected k of shape"):
        varlen_attention(q, k[:, :5], v, cu, args)
    with pytest.raises(InvalidArgumentError, match="a multiple of kv heads"):
        varlen_attention(q[:, :3], k, v, cu, args)
    with pytest.raises(InvalidArgumentError, match="alibi_slopes is not implemented"):
        varlen_attention(q, k, v, cu, dataclasses.replace(args, alibi_slopes=jnp.ones(4)))
