"""Products of rows with the matrices that they name: every implementation against a loop over the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_oracle import TOLERANCE, assert_close

from model_adapters import ops
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry, use
from model_adapters.ops.cpu import ffi

RNG = np.random.default_rng(0)
OP = "routed_matmul"


def exact(x, weight, ids, bias=None):
    """Multiplies row by row; `weight` is [E, K, N]."""
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    out = np.zeros((*ids.shape, weight.shape[2]))
    for place in np.ndindex(*ids.shape):
        if 0 <= (matrix := int(ids[place])) < len(weight):
            out[place] = (x[place] if x.ndim == 3 else x[place[0]]) @ weight[matrix]
            out[place] += 0 if bias is None else np.asarray(bias, np.float64)[matrix]
    return out


def inputs(tokens, choices, matrices, k, n, dtype="float32", *, by_choice=False, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, choices, k) if by_choice else (tokens, k), dtype=np.float32)
    weight = rng.standard_normal((matrices, k, n), dtype=np.float32) / k**0.5
    ids = rng.integers(-1, matrices + 1, (tokens, choices))
    bias = rng.standard_normal((matrices, n), dtype=np.float32)
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype), jnp.asarray(ids, jnp.int32), jnp.asarray(bias, dtype)


def laid(weight, layout):
    return weight if layout == "ekn" else jnp.swapaxes(weight, 1, 2)


SIZES = [(1, 4, 8, 64, 48), (3, 2, 3, 40, 13), (9, 3, 4, 33, 150), (70, 2, 3, 70, 65), (150, 1, 2, 96, 200)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["ekn", "enk"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_implementation(sizes, layout, dtype):
    for by_choice in (False, True):
        x, weight, ids, bias = inputs(*sizes, dtype, by_choice=by_choice)
        for implementation in registry.find(OP).implementations:
            for added in (None, bias):
                if implementation.unsupported_reason(x, laid(weight, layout), ids, added, layout=layout) is None:
                    with use(OP, implementation.name):
                        got = ops.routed_matmul(x, laid(weight, layout), ids, added, layout=layout)
                    assert got.dtype == x.dtype
                    expected = exact(x, weight, np.asarray(ids), added)
                    if added is not None and implementation.name == "reference":  # which rounds the product, too
                        rtol, atol = TOLERANCE[dtype]
                        product = exact(x, weight, np.asarray(ids))
                        assert (
                            np.abs(np.asarray(got, np.float64) - expected)
                            <= rtol * (abs(product) + abs(expected)) + 2 * atol
                        ).all()
                    else:
                        assert_close(got, expected)


def test_cpus_take_the_kernel_in_both_layouts():
    x, weight, ids, _ = inputs(2, 2, 3, 8, 8)
    for layout in ("ekn", "enk"):
        assert registry.implementation_for(OP, x, laid(weight, layout), ids, None, layout=layout).name == "cpu-ffi"
    with registry.on_platform("tpu"):
        assert registry.implementation_for(OP, x, weight, ids, None, layout="ekn").name == "reference"


@settings(max_examples=40)
@given(st.lists(st.integers(-2, 4), min_size=40, max_size=40), st.sampled_from(["ekn", "enk"]), st.integers(0, 40))
def test_any_choice_of_matrices(chosen, layout, num_equal):
    x, weight, _, _ = inputs(40, 1, 3, 24, 20, "bfloat16")
    ids = np.array(chosen, np.int32)[:, None]
    x = x.at[40 - num_equal :].set(x[-1])  # a step is padded with its last token
    ids[40 - num_equal :] = ids[-1]
    assert_close(ops.routed_matmul(x, laid(weight, layout), jnp.asarray(ids), layout=layout), exact(x, weight, ids))


@pytest.mark.parametrize("layout", ["ekn", "enk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_row_does_not_depend_on_those_beside_it(layout, dtype):
    x, weight, ids, bias = inputs(90, 2, 3, 200, 72, dtype)
    with ffi.batch_invariant():
        together = ops.routed_matmul(x, laid(weight, layout), ids, bias, layout=layout)
        for rows in (slice(0, 1), slice(3, 6), slice(10, 40)):
            alone = ops.routed_matmul(x[rows], laid(weight, layout), ids[rows], bias, layout=layout)
            np.testing.assert_array_equal(np.asarray(alone, np.float32), np.asarray(together[rows], np.float32))


@pytest.mark.parametrize("layout", ["ekn", "enk"])
@pytest.mark.parametrize("name", ["reference", "cpu-ffi"])
def test_gradients_are_those_of_a_gather_of_matrices(layout, name):
    x, weight, ids, bias = inputs(7, 2, 3, 8, 5)

    def loss(x, weight, bias):
        with use(OP, name):
            return jnp.sum(jnp.sin(ops.routed_matmul(x, laid(weight, layout), ids, bias, layout=layout)))

    def expected_loss(x, weight, bias):
        is_there = (ids >= 0) & (ids < 3)
        out = jnp.einsum("tk,tckn->tcn", x, weight[ids], precision="highest") + bias[ids]
        return jnp.sum(jnp.sin(jnp.where(is_there[..., None], out, 0)))

    got, expected = (jax.jit(jax.grad(each, argnums=(0, 1, 2)))(x, weight, bias) for each in (loss, expected_loss))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        assert np.abs(other).max() > 0.1


@pytest.mark.parametrize("op", ["routed_matmul", "grouped_matmul"])
def test_rows_of_a_vmap_are_rows_of_one_call(op):
    x, weight, ids, bias = inputs(12, 2, 3, 16, 10, by_choice=op == "routed_matmul")

    def routed(x, ids):
        return ops.routed_matmul(x, weight, ids, bias, layout="ekn")

    def grouped(x, sizes):
        return ops.grouped_matmul(x, weight, sizes, layout="ekn")

    rows = x.reshape(4, 3, *x.shape[1:])
    if op == "routed_matmul":
        by_row, function, expected = ids.reshape(4, 3, 2), routed, exact(x, weight, np.asarray(ids), bias)
    else:
        by_row, function = jnp.array([[1, 1, 1], [0, 3, 0], [0, 0, 2], [0, 0, 0]], jnp.int32), grouped
        places = np.array([0, 1, 2, 1, 1, 1, 2, 2, 3, 3, 3, 3])[:, None]
        expected = exact(x, weight, places)[:, 0]
    got = jax.jit(jax.vmap(function))(rows, by_row)
    np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
    text = str(jax.make_jaxpr(jax.vmap(function))(rows, by_row))
    assert "scan" not in text and "while" not in text  # not one call after the other


def test_a_vmap_over_weights_runs_the_kernel_for_each():
    parts = [inputs(4, 2, 3, 16, 10, seed=seed) for seed in range(3)]
    x, weight, ids, _ = (jnp.stack(each) for each in zip(*parts, strict=True))
    got = jax.jit(jax.vmap(lambda *each: ops.routed_matmul(*each, layout="ekn")))(x, weight, ids)
    for each, (x, weight, ids, _) in zip(got, parts, strict=True):
        np.testing.assert_allclose(each, exact(x, weight, np.asarray(ids)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "layout", "message"),
    [
        (((4, 8), (3, 8, 5), (4,)), "ekn", r"got float32\[4, 8\], float32\[3, 8, 5\] and \[4\]"),
        (((4, 8), (3, 8, 5), (4, 2)), "enk", r"weight\[E, N, K\]"),
        (((4, 3, 8), (3, 8, 5), (4, 2)), "ekn", r"x\[T, choices, K\]"),
        (((4, 8), (3, 8, 5), (4, 2)), "kne", "expected layout 'ekn' or 'enk', got 'kne'"),
    ],
)
def test_what_does_not_fit_is_refused(shapes, layout, message):
    x, weight, ids = (jnp.zeros(shape) for shape in shapes)
    with pytest.raises(InvalidArgumentError, match=message):
        ops.routed_matmul(x, weight, ids.astype(jnp.int32), layout=layout)
