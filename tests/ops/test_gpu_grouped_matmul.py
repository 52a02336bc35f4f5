"""Grouped products of GPUs, interpreted, next to a product for each group in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_adapters import ops
from model_adapters.ops import registry
from model_adapters.ops.gpu import grouped_matmul as kernels

RNG = np.random.default_rng(0)
SIZES = [
    ((18, 40, 13), [3, 0, 8, 1, 6]),
    ((18, 40, 13), [0, 0, 0, 0, 18]),
    ((18, 40, 13), [1, 2, 0, 0, 0]),
    ((18, 40, 13), [0] * 5),
    ((7, 64, 64), [0] * 9 + [7] + [0] * 6),
    ((300, 130, 200), [100, 0, 3, 180]),
]


def inputs(num_rows, num_in, num_out, num_groups, dtype="bfloat16"):
    x = jnp.asarray(RNG.standard_normal((num_rows, num_in)), dtype)
    return x, jnp.asarray(RNG.standard_normal((num_groups, num_in, num_out)) / num_in**0.5, dtype)


def exact(x, weight, sizes):
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    out, begin = np.zeros((len(x), weight.shape[2])), 0
    for group, size in enumerate(sizes):
        out[begin : begin + size] = x[begin : begin + size] @ weight[group]
        begin += size
    return out


@pytest.mark.parametrize("layout", ["ekn", "enk"])
@pytest.mark.parametrize(("shape", "sizes"), SIZES)
def test_products_are_exact(shape, sizes, layout):
    x, weight = inputs(*shape, len(sizes))
    laid = weight if layout == "ekn" else jnp.swapaxes(weight, 1, 2)
    got = kernels.grouped_matmul(x, laid, jnp.array(sizes, jnp.int32), layout=layout)
    np.testing.assert_allclose(np.asarray(got, np.float64), exact(x, weight, sizes), rtol=2**-8, atol=1e-6)


def test_what_is_not_a_number_stays_with_its_group():
    sizes = [5, 3, 4]
    x, weight = inputs(20, 40, 16, len(sizes))
    x, weight = x.at[6].set(jnp.nan), weight.at[2].set(jnp.inf)
    got = np.asarray(kernels.grouped_matmul(x, weight, jnp.array(sizes), layout="ekn"), np.float64)
    assert np.isfinite(got[:6]).all() and np.isnan(got[6]).all() and np.isfinite(got[7]).all()
    assert not np.isfinite(got[8:12]).any() and (got[12:] == 0).all()


@settings(max_examples=30)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=9), st.integers(0, 20), st.sampled_from([16, 32, 64]))
def test_tiles_have_each_row_once(sizes, num_behind, size):
    num_rows = sum(sizes) + num_behind
    found = [np.asarray(x) for x in kernels.tiles_of(jnp.array(sizes, jnp.int32), max(1, num_rows), size)]
    rows = [(row, group) for group, begin, end in zip(*found, strict=True) for row in range(begin, end)]
    wanted = [(row, group) for row, group in enumerate(np.repeat(np.arange(len(sizes)), sizes))]
    assert sorted(rows) == wanted
    assert all(end - begin <= size for _, begin, end in zip(*found, strict=True))


def test_experts_of_gpus_and_their_derivatives():
    """Rows that name experts are products of groups, whose derivatives are those of XLA's product."""
    x, weight = inputs(6, 32, 16, 4)
    ids = jnp.array([[0, 3], [1, 0], [3, 3], [2, 1], [0, 1], [2, 3]])

    def total(x, weight):
        return jnp.sum(ops.routed_matmul(x, weight, ids, layout="ekn").astype(jnp.float32))

    wanted = jax.jit(jax.grad(total, (0, 1)))(*(each.astype(jnp.float32) for each in (x, weight)))
    with registry.use("routed_matmul", registry.REFERENCE), registry.use("grouped_matmul", "gpu-triton"):
        got = jax.jit(jax.grad(total, (0, 1)))(x, weight)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), other, rtol=2**-6, atol=2**-6)


def test_what_gpus_leave_to_xla():
    x, weight = inputs(6, 32, 16, 4)
    sizes = jnp.array([1, 2, 0, 3])
    with registry.on_platform("gpu"):
        chosen = [
            registry.implementation_for("grouped_matmul", a.astype(dtype), b.astype(dtype), sizes, layout="ekn").name
            for dtype in ("bfloat16", "float16", "float32")
            for a, b in ((x, weight), (x[:0], weight))
        ]
    assert chosen == ["gpu-triton", "reference", "gpu-triton", "reference", "reference", "reference"]
