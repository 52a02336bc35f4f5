"""Grouped products: every implementation against a loop over the groups, and against torch's grouped product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_oracle import assert_close

from model_adapters import ops
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry, spmd, use
from model_adapters.ops.grouped_matmul import by_head

RNG = np.random.default_rng(0)


def exact(x, weight, sizes):
    out, begin = np.zeros((x.shape[0], weight.shape[2])), 0
    for group, size in enumerate(sizes):
        out[begin : begin + size] = np.asarray(x[begin : begin + size], np.float64) @ np.asarray(
            weight[group], np.float64
        )
        begin += size
    return out


def inputs(rows, groups, k, n, dtype="float32"):
    x = jnp.asarray(RNG.standard_normal((rows, k), dtype=np.float32), dtype)
    return x, jnp.asarray(RNG.standard_normal((groups, k, n), dtype=np.float32) / k**0.5, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [[3, 0, 8, 1, 6], [0, 0, 0, 0, 18], [1, 2, 0, 0, 0], [0] * 5])
def test_every_implementation(sizes, dtype):
    x, weight = inputs(18, 5, 40, 13, dtype)
    for implementation in registry.find("grouped_matmul").implementations:
        for layout, laid in (("ekn", weight), ("enk", jnp.swapaxes(weight, 1, 2))):
            if implementation.unsupported_reason(x, laid, jnp.array(sizes), layout=layout) is None:
                with use("grouped_matmul", implementation.name):
                    got = ops.grouped_matmul(x, laid, jnp.array(sizes, jnp.int32), layout=layout)
                assert_close(got, exact(x, weight, sizes))


def test_each_platform_takes_what_is_meant_for_it():
    x, weight = inputs(6, 2, 4, 4)
    sizes = jnp.array([2, 4])
    chosen = [
        registry.implementation_for("grouped_matmul", x, weight, sizes, layout=layout).name for layout in ("ekn", "enk")
    ]
    assert chosen == ["cpu-ffi", "cpu-ffi"]
    with registry.on_platform("gpu"):
        assert registry.implementation_for("grouped_matmul", x, weight, sizes, layout="enk").name == "reference"


X, WEIGHT = inputs(150, 4, 8, 6)
COMPILED = {
    name: jax.jit(registry.find("grouped_matmul").find(name).function, static_argnames="layout")
    for name in ("tiled", "cpu-ffi")
}


@settings(max_examples=60)
@given(st.lists(st.integers(0, 70), min_size=4, max_size=4).filter(lambda sizes: sum(sizes) <= 150))
def test_ragged_groups(sizes):
    got = ops.grouped_matmul(X, jnp.swapaxes(WEIGHT, 1, 2), jnp.array(sizes, jnp.int32), layout="enk")
    assert_close(got, exact(X, WEIGHT, sizes))
    assert_close(COMPILED["tiled"](X, WEIGHT, jnp.array(sizes, jnp.int32), layout="ekn"), exact(X, WEIGHT, sizes))


def test_as_torch():
    sizes = [5, 0, 11]
    x, weight = inputs(16, 3, 32, 16, "bfloat16")
    tensors = [torch.from_numpy(np.array(a, np.float32)).bfloat16() for a in (x, weight)]
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    expected = torch.nn.functional.grouped_mm(*tensors, offs=offs).float().numpy()
    got = ops.grouped_matmul(x, weight, jnp.array(sizes, jnp.int32))
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=2**-7, atol=1e-3)


def test_gradient_of_the_kernel_is_that_of_the_reference():
    x, weight = inputs(9, 3, 8, 5)
    sizes, weight = jnp.array([4, 0, 3], jnp.int32), jnp.swapaxes(weight, 1, 2)

    def gradients(name):
        with use("grouped_matmul", name):
            return jax.grad(lambda *a: jnp.sum(jnp.sin(ops.grouped_matmul(*a, sizes, layout="enk"))), argnums=(0, 1))(
                x, weight
            )

    for got, expected in zip(gradients("cpu-ffi"), gradients("reference"), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
        assert np.abs(expected).max() > 0.1


@pytest.mark.parametrize(
    ("shapes", "layout", "message"),
    [
        (((4, 8), (3, 8, 5), (2,)), "ekn", r"got float32\[4, 8\], float32\[3, 8, 5\] and \[2\]"),
        (((4, 8), (3, 8, 5), (3,)), "enk", r"weight\[E, N, K\]"),
        (((4, 8), (8, 5), (3,)), "ekn", r"weight\[E, K, N\]"),
        (((4, 8), (3, 8, 5), (3,)), "kne", "expected layout 'ekn' or 'enk', got 'kne'"),
    ],
)
def test_what_does_not_fit_is_refused(shapes, layout, message):
    x, weight, sizes = (jnp.zeros(shape) for shape in shapes)
    with pytest.raises(InvalidArgumentError, match=message):
        ops.grouped_matmul(x, weight, sizes.astype(jnp.int32), layout=layout)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_head_is_multiplied_with_its_own_matrix(dtype):
    x, weight = inputs(15, 3, 24, 16, dtype)
    x, turned = x.reshape(3, 5, 24), jnp.swapaxes(weight, 1, 2)
    expected = np.einsum("htk,hkn->htn", np.asarray(x, np.float64), np.asarray(weight, np.float64))
    assert_close(by_head(x, turned), expected)
    with spmd.on_mesh(jax.make_mesh((1,), ("model",))):  # heads are left to the partitioner
        assert_close(by_head(x, turned), expected)
