"""Products against float64, in every dtype and number of rows; what is lowered never has one slow row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ops_oracle import assert_close

from model_adapters import ops
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry, use
from model_adapters.ops.cpu import ffi

DTYPES = ("float32", "bfloat16", "float16")


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32), dtype)


def exact(x):
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        (1, 1, 1),
        (1, 7, 33),
        (2, 64, 128),
        (3, 65, 24),
        (4, 130, 1025),
        (7, 16, 31),
        (16, 33, 64),
        (17, 1, 1),
        (40, 70, 1030),
        (277, 300, 65),  # more rows than one block, and weights of more than one chunk
    ],
)
def test_kernel(rows, n, k, dtype):
    x, weight, bias = normal(1, rows, k, dtype=dtype), normal(2, n, k, dtype=dtype) / k**0.5, normal(3, n, dtype=dtype)
    expected = exact(x) @ exact(weight).T
    assert_close(ffi.linear(x, weight, bias, x.dtype), expected + exact(bias))
    assert_close(ffi.linear(x, weight, None, jnp.dtype("float32")), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_linear(rows, dtype):
    x, weight, bias = normal(1, rows, 48, dtype=dtype), normal(2, 20, 48, dtype=dtype) / 7, normal(3, 20, dtype=dtype)
    expected = exact(x) @ exact(weight).T + exact(bias)
    names = [i.name for i in registry.find("linear").implementations if i.unsupported_reason(x, weight, bias) is None]
    assert "reference" in names
    for name in names:
        with use("linear", name):
            assert_close(ops.linear(x, weight, bias), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "first_equal"), [(2, 0), (4, 1), (9, 3), (40, 20), (300, 1)])
def test_equal_rows_at_the_end_are_computed_like_any(rows, first_equal, dtype):
    """Also where equal rows lie in between, or one number of one row differs."""
    x, weight, bias = normal(1, rows, 48, dtype=dtype), normal(2, 1040, 48, dtype=dtype) / 7, normal(3, 1040)
    x = x.at[first_equal:].set(x[first_equal])
    for each in (x, x[::-1], x.at[-1, -1].add(1), x.at[first_equal, 0].add(1)):
        expected = exact(each) @ exact(weight).T + exact(bias)
        assert_close(ffi.linear(each, weight, bias, each.dtype), expected)


def test_leading_dimensions_and_vectors_are_those_of_torch():
    x, weight, bias = normal(1, 2, 3, 8), normal(2, 5, 8), normal(3, 5)
    assert ops.linear(x, weight, bias).shape == (2, 3, 5)
    assert ops.linear(x[0, 0], weight, bias).shape == (5,)
    np.testing.assert_allclose(ops.linear(x, weight[0]), exact(x) @ exact(weight[0]), rtol=1e-5, atol=1e-5)
    assert ops.linear(x[:0], weight).shape == (0, 3, 5)


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_no_lowered_bfloat16_product_has_one_row_or_a_bfloat16_result(rows):
    x, weight = jnp.zeros((rows, 32), jnp.bfloat16), jnp.zeros((48, 32), jnp.bfloat16)
    with use("linear", "padded"):
        text = jax.jit(lambda x, w: ops.linear(x, w)).lower(x, weight).as_text()
    text += jax.jit(lambda x, w: ops.matmul(x, w.T)).lower(x, weight).as_text()
    dots = [line.split("->")[-1] for line in text.splitlines() if "dot_general" in line]
    assert len(dots) == 2
    for dot in dots:
        assert f"tensor<{max(rows, 4)}x48xf32>" in dot


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_is_four_for_a_tpu(dtype):
    x, weight = normal(1, 1, 32, dtype=dtype), normal(2, 48, 32, dtype=dtype)
    for product in (lambda x, w: ops.linear(x, w), lambda x, w: ops.matmul(x, w.T), lambda x, w: ops.matmul(x[0], w.T)):
        with registry.on_platform("tpu"):
            text = jax.jit(product).lower(x, weight).as_text()
            result = jax.jit(product)(x, weight)
        (dot,) = [line.split("->")[-1] for line in text.splitlines() if "dot_general" in line]
        assert "tensor<4x48xf32>" in dot
        assert_close(result.reshape(1, 48), exact(x) @ exact(weight).T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_order", [True, False])
def test_a_row_is_the_same_to_the_last_bit_whatever_is_beside_it(dtype, in_order):
    x, weight = normal(1, 67, 600, dtype=dtype), normal(2, 90, 600, dtype=dtype)

    def product(x):
        return exact(ffi.linear(x, weight, None, jnp.dtype("float32")))

    few = 0 if in_order or dtype == jnp.float32 else 4  # as many rows of a 16-bit type have an order of their own
    with ffi.batch_invariant(in_order):
        all_rows, alone = product(x), np.concatenate([product(x[i : i + 1]) for i in range(67)])
        for rows in (1, 2, 3, 4, 5, 6, 8, 11, 16, 17, 33):
            for begin in (0, 67 - rows):
                expected = alone if rows <= few else all_rows
                np.testing.assert_array_equal(product(x[begin : begin + rows]), expected[begin : begin + rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 33), (16, 32), (90, 600), (2101, 70), (1, 0)])
def test_few_rows(rows, n, k, dtype):
    x, weight, bias = normal(1, rows, k, dtype=dtype), normal(2, n, k, dtype=dtype), normal(3, n)
    got = exact(ffi.linear(x, weight, bias, jnp.dtype("float32")))
    np.testing.assert_allclose(got, exact(x) @ exact(weight).T + exact(bias), rtol=1e-5, atol=1e-4)


def test_more_rows_than_the_kernel_is_good_for_take_xla(monkeypatch):
    monkeypatch.setattr(ffi, "max_linear_rows", lambda dtype: 4)
    weight = jnp.zeros((48, 32), jnp.bfloat16)
    chosen = [
        registry.implementation_for("linear", jnp.zeros((n, 32), jnp.bfloat16), weight, None).name for n in (1, 4, 5)
    ]
    assert chosen == ["cpu-ffi", "cpu-ffi", "padded"]
    with (
        use("linear", "cpu-ffi"),
        pytest.raises(InvalidArgumentError, match="5 rows of bfloat16; the kernel is for up to 4"),
    ):
        ops.linear(jnp.zeros((5, 32), jnp.bfloat16), weight)


def test_gradients_and_vmap_go_through_the_kernel():
    x, weight, bias = normal(1, 3, 8), normal(2, 5, 8), normal(3, 5)

    def loss(x, weight, bias):
        return jnp.sum(jnp.sin(ops.linear(x, weight, bias)))

    with use("linear", "cpu-ffi"):
        got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, weight, bias)
        rows = jax.jit(jax.vmap(lambda row: ops.linear(row[None], weight, bias)[0]))(x)
    tensors = [torch.from_numpy(np.array(a)).requires_grad_() for a in (x, weight, bias)]
    torch.nn.functional.linear(*tensors).sin().sum().backward()
    for gradient, tensor in zip(got, tensors, strict=True):
        np.testing.assert_allclose(gradient, tensor.grad, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rows, ops.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((5, 8), (8, 3)),
        ((8,), (8,)),
        ((8,), (8, 3)),
        ((2, 8), (8,)),
        ((2, 1, 8), (8, 3)),
        ((2, 3, 1, 8), (2, 1, 8, 1)),
        ((8,), (2, 8, 3)),
    ],
)
def test_matmul_has_torchs_shapes(left, right, dtype):
    a, b = normal(1, *left, dtype=dtype), normal(2, *right, dtype=dtype)
    got = ops.matmul(a, b)
    assert got.shape == tuple(torch.matmul(torch.zeros(left), torch.zeros(right)).shape)
    assert_close(got, np.matmul(exact(a), exact(b)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_with_an_addend(dtype):
    bias, x, weight = normal(0, 7, dtype=dtype), normal(1, 2, 8, dtype=dtype), normal(2, 8, 7, dtype=dtype)
    product = exact(x) @ exact(weight)
    assert_close(ops.addmm(bias, x, weight), exact(bias) + product)
    assert_close(ops.addmm(bias, x, weight, beta=0.5, alpha=2.0), 0.5 * exact(bias) + 2 * product)
    assert_close(ops.addmm(jnp.full_like(bias, jnp.nan), x, weight, beta=0), product)
    assert_close(ops.bmm(x[None], weight[None]), product[None])
    assert_close(ops.baddbmm(bias, x[None], weight[None], alpha=3), exact(bias) + 3 * product[None])
    assert_close(ops.einsum("rk,kn->nr", x, weight), product.T)


def test_integers_stay_integers():
    a = jnp.array([[2**30, 1], [3, 4]], jnp.int32)
    np.testing.assert_array_equal(ops.matmul(a, jnp.eye(2, dtype=jnp.int32)), a)
    np.testing.assert_array_equal(ops.linear(a, jnp.eye(2, dtype=jnp.int32)), a)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.linear(jnp.zeros((2, 3)), jnp.zeros((4, 5))),
            r"linear: expected .* got float32\[2, 3\] and float32\[4, 5\]",
        ),
        (lambda: ops.linear(jnp.zeros((2, 3)), jnp.zeros((4, 3), jnp.bfloat16)), "of one dtype, got float32"),
        (lambda: ops.matmul(jnp.zeros((2, 3)), jnp.zeros((4, 3))), "matmul: expected"),
        (lambda: ops.addmm(jnp.zeros(2), jnp.zeros((2, 3)), jnp.zeros((4, 3))), "addmm: expected"),
        (
            lambda: ops.einsum("a,a->", jnp.zeros(2), jnp.zeros(2, jnp.bfloat16)),
            "einsum: expected operands of one dtype",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(InvalidArgumentError, match=message):
        call()
