"""SiLU and GELU against PyTorch, which computes 16-bit types in float32 too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from model_adapters import ops
from model_adapters.bridge.host_arrays import to_jax_zero_copy
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry, use

FUNCTIONS = {
    "silu": (ops.silu, torch.nn.functional.silu),
    "gelu": (ops.gelu, torch.nn.functional.gelu),
    "gelu_tanh": (
        lambda x: ops.gelu(x, approximate="tanh"),
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    ),
}
ULPS = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def spread(dtype, size=5000):
    """Small and large numbers of both signs, zeros among them; not a whole number of vectors."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal(size) * 10.0 ** rng.integers(-4, 2, size)
    values[::97] = 0.0
    return torch.tensor(values, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("implementation", ["reference", "cpu-ffi"])
@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("dtype", ULPS, ids=str)
def test_as_torch_has_it(dtype, kind, implementation):
    ours, theirs = FUNCTIONS[kind]
    x = spread(dtype)
    if (kind, implementation) == ("gelu", "cpu-ffi"):
        with use("activation", "cpu-ffi"), pytest.raises(InvalidArgumentError, match="no error function"):
            ours(to_jax_zero_copy(x))
        return
    with use("activation", implementation):
        out = ours(to_jax_zero_copy(x))
    assert out.dtype == jnp.dtype(str(dtype).removeprefix("torch."))
    exact = theirs(x.double()).numpy()
    # where tanh(x) is near -1, 1 + tanh(x) keeps few bits: in PyTorch's float32 as well
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=ULPS[dtype], atol=2e-6)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 300_000])
def test_any_size(size):
    x = spread(torch.bfloat16, size)
    with use("activation", "cpu-ffi"):
        out = ops.silu(to_jax_zero_copy(x))
    expected = torch.nn.functional.silu(x).float().numpy()
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2**-7, atol=1e-6)


def test_not_a_number_stays_one():
    with use("activation", "cpu-ffi"):
        assert np.isnan(np.asarray(ops.silu(jnp.asarray([jnp.nan])))).all()


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gradients_are_those_of_the_reference(kind):
    x = to_jax_zero_copy(spread(torch.float32, 100))

    def total(x):
        return jnp.sum(FUNCTIONS[kind][0](x) ** 2)

    with use("activation", "cpu-ffi"):
        got = jax.jit(jax.grad(total))(x)
    with use("activation", "reference"):
        expected = jax.jit(jax.grad(total))(x)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_cpus_take_the_kernel_and_an_unknown_approximation_is_refused():
    assert registry.implementation_for("activation", jnp.zeros(4), kind="silu").name == "cpu-ffi"
    assert registry.implementation_for("activation", jnp.zeros(4), kind="gelu").name == "reference"
    with pytest.raises(InvalidArgumentError, match="expected approximate 'none' or 'tanh', got 'erf'"):
        ops.gelu(jnp.zeros(4), approximate="erf")
