"""The layout of quantized weights on accelerators, and the TPU's product, interpreted: against numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_tpu import PARAMS
from jax.experimental.pallas import tpu as pltpu
from thorough import pairs

from model_adapters.ops import linear, on_platform, registry
from model_adapters.ops.compressed_weight import substituted
from model_adapters.ops.quantized_weight import FP4_DOUBLED, NF4, Scheme, dequantize, make_quantized, take_rows
from model_adapters.quantization.device_layout import lay_out

INT4, INT8, CODES, HALVES = range(-8, 8), range(-128, 128), range(16), FP4_DOUBLED
FORMS = {  # numbers, dtype that holds them on an accelerator, scheme
    "int8 by row": (INT8, "int8", Scheme(8, 256)),
    "int8 by 64": (INT8, "int8", Scheme(8, 64)),
    "int4 by row": (INT4, "int4", Scheme(4, 256)),
    "int4 by 32": (INT4, "int4", Scheme(4, 32)),
    "uint4 by 64": (CODES, "uint4", Scheme(4, 64)),
    "fp4 by 32": (HALVES, "uint4", Scheme(4, 32)),
    "nf4 by 64": (CODES, "uint4", Scheme(4, 64, table=NF4)),
    "int8 by row, int8 activations": (INT8, "int8", Scheme(8, 256, "int8")),
    "int8 by 64, int8 activations": (INT8, "int8", Scheme(8, 64, "int8")),
    "int4 by 64, int8 activations": (INT4, "int4", Scheme(4, 64, "int8")),
}


def make(form, *, out=48, columns=256, offset=False, order=False, dtype="float32", lead=()):
    numbers, _, scheme = FORMS[form]
    scheme = dataclasses.replace(scheme, group=columns) if form.endswith("by row") else scheme
    rng, shape = np.random.default_rng(0), (*lead, out, -(-columns // scheme.group))
    values = rng.choice(np.array(numbers), (*lead, out, columns)).astype(np.uint8 if scheme.table else np.int8)
    scale = rng.uniform(0.01, 0.03, shape).astype(np.float32) * rng.choice([-1, 1], shape)
    shift = rng.uniform(-0.1, 0.1, shape).astype(np.float32) if offset else None
    columns_of = rng.permutation(columns).astype(np.int32) if order else None
    return make_quantized("w", values, scale, shift, columns_of, scheme=dataclasses.replace(scheme, dtype=dtype))


def run(x, weight, bias=None, platform="tpu"):
    def call(x, weight):
        with substituted({"w": weight}) as arrays:
            return linear(x, arrays["w"], bias)

    with on_platform(platform), registry.record_calls() as calls:
        out = jax.jit(call)(x, weight)
    ((_, name),) = calls
    return np.asarray(out, np.float64), name


@pytest.mark.parametrize(("form", "has_both"), pairs(FORMS, [False, True], one_in=2), ids=str)
def test_the_layout_of_accelerators_has_the_same_numbers(form, has_both):
    """With an offset and an order of columns, and without either."""
    plain = make(form, offset=has_both, order=has_both)
    with on_platform("tpu"):
        held = lay_out(plain)
    assert (held.scheme.layout, str(held.values.dtype)) == ("input-major", FORMS[form][1])
    assert (held.shape, held.values.shape) == ((48, 256), (256, 48))
    expected = np.asarray(dequantize(plain))
    np.testing.assert_array_equal(dequantize(held), expected)
    np.testing.assert_array_equal(held.unpacked(), plain.unpacked())
    np.testing.assert_allclose(held.unpacked(), expected, rtol=0, atol=3e-7)  # compiled: one rounding less
    indices = jnp.asarray([[3, 3], [0, 47]])
    np.testing.assert_array_equal(take_rows(held, indices), expected[np.asarray(indices)])
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, 256)), jnp.float32)
    wanted, name = run(x, plain)
    got, name = run(x, held)
    assert name == "quantized"
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    if plain.scheme.act_dtype == "none":
        np.testing.assert_allclose(got, np.asarray(x, np.float64) @ expected.T.astype(np.float64), rtol=1e-4, atol=1e-4)


def test_float8_becomes_int8_on_a_tpu_that_does_not_multiply_it():
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.standard_normal((48, 256)), jnp.float8_e4m3fn)
    scale = rng.uniform(0.01, 0.03, (48, 2)).astype(np.float32)
    plain = make_quantized("w", values, scale, scheme=Scheme(8, 128, dtype="float32", source="fp8"))
    expected = np.asarray(dequantize(plain))
    with on_platform("gpu"):
        held = lay_out(plain)
    assert held.values.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(dequantize(held), expected)
    with on_platform("tpu"):
        rounded = lay_out(plain)
    assert (rounded.values.dtype, rounded.scheme.source, rounded.scheme.group) == (jnp.int8, "fp8 as int8", 128)
    steps = np.repeat(np.asarray(rounded.plain().scale), 128, axis=1)
    assert (np.abs(np.asarray(dequantize(rounded)) - expected) <= 0.5001 * steps).all()


KERNEL = {
    "int4 by 32": {},
    "uint4 by 64": {"offset": True},
    "fp4 by 32": {},
    "nf4 by 64": {},
    "int8 by 64": {"offset": True},
    "int4 by row": {"order": True},
    "int8 by row": {"offset": True},
}
SIZES = [(128, 256, 16), (640, 2048, 40), (200, 384, 1), (128, 256, 300)]
"""Rows and columns of a weight, and rows of activations: one tile, several, and rows that tiles do not divide."""


def check(got, x, plain, bias, *, rounds=False):
    """Beside float64; `rounds` says that weights are rounded to bfloat16 once they are scaled."""
    scaled = dataclasses.replace(plain, offset=None)
    matrix, exact, rows = (
        np.asarray(each, np.float64)
        for each in (dequantize(scaled, jnp.bfloat16 if rounds else jnp.float32), dequantize(scaled, jnp.float32), x)
    )
    matrix = matrix + np.asarray(dequantize(plain, jnp.float32), np.float64) - exact
    wanted = rows @ matrix.T + np.asarray(bias, np.float64)
    size = np.abs(rows) @ np.abs(matrix).T
    assert (np.abs(got - wanted) <= 2**-8 * np.abs(wanted) + 1e-6 * size).all()


def case(form, out, columns, num_rows, platform):
    plain = make(form, out=out, columns=columns, dtype="bfloat16", **KERNEL[form])
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((num_rows, columns)), jnp.bfloat16)
    bias = jnp.asarray(rng.standard_normal(out), jnp.bfloat16)
    with on_platform(platform):
        return plain, lay_out(plain), x, bias


@pytest.mark.parametrize(("form", "sizes"), pairs(KERNEL, SIZES, one_in=3), ids=str)
def test_the_tpu_kernel_multiplies_as_numpy(form, sizes, capfd):
    plain, held, x, bias = case(form, *sizes, "tpu")
    with pltpu.force_tpu_interpret_mode(PARAMS):
        got, name = run(x, held, bias)
        pltpu.reset_tpu_interpret_mode_state()
    assert name == "tpu-quantized"
    check(got, x, plain, bias, rounds=not form.endswith("by row"))
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize(("out", "columns", "num_rows"), [(128, 256, 16), (192, 1024, 3)])
@pytest.mark.parametrize("form", ["int4 by 32", "int8 by 64"])
def test_the_gpu_kernel_multiplies_as_numpy(form, out, columns, num_rows):
    plain, held, x, bias = case(form, out, columns, num_rows, "gpu")
    with registry.use("linear", "gpu-quantized"):
        got, name = run(x, held, bias, "cpu")
    assert name == "gpu-quantized"
    check(got, x, plain, bias)
