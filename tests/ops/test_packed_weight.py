"""Packed weights: every bit comes back, and products with them are those with the weights as they were."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ops_oracle import assert_close
from thorough import pairs

from model_adapters.ops import linear, registry, routed_matmul, use
from model_adapters.ops.compressed_weight import compress_weight, compressed_of, substituted, take_compressed_rows
from model_adapters.ops.cpu import compress, ffi

REASON = ffi.packing_unsupported_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no packed weights on this processor: {REASON}")
BF16 = np.dtype(jnp.bfloat16)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(BF16)


def bits(array):
    return np.asarray(array).view(np.uint16)


def taken_apart(groups, index):
    """The matrix, by numpy: what the layout is said to be in packed.h."""
    num_blocks, num_groups, _ = groups.shape
    table = index[:4].view(np.uint8)
    first = index[4 : 5 + num_blocks]
    at = index[5 + num_blocks : 5 + num_blocks + first[-1]]
    plain = index[5 + num_blocks + first[-1] :].view(np.uint16).reshape(-1, 4, 16, 2)
    low, codes = groups[..., :128].reshape(num_blocks, num_groups, 2, 4, 2, 8), groups[..., 128:]
    codes = np.stack([codes & 15, codes >> 4], 2).reshape(low.shape)
    numbers = low.astype(np.uint16) | table[codes].astype(np.uint16) << 8
    # [block, group, half, quarter of the rows, word of the half, 4 rows x 2 columns]
    words = numbers.transpose(0, 1, 2, 4, 3, 5).reshape(num_blocks, num_groups, 4, 16, 2)
    for block in range(num_blocks):
        listed = slice(first[block], first[block + 1])
        words[block, at[listed]] = plain[listed]
    return words.transpose(0, 3, 1, 2, 4).reshape(num_blocks * 16, num_groups * 8)


@pytest.mark.parametrize(("n", "k"), [(16, 8), (48, 40), (50, 40), (64, 1032), (160, 4104), (1023, 1024)])
def test_every_bit_comes_back_of_three_quarters_of_the_bytes(n, k):
    weight = normal(n + k, n, k)
    groups, index = compress.pack(weight)
    np.testing.assert_array_equal(taken_apart(groups, index)[:n], bits(weight))
    packed = compress_weight(jnp.asarray(weight))
    assert packed.shape == (n, k)
    np.testing.assert_array_equal(bits(packed.unpacked()), bits(weight))
    if weight.nbytes > 1 << 16:
        assert groups.nbytes + index.nbytes < 0.77 * weight.nbytes


@pytest.mark.parametrize(("n", "k"), [(16, 8), (50, 40), (160, 4104)])
def test_rows_are_those_of_the_weight(n, k):
    weight = normal(n + k, n, k)
    packed = compress_weight(jnp.asarray(weight))
    ids = np.random.default_rng(n).integers(0, n, (3, 7))
    np.testing.assert_array_equal(bits(take_compressed_rows(packed, jnp.asarray(ids))), bits(weight[ids]))
    outside = take_compressed_rows(packed, jnp.array([-1, n, n + 99, 2**31 - 1]))
    np.testing.assert_array_equal(bits(outside), bits(weight[[0, n - 1, n - 1, n - 1]]))
    assert take_compressed_rows(packed, jnp.zeros((0,), jnp.int32)).shape == (0, k)


@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 4), columns=st.integers(1, 9), spread=st.integers(0, 40))
def test_numbers_of_any_kind_come_back_or_are_left_as_they_are(seed, blocks, columns, spread):
    rng = np.random.default_rng(seed)
    weight = normal(seed, blocks * 16, columns * 8)
    odd = rng.integers(0, weight.size, spread)
    weight.reshape(-1).view(np.uint16)[odd] = rng.integers(0, 1 << 16, spread)  # NaN, infinities, subnormals among them
    packed = compress.pack(weight)
    high = bits(weight) >> 8
    common = np.argsort(-np.bincount(high.ravel(), minlength=256), kind="stable")[:16]
    num_listed = (~np.isin(high, common)).reshape(blocks, 16, columns, 8).any((1, 3)).sum()
    assert (packed is None) == (num_listed > blocks * columns // 8)
    if packed is not None:
        np.testing.assert_array_equal(taken_apart(*packed), bits(weight))


def test_weights_without_common_exponents_are_left_as_they_are():
    anything = np.random.default_rng(0).integers(0, 1 << 16, (64, 64)).astype(np.uint16).view(BF16)
    assert compress_weight(jnp.asarray(anything)) is None


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (np.zeros((16, 8), np.float32), "float32"),
        (np.zeros((15, 8), BF16), r"\[15, 8\]"),
        (np.zeros((16, 12), BF16), r"\[16, 12\]"),
        (np.zeros((0, 8), BF16), r"\[0, 8\]"),
        (np.zeros(16, BF16), r"\[16\]"),
        (np.zeros((2, 24, 8), BF16), r"\[2, 24, 8\]"),
        (np.zeros((2, 2, 16, 8), BF16), r"\[2, 2, 16, 8\]"),
    ],
)
def test_what_cannot_be_packed_is_left_as_it_is(weight, reason):
    assert compress_weight(jnp.asarray(weight)) is None
    assert re.search(reason, compress.unsupported_reason(jnp.asarray(weight)))


@pytest.mark.parametrize(
    ("sizes", "with_bias"),
    pairs([(16, 520), (112, 1032), (57, 520), (77, 1032), (64, 3080)], [False, True], one_in=2),
    ids=str,
)
def test_products_are_those_with_the_weight_as_it_was_to_the_last_bit(sizes, with_bias):
    n, k = sizes
    weight = normal(1, n, k)
    weight[::16, [0, 128, k - 1]] = 1e-30  # so some groups of every block lie in the list
    packed = compress_weight(jnp.asarray(weight))
    assert packed.index.size > 4 + -(-n // 16) + 1
    bias = jnp.asarray(normal(2, n)) if with_bias else None
    for rows in (*range(1, 20), 32, 33, 64, 75):
        x = jnp.asarray(normal(rows, rows, k))
        out = ffi.packed_linear(x, packed.groups, packed.index, bias, packed.num_rows)
        with ffi.batch_invariant():
            np.testing.assert_array_equal(bits(out), bits(ffi.linear(x, jnp.asarray(weight), bias, x.dtype)))
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert_close(out, expected + (0 if bias is None else np.asarray(bias, np.float64)))


@pytest.mark.parametrize(("matrices", "n", "k"), [(1, 16, 8), (3, 48, 40), (5, 32, 1032)])
def test_every_bit_of_a_stack_comes_back(matrices, n, k):
    weight = normal(n, matrices, n, k)
    packed = compress_weight(jnp.asarray(weight))
    assert (packed.shape, packed.ndim) == (weight.shape, 3)
    np.testing.assert_array_equal(bits(packed.unpacked()), bits(weight))
    below = taken_apart(np.asarray(packed.groups).reshape(-1, k // 8, 192), np.asarray(packed.index))
    np.testing.assert_array_equal(below, bits(weight.reshape(-1, k)))


@pytest.mark.parametrize("by_choice", [False, True], ids=["rows of tokens", "rows of choices"])
@pytest.mark.parametrize(("matrices", "n", "k"), [(4, 48, 520), (7, 32, 1032)])
def test_routed_products_are_those_with_the_stack_as_it_was_to_the_last_bit(matrices, n, k, by_choice):
    weight = normal(1, matrices, n, k)
    weight[:, ::16, [0, 128, k - 1]] = 1e-30  # so some groups of every block lie in the list
    packed, bias = compress_weight(jnp.asarray(weight)), jnp.asarray(normal(2, matrices, n))
    for tokens in (1, 2, 3, 5, 9, 33, 70):
        ids = jnp.asarray(np.random.default_rng(tokens).integers(-1, matrices + 1, (tokens, 2)), jnp.int32)
        x = jnp.asarray(normal(tokens, tokens, 2, k) if by_choice else normal(tokens, tokens, k))
        for added in (None, bias):
            out = ffi.packed_routed_linear(x, ids, packed.groups, packed.index, added)
            with ffi.batch_invariant():
                expected = ffi.routed_linear(x, ids, jnp.asarray(weight), added, is_input_major=False)
            np.testing.assert_array_equal(bits(out), bits(expected))


def test_experts_of_a_trace_are_multiplied_as_they_are_packed():
    weight, x = normal(1, 4, 32, 48), jnp.asarray(normal(3, 2, 5, 48))
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 4, (2, 5, 2)), jnp.int32)

    def routed(held, x, ids):
        with substituted({"experts": held}) as arrays:
            return jax.vmap(lambda x, ids: routed_matmul(x, arrays["experts"], ids))(x, ids)

    packed = compress_weight(jnp.asarray(weight))
    with registry.record_calls() as record:
        program = jax.jit(routed).lower(packed, x, ids).compile()
    assert record == {("routed_matmul", "cpu-packed")}
    calls = [line for line in program.as_text().splitlines() if "custom-call(" in line]
    assert [re.search("tas_[a-z_]+", line)[0] for line in calls] == ["tas_packed_routed_linear"]  # rows of the vmap
    x64, weight64 = np.asarray(x, np.float64), weight.astype(np.float64)
    assert_close(program(packed, x, ids), np.einsum("btk,btcnk->btcn", x64, weight64[np.asarray(ids)]))


def products(weights, x):
    with substituted(weights) as arrays:
        return linear(x, arrays["a"]), x @ arrays["b"].T


def test_code_that_multiplies_gets_the_packed_weight_and_other_code_the_whole():
    plain = {"a": jnp.asarray(normal(1, 64, 48)), "b": jnp.asarray(normal(2, 32, 48))}
    weights = {name: compress_weight(array) for name, array in plain.items()}
    x = jnp.asarray(normal(3, 5, 48))
    with registry.record_calls() as record:
        program = jax.jit(products).lower(weights, x).compile()
    assert record == {("linear", "cpu-packed")}
    calls = [line for line in program.as_text().splitlines() if "custom-call(" in line]
    assert sum("tas_packed_linear" in line for line in calls) == 1
    assert sum("tas_unpack" in line for line in calls) == 1  # for b alone
    got = program(weights, x)
    with ffi.batch_invariant():
        np.testing.assert_array_equal(bits(got[0]), bits(linear(x, plain["a"])))
    assert_close(got[1], np.asarray(x, np.float64) @ np.asarray(plain["b"], np.float64).T)


def test_another_implementation_can_be_asked_for():
    weights = {"a": compress_weight(jnp.asarray(normal(1, 64, 48))), "b": jnp.asarray(normal(2, 32, 48))}
    x = jnp.asarray(normal(3, 5, 48))
    with use("linear", "reference"), registry.record_calls() as record:
        got = jax.jit(products)(weights, x)
    assert record == {("linear", "reference")}
    assert_close(got[0], np.asarray(x, np.float64) @ np.asarray(weights["a"].unpacked(), np.float64).T)


def test_a_weight_is_known_by_itself_and_in_its_trace_alone():
    weights = {"a": compress_weight(jnp.asarray(normal(1, 64, 48)))}
    with substituted(weights) as arrays:
        assert compressed_of(arrays["a"]) is weights["a"]
        assert compressed_of(arrays["a"] + 0) is None
    assert compressed_of(arrays["a"]) is None
    assert weights["a"].shape == (64, 48)
    assert weights["a"].ndim == 2
    assert weights["a"].dtype == jnp.bfloat16


def test_no_rows_are_no_rows():
    weights = {"a": compress_weight(jnp.asarray(normal(1, 64, 48))), "b": jnp.asarray(normal(2, 32, 48))}
    assert products(weights, jnp.zeros((0, 48), jnp.bfloat16))[0].shape == (0, 64)


@pytest.mark.parametrize(("rows", "first_equal"), [(4, 1), (16, 5), (70, 20)])
def test_equal_rows_at_the_end_give_the_bits_of_one(rows, first_equal):
    weight, x = normal(1, 64, 1032), normal(2, rows, 1032)
    groups, index = map(jnp.asarray, compress.pack(weight))
    x[first_equal:] = x[first_equal]
    out = ffi.packed_linear(jnp.asarray(x), groups, index, None)
    one_by_one = [ffi.packed_linear(jnp.asarray(row[None]), groups, index, None)[0] for row in x]
    np.testing.assert_array_equal(bits(out), bits(jnp.stack(one_by_one)))
