"""Queries over stored keys and values, and biases by position, beside NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_oracle import assert_close, decode_case, exact_decode, softmax

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import AttentionArgs, cross_attention, decode_attention, registry, use
from model_adapters.ops.row_pages import attend_row, attend_stored

IMPLEMENTATIONS = ["cpu-ffi", "reference"]
DTYPES = ["float32", "bfloat16", "float16"]


def numbers(shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def case(dtype, *, batch=4, heads=2, group=2, dim=24, value_dim=40, page=100, pages=2, biases=True):
    """Rows of several lengths, none and all among them, on shuffled pages; what is behind a length is NaN."""
    total = batch * pages + 1
    table = np.random.default_rng(5).permutation(total)[: batch * pages].reshape(batch, pages).astype(np.int32)
    lens = np.array([0, 1, page + 3, pages * page], np.int32)[:batch]
    keys, values = (
        np.array(numbers((total, heads, page, dim))),
        np.array(numbers((total, heads, page, value_dim), seed=1)),
    )
    for row, length in enumerate(lens):
        for position in range(length, pages * page):
            for pool in (keys, values):
                pool[table[row, position // page], :, position % page] = np.nan
    q = numbers((batch, heads * group, dim), dtype, 2)
    bias = np.array(numbers((batch, heads * group, pages * page - 30), seed=3))
    bias[:, :, 1:2] = -np.inf  # a mask
    args = AttentionArgs(0.3, position_biases=jnp.asarray(bias) if biases else None)
    return q, jnp.asarray(keys, dtype), jnp.asarray(values, dtype), jnp.asarray(table), jnp.asarray(lens), args


def exact(q, keys, values, table, lens, args):
    """float64[B, Hq, Dv], position by position."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    out = np.zeros((*q.shape[:2], values.shape[3]))
    for row, length in enumerate(np.asarray(lens)):
        places = [(int(table[row, p // keys.shape[2]]), p % keys.shape[2]) for p in range(length)]
        for head in range(q.shape[1] if length else 0):
            own = head // (q.shape[1] // keys.shape[1])
            scores = np.array([q[row, head] @ keys[page, own, at] for page, at in places]) * args.scale
            if args.position_biases is not None:
                bias = np.asarray(args.position_biases, np.float64)[row, head][:length]
                scores[: len(bias)] += bias
            out[row, head] = softmax(scores, None) @ np.stack([values[page, own, at] for page, at in places])
    return out


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_stored_keys_are_read_up_to_their_length(implementation, dtype, biases):
    given = case(dtype, biases=biases)
    with use("cross_attention", implementation):
        assert_close(jax.jit(cross_attention)(*given), exact(*given))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_vmap_are_rows_of_one_call(dtype):
    q, keys, values, _, lens, args = case(dtype, page=200, pages=1)
    slots = jnp.array([3, 0, 4, 1], jnp.int32)
    lens = jnp.array([0, 1, 103, 200], jnp.int32)
    keys, values = jnp.nan_to_num(keys), jnp.nan_to_num(values)
    bias = args.position_biases

    def one(q, slot, length, bias):
        return attend_stored(q[None], keys, values, slot, length, AttentionArgs(0.3, position_biases=bias[None]))[0]

    with registry.record_calls() as calls:
        out = jax.jit(jax.vmap(one))(q, slots, lens, bias)
    assert calls == {("cross_attention", "cpu-ffi")}
    assert_close(out, exact(q, keys, values, slots[:, None], lens, args))
    shared = jax.vmap(lambda q, slot, length: one(q, slot, length, bias[0]))(q, slots, lens)
    same = AttentionArgs(0.3, position_biases=jnp.broadcast_to(bias[:1], bias.shape))
    assert_close(shared, exact(q, keys, values, slots[:, None], lens, same))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_decode_step_adds_biases_by_position(implementation):
    given = decode_case(batch=4, lens=(40, 0, 3, 64), page=16)
    plain, _ = exact_decode(given)
    # A bias that is linear in the position is ALiBi's up to a constant, which softmax does not see.
    slopes = np.array([0.5, -0.25, 1.0, 0.0], np.float32)
    bias = jnp.asarray(np.broadcast_to(slopes[:, None] * np.arange(64, dtype=np.float32), (4, 4, 64)))
    tensors = (given.q, given.k, given.v, given.pool, given.page_table, given.lens, given.starts)
    with use("decode_attention", implementation):
        by_slopes, pool = decode_attention(*tensors, AttentionArgs(0.125, alibi_slopes=jnp.asarray(slopes)))
        out, other = decode_attention(*tensors, AttentionArgs(0.125, position_biases=bias))
        none, _ = decode_attention(*tensors, AttentionArgs(0.125, position_biases=jnp.zeros((4, 4, 64))))
    assert_close(out, np.asarray(by_slopes, np.float64))
    assert_close(none, plain)
    assert np.abs(np.asarray(out) - plain).max() > 0.01
    np.testing.assert_array_equal(pool, other)


def test_rows_of_a_vmap_decode_with_biases_of_their_own():
    given = decode_case(batch=4, lens=(40, 3, 64, 1), page=16)
    bias = numbers((4, 4, 64), seed=9)

    def one(q, k, v, table, length, bias):
        args = AttentionArgs(0.125, position_biases=bias[None])
        return attend_row(q[None], k[None], v[None], given.pool, table, length, args)

    out, pool = jax.vmap(one, out_axes=(0, None))(given.q, given.k, given.v, given.page_table, given.lens, bias)
    tensors = (given.q, given.k, given.v, given.pool, given.page_table, given.lens, given.starts)
    expected, after = decode_attention(*tensors, AttentionArgs(0.125, position_biases=bias))
    assert_close(out[:, 0], np.asarray(expected, np.float64))
    np.testing.assert_array_equal(pool, after)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 3}, "window is not implemented"),
        ({"softcap": 2.0}, "expected softcap or position_biases, got both"),
        ({"position_biases": jnp.zeros((4, 3, 9))}, "expected position_biases of shape"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    *arrays, args = case("float32")
    with pytest.raises(InvalidArgumentError, match=message):
        cross_attention(*arrays, AttentionArgs(**{"scale": 1.0, "position_biases": args.position_biases, **change}))
