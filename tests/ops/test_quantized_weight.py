"""Quantized weights: their numbers against numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.quantized_layout import to_pairs
from model_adapters.ops.quantized_weight import NF4, Scheme, dequantize, make_quantized, take_rows


def parts(seed, rows, columns, group, *, lead=(), offset=False):
    rng = np.random.default_rng(seed)
    groups = -(-columns // group)
    values = rng.integers(-8, 8, (*lead, rows, columns)).astype(np.int8)
    scale = rng.uniform(0.01, 0.1, (*lead, rows, groups)).astype(np.float32)
    shift = rng.uniform(-0.1, 0.1, scale.shape).astype(np.float32) if offset else None
    return values, scale, shift


def dense(values, scale, offset, group):
    """The matrix, by numpy: each column by itself."""
    out = np.empty(values.shape, np.float32)
    for column in range(values.shape[-1]):
        out[..., column] = values[..., column] * scale[..., column // group]
        if offset is not None:
            out[..., column] += offset[..., column // group]
    return out


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(("rows", "columns", "group", "lead"), [(6, 64, 64, ()), (5, 64, 16, ()), (4, 40, 16, (3,))])
def test_dense_numbers_are_values_times_scale_plus_offset(rows, columns, group, lead, offset):
    given = parts(0, rows, columns, group, lead=lead, offset=offset)
    weight = make_quantized("w", *given, scheme=Scheme(4, group, dtype="float32"))
    np.testing.assert_allclose(dequantize(weight), dense(*given, group), rtol=1e-6, atol=1e-7)
    assert weight.shape == (*lead, rows, columns) and weight.dtype == jnp.float32


def test_columns_are_put_back_in_the_order_of_model_code():
    given, order = parts(1, 4, 32, 8, offset=True), np.random.default_rng(1).permutation(32).astype(np.int32)
    weight = make_quantized("w", *given, order, scheme=Scheme(4, 8, dtype="float32"))
    x, stored = np.random.default_rng(2).standard_normal((3, 32)).astype(np.float32), dense(*given, 8)
    np.testing.assert_allclose(x @ np.asarray(dequantize(weight)).T, x[:, order] @ stored.T, rtol=1e-4, atol=1e-5)


def test_rows_taken_from_a_table_are_rows_of_the_dense_table():
    weight = make_quantized("w", *parts(3, 10, 32, 16, offset=True), scheme=Scheme(4, 16))
    indices = jnp.asarray([[3, 3], [0, 9]])
    np.testing.assert_array_equal(
        np.asarray(take_rows(weight, indices), np.float32), np.asarray(dequantize(weight), np.float32)[indices]
    )


def test_a_transposed_weight_has_the_shape_that_model_code_expects():
    given = parts(4, 6, 16, 8)
    weight = make_quantized("w", *given, scheme=Scheme(4, 8, dtype="float32", transposed=True))
    assert weight.shape == (16, 6)
    np.testing.assert_allclose(weight.unpacked(), dense(*given, 8).T, rtol=1e-6)


@pytest.mark.parametrize(("least", "table"), [(-8, None), (0, None), (0, NF4)])
def test_pairs_of_4_bits_are_the_same_numbers_in_half_the_bytes(least, table):
    """Two neighbouring columns in a byte, the first in its low half, for experts and for rows of a table."""
    values, scale, shift = parts(7, 6, 32, 8, lead=(3,), offset=True)
    values = (values + 8 + least).astype(np.int8)
    plain = make_quantized("w", values, scale, shift, scheme=Scheme(4, 8, dtype="float32", zero=-least, table=table))
    pairs = dataclasses.replace(
        plain,
        values=jnp.asarray(to_pairs(values, -least)),
        scheme=dataclasses.replace(plain.scheme, layout="pairs"),
    )
    first, second = (values[..., at::2].astype(int) - least for at in (0, 1))
    np.testing.assert_array_equal(pairs.values, first + 16 * second)
    assert pairs.shape == plain.shape and 2 * pairs.values.nbytes == plain.values.nbytes
    np.testing.assert_array_equal(dequantize(pairs), dequantize(plain))
    one, other = (jax.tree.map(lambda part: part[1], each) for each in (pairs, plain))
    np.testing.assert_array_equal(take_rows(one, jnp.asarray([5, 0])), dequantize(other)[jnp.asarray([5, 0])])


def test_its_parts_pass_through_jax_with_the_scheme_as_a_static_part():
    weight = make_quantized("w", *parts(5, 6, 16, 8), scheme=Scheme(4, 8, source="int4"))
    returned = jax.jit(lambda w: w)(weight)
    assert returned.scheme == weight.scheme and len(jax.tree.leaves(weight)) == 2
    assert weight.nbytes == 6 * 16 + 6 * 2 * 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale": np.ones((6, 3), np.float32)}, r"expected scale \[6, 2\] for values \[6, 16\] in groups of 8"),
        ({"scale": np.full((6, 2), np.nan, np.float32)}, "expected a finite scale, got NaN or infinity"),
        ({"offset": np.full((6, 2), np.inf, np.float32)}, "expected a finite offset"),
        ({"columns": np.zeros(16, np.int32)}, "expected columns that order all 16 columns"),
    ],
)
def test_parts_that_do_not_fit_are_an_error_that_names_the_weight(change, said):
    values, scale, offset = parts(6, 6, 16, 8)
    given = {"values": values, "scale": scale, "offset": offset, **change}
    with pytest.raises(InvalidArgumentError, match=f"^model.w: .*{said}"):
        make_quantized("model.w", scheme=Scheme(4, 8), **given)
