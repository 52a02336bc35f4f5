"""Products with adapters against float64 loops; rows without an adapter are bit-equal to those of the weight alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from model_adapters.errors import UnsupportedModelError
from model_adapters.ops import linear, registry, use
from model_adapters.ops.compressed_weight import substituted
from model_adapters.ops.lora_weight import LoraWeight, adapters_told
from model_adapters.ops.quantized_weight import Scheme, make_quantized

TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-7, "float16": 2**-9}
SIZES = [(1, 8, 8, 1, 1), (3, 17, 19, 2, 3), (40, 64, 300, 8, 16), (300, 128, 48, 4, 6)]


def case(num_rows, num_in, num_out, num_adapters, rank, dtype):
    rng = np.random.default_rng(num_rows)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / 4, dtype)  # noqa: E731
    ids = jnp.asarray(rng.integers(0, num_adapters + 1, num_rows), jnp.int32)
    a, b = draw(num_adapters, rank, num_in), draw(num_adapters, rank, num_out)
    return draw(num_rows, num_in), draw(num_rows, num_out), ids, a, b


def exact(x, sums, ids, a, b):
    x, sums, a, b = (np.asarray(part, np.float64) for part in (x, sums, a, b))
    own = np.asarray(ids)
    added = [np.zeros_like(sums[0]) if not i else x[row] @ a[i - 1].T @ b[i - 1] for row, i in enumerate(own)]
    return sums + np.stack(added)


@pytest.mark.parametrize("implementation", ["reference", "cpu-ffi"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_row_has_its_own_adapter(sizes, dtype, implementation):
    args = case(*sizes, dtype)
    with use("lora", implementation):
        out = registry.call("lora", *args)
    assert (out.shape, out.dtype) == (args[1].shape, args[1].dtype)
    np.testing.assert_allclose(
        np.asarray(out, np.float64), exact(*args), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4
    )
    none = np.asarray(args[2]) == 0
    assert np.array_equal(np.asarray(out)[none], np.asarray(args[1])[none])


def test_a_row_is_the_same_whatever_else_is_there():
    x, sums, ids, a, b = case(40, 64, 300, 8, 16, "float32")
    whole = np.asarray(registry.call("lora", x, sums, ids, a, b))
    for row in (0, 7, 39):
        part = registry.call("lora", x[row : row + 1], sums[row : row + 1], ids[row : row + 1], a, b)
        assert np.array_equal(np.asarray(part)[0], whole[row])
    own = a[ids[7] - 1 : ids[7]], b[ids[7] - 1 : ids[7]]  # alone among the matrices
    one = jnp.minimum(ids[7:8], 1)
    assert np.array_equal(np.asarray(registry.call("lora", x[7:8], sums[7:8], one, *own))[0], whole[7])


def test_equal_rows_at_the_end_may_have_other_adapters():
    x, sums, _, a, b = case(4, 16, 16, 2, 2, "float32")
    x, sums = jnp.tile(x[:1], (4, 1)), jnp.tile(sums[:1], (4, 1))
    args = x, sums, jnp.array([1, 1, 2, 2], jnp.int32), a, b
    np.testing.assert_allclose(np.asarray(registry.call("lora", *args)), exact(*args), rtol=1e-5, atol=1e-6)


def forms(weight, scheme):
    scale = np.abs(np.asarray(weight)).max(1, keepdims=True) / 127
    values = np.round(np.asarray(weight) / scale).astype(np.int8)
    yield weight
    yield make_quantized("w", values, scale.astype(np.float32), scheme=scheme)


def test_a_product_finds_the_adapters_of_arrays_and_quantized_weights():
    x, _, ids, a, b = case(9, 32, 48, 3, 4, "float32")
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((48, 32)), jnp.float32)
    for base in forms(weight, Scheme(bits=8, group=32, dtype="float32")):
        with substituted({"w": base}) as arrays:
            alone = linear(x, arrays["w"])
        with substituted({"w": LoraWeight(base, a, b)}) as arrays:
            assert np.array_equal(np.asarray(linear(x, arrays["w"])), np.asarray(alone))  # nobody names an adapter
            with adapters_told(ids):
                out = linear(x[None, :, :], arrays["w"])[0]
        np.testing.assert_allclose(np.asarray(out), exact(x, alone, ids, a, b), rtol=1e-4, atol=1e-5)
        none = np.asarray(ids) == 0
        assert none.any() and np.array_equal(np.asarray(out)[none], np.asarray(alone)[none])


def test_inputs_without_a_row_for_each_token_are_refused():
    _, _, ids, a, b = case(9, 32, 48, 3, 4, "float32")
    weight = jnp.zeros((48, 32), jnp.float32)
    with substituted({"w": LoraWeight(weight, a, b)}) as arrays, adapters_told(ids):
        assert linear(jnp.zeros((1, 9, 5, 32)), arrays["w"]).shape == (1, 9, 5, 48)
        with pytest.raises(UnsupportedModelError, match=r"expected layers whose input has a row for each of 9 tokens"):
            linear(jnp.zeros((5, 9, 32)), arrays["w"])
