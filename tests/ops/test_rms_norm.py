"""Root-mean-square norms against float64, and which of a model's modules reach the op."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from model_adapters import ops
from model_adapters.bridge.extract import extract_jax
from model_adapters.bridge.host_arrays import to_jax_zero_copy
from model_adapters.errors import InvalidArgumentError
from model_adapters.lowerings import install
from model_adapters.ops import registry, use
from model_adapters.program import rms_norm

install.install()
EPS = 1e-6
ROUNDING = {"float32": 2**-22, "bfloat16": 2**-7, "float16": 2**-10}  # of the quotient and of the result
SUM = 2**-22  # of the root of a float32 sum in XLA's order: 128 in a row for 1024 squares with eight lanes


def exact(x, weight):
    wide = np.asarray(x, np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * np.asarray(weight, np.float64)


def case(shape, dtype, weight_dtype=None):
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.standard_normal(shape) * 3, dtype)
    return x, jnp.asarray(1 + rng.standard_normal(shape[-1]) / 4, weight_dtype or dtype)


@pytest.mark.parametrize("implementation", ["reference", "cpu-ffi"])
@pytest.mark.parametrize("rounds_first", [True, False])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 5, 64), (300, 1024)], ids=str)
def test_it_is_the_quotient_times_the_weight(shape, dtype, rounds_first, implementation):
    x, weight = case(shape, dtype)
    with use("rms_norm", implementation):
        out = ops.rms_norm(x, weight, EPS, rounds_first=rounds_first)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    steps = 2**-24 if dtype == "float16" else 0  # of the smallest numbers that float16 has
    rounding = ROUNDING[dtype] + (SUM if implementation == "reference" else 0)
    np.testing.assert_allclose(np.asarray(out, np.float64), exact(x, weight), rtol=rounding, atol=steps)


@pytest.mark.parametrize("rounds_first", [True, False])
def test_a_16_bit_norm_is_rounded_where_models_round_it(rounds_first):
    x, weight = case((64, 256), "bfloat16", None if rounds_first else "float32")
    wide = torch.tensor(np.asarray(x, np.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    scale = torch.tensor(np.asarray(weight, np.float32))
    expected = (normed.bfloat16().float() if rounds_first else normed) * scale
    with use("rms_norm", "cpu-ffi"):
        out = ops.rms_norm(x, weight, EPS, rounds_first=rounds_first)
    differs = np.asarray(out, np.float32) != expected.bfloat16().float().numpy()
    assert differs.mean() < 2e-3  # sums in another order move a quotient over a boundary now and then


def test_a_row_is_the_same_in_any_company():
    x, weight = case((300, 1000), "bfloat16")
    with use("rms_norm", "cpu-ffi"):
        together = ops.rms_norm(x, weight, EPS, rounds_first=True)
        alone = jnp.concatenate([ops.rms_norm(x[i : i + 1], weight, EPS, rounds_first=True) for i in range(0, 300, 37)])
    np.testing.assert_array_equal(np.asarray(together[::37]), np.asarray(alone))


def test_gradients_are_those_of_the_reference():
    arrays = case((4, 48), "float32")

    def total(x, weight):
        return jnp.sum(ops.rms_norm(x, weight, EPS, rounds_first=True) ** 3)

    with use("rms_norm", "cpu-ffi"):
        got = jax.jit(jax.grad(total, (0, 1)))(*arrays)
    with use("rms_norm", "reference"):
        expected = jax.jit(jax.grad(total, (0, 1)))(*arrays)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_weights_of_another_16_bit_type_are_refused():
    x, weight = case((4, 48), "bfloat16", "float16")
    with use("rms_norm", "cpu-ffi"), pytest.raises(InvalidArgumentError, match="weight is float16; the kernel has"):
        ops.rms_norm(x, weight, EPS, rounds_first=True)


def run_in_jax(norm, x):
    """What `norm` makes of `x` by JAX, as a model's part, and the implementations that were traced."""
    weights, call = extract_jax(norm)
    with rms_norm.intercepted(norm), registry.record_calls() as record:
        out = jax.jit(call)(weights, (to_jax_zero_copy(x),))
    return torch.from_dlpack(out), record


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_with_code_we_know_reach_the_op(kind, dtype):
    torch.manual_seed(0)
    norm = kind(96, EPS).to(dtype)
    torch.nn.init.normal_(norm.weight, 0.5, 0.3)
    x = torch.randn(2, 7, 96).to(dtype)
    with torch.no_grad():
        expected = norm(x)
    out, record = run_in_jax(norm, x)
    assert record == {("rms_norm", "cpu-ffi")}
    torch.testing.assert_close(out, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(norm(x), expected)  # as it was
    assert "forward" not in vars(norm)


def test_a_norm_with_other_code_runs_its_own():
    norm = Olmo2RMSNorm(96, EPS)
    x = torch.randn(3, 96)
    out, record = run_in_jax(norm, x)
    assert record == {("row_sum", "cpu-ffi")}
    torch.testing.assert_close(out, norm(x).detach(), rtol=1e-6, atol=1e-6)


def test_a_norm_of_mixed_types_runs_its_own_code():
    norm = Qwen3RMSNorm(96, EPS)  # float32 weights make a float32 result, as the model has it
    out, record = run_in_jax(norm, torch.randn(3, 96).bfloat16())
    assert record == {("row_sum", "cpu-ffi")}
    assert out.dtype == torch.float32
