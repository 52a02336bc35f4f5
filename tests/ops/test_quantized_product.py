"""Products with quantized weights: the C++ kernel and XLA's operations against numpy with the same rounding."""

import dataclasses
import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from thorough import thorough

from model_adapters.ops import grouped_matmul, linear, registry, routed_matmul, use
from model_adapters.ops.compressed_weight import note_turned, quantized_of, substituted
from model_adapters.ops.cpu import build, ffi
from model_adapters.ops.linear import addmm, matmul
from model_adapters.ops.quantized_layout import from_pairs, to_pairs
from model_adapters.ops.quantized_weight import (
    FP4_DOUBLED,
    NF4,
    Scheme,
    dequantize,
    looked_up,
    make_quantized,
    take_rows,
)
from model_adapters.quantization.cpu_layout import in_4_bits, lay_out

# In quotes: the kernels are built when the first test runs, not when tests are collected.
needs_kernel = pytest.mark.skipif("ffi.missing() is not None", reason="no C++ kernels")


def make(seed, out, columns, scheme, *, lead=(), offset=False, order=False, half=False):
    rng = np.random.default_rng(seed)
    low, high = (-8, 8) if scheme.bits == 4 else (-128, 128)
    groups = -(-columns // scheme.group)
    scale = rng.uniform(0.01, 0.03, (*lead, out, groups)).astype(np.float32) * rng.choice([-1, 1], (*lead, out, groups))
    shift = rng.uniform(-0.1, 0.1, scale.shape).astype(np.float32) if offset else None
    scale, shift = (None if x is None else x.astype(np.float16 if half else np.float32) for x in (scale, shift))
    if scheme.table is not None:
        low, high = 0, 16
    values = rng.integers(low, high, (*lead, out, columns)).astype(np.int8)
    if scheme.numbers:
        values = np.where((values & 127) == 127, 0, values).astype(np.int8).view(scheme.numbers)  # 127 is no number
        scale, scheme = scale / 64, dataclasses.replace(scheme, numbers="")
    columns_of = rng.permutation(columns).astype(np.int32) if order else None
    return make_quantized("w", values, scale, shift, columns_of, scheme=scheme)


def rounded(x, group):
    """Rows as the processor's bytes hold them, times their scales: float64."""
    out = np.empty(x.shape, np.float64)
    for begin in range(0, x.shape[1], group):
        part = x[:, begin : begin + group].astype(np.float32)
        largest = np.abs(part).max(1, keepdims=True)
        inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
        out[:, begin : begin + group] = np.rint(part * inverse).astype(np.float64) * (largest / np.float32(127))
    return out


def expected(x, weight, bias=None):
    """The product in float64, of rows that are rounded as the scheme says."""
    scheme = weight.scheme
    matrix = np.asarray(dequantize(weight, jnp.float32), np.float64)
    x = np.asarray(x.astype(jnp.float32))
    order = np.arange(x.shape[1]) if weight.columns is None else np.asarray(weight.columns)
    rows = x[:, order].astype(np.float64)
    if scheme.act_dtype == "int8":
        rows = rounded(x[:, order], scheme.act_group or scheme.group)
    out = rows @ matrix[:, order].T
    return out if bias is None else out + np.asarray(bias, np.float64)


def run(x, weight, bias=None):
    """The op under jit, and the implementation that was chosen."""

    def call(x, weight):
        with substituted({"w": weight}) as arrays:
            return linear(x, arrays["w"], bias)

    with registry.record_calls() as calls:
        out = jax.jit(call)(x, weight)
    ((_, name),) = calls
    return np.asarray(out, np.float64), name


SCHEMES = {
    "int8 by 32": Scheme(8, 32, "int8", "float32"),
    "int8 by 64": Scheme(8, 64, "int8", "float32"),
    "int8 by 16": Scheme(8, 16, "int8", "float32"),
    "int8 by row": Scheme(8, 1 << 20, "int8", "float32"),
    "int8 of rows by 32": Scheme(8, 1 << 20, "int8", "float32", act_group=32),
    "int8 of floats": Scheme(8, 32, "none", "float32"),
    "int4 by 32": Scheme(4, 32, "int8", "float32"),
    "int4 by 128, rows by 32": Scheme(4, 128, "int8", "float32", act_group=32),
    "int4 by 16": Scheme(4, 16, "int8", "float32"),
    "int4 of floats": Scheme(4, 64, "none", "float32"),
    "nf4": Scheme(4, 64, "none", "float32", table=NF4),
    "fp4 by 16": Scheme(4, 16, "none", "float32", table=tuple(map(float, FP4_DOUBLED))),
    "fp8 by row": Scheme(8, 1 << 20, "none", "float32", numbers="float8_e4m3fn"),
    "fp8 by 32": Scheme(8, 32, "none", "float32", numbers="float8_e4m3fn"),
}
"""With `numbers` those of `make`; `Scheme` itself has it in the order of the kernels alone."""


# The kernel has passes of up to twelve rows; to XLA's operations their number makes no difference.
ROWS = [("plain", 5, False), ("plain", 5, True)]
ROWS += [pytest.param("cpu", *case, marks=needs_kernel) for case in ((1, False), (3, True), (9, False), (30, True))]


@pytest.mark.parametrize(("layout", "rows", "offset"), ROWS)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_products_are_those_of_numpy_with_the_same_rounding(scheme, offset, rows, layout):
    weight = make(rows, 40, 160, scheme, offset=offset, order=rows == 3)
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, 160)), jnp.float32)
    bias = jnp.asarray(rng.standard_normal(40), jnp.float32)
    held = lay_out(weight) if layout == "cpu" else weight
    assert held.scheme.layout == layout
    got, name = run(x, held, bias)
    assert name == ("cpu-quantized" if layout == "cpu" else "quantized")
    want = expected(x, weight, bias)
    np.testing.assert_allclose(got, want, rtol=3e-6, atol=3e-6 * np.abs(want).max())


@needs_kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("out", "columns"), [(1, 32), (17, 40), (64, 1000), (250, 48)])
def test_the_kernel_takes_any_size_and_dtype(dtype, out, columns):
    scheme = Scheme(8, 32 if columns != 48 else 16, "int8", dtype)
    weight = make(out, out, columns, scheme, half=True)
    x = jnp.asarray(np.random.default_rng(out).standard_normal((6, columns)), dtype)
    got, name = run(x, lay_out(weight))
    assert name == "cpu-quantized"
    want = expected(x, weight)
    tolerance = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(got, want, rtol=max(tolerance, 3e-6), atol=3e-6 * np.abs(want).max())


@needs_kernel
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("name", ["int8 of floats", "int4 of floats", "fp8 by row", "fp8 by 32", "nf4", "fp4 by 16"])
def test_rows_of_bfloat16_have_the_same_bits_for_any_number_of_rows(name, offset):
    """More columns than are made pairs of bfloat16 at a time, and more rows than meet them at a time."""
    scheme = dataclasses.replace(SCHEMES[name], dtype="bfloat16")
    weight = make(3, 40, 1104, scheme, offset=offset and scheme.group < 1104)
    x = jnp.asarray(np.random.default_rng(4).standard_normal((30, 1104)), jnp.bfloat16)
    with ffi.batch_invariant():
        got, chosen = run(x, lay_out(weight))
        assert chosen == "cpu-quantized"
        want = expected(x, weight)
        np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-5 * np.abs(want).max())
        for rows in (1, 2, 9, 13):
            np.testing.assert_array_equal(run(x[:rows], lay_out(weight))[0], got[:rows])


@needs_kernel
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.act_dtype == "int8"])
def test_rounded_rows_have_the_same_bits_for_any_number_of_rows(name, offset):
    """Sums of their products are exact, in tile registers and in vectors; rows of a step are not padded."""
    scheme = dataclasses.replace(SCHEMES[name], dtype="bfloat16")
    weight = make(5, 72, 1104, scheme, offset=offset and scheme.group < 1104, half=True)
    x = jnp.asarray(np.random.default_rng(6).standard_normal((37, 1104)), jnp.bfloat16)
    got, _ = run(x, lay_out(weight))
    want = expected(x, weight)
    np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-5 * np.abs(want).max())
    for rows in (1, 8, 9, 16, 17, 36):
        np.testing.assert_array_equal(run(x[:rows], lay_out(weight))[0], got[:rows])


@needs_kernel
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(
    ("out", "columns", "group"), [(40, 1104, 16), (40, 1104, 48), (200, 1088, 32), (24, 1536, 768)]
)
@pytest.mark.parametrize("kind", ["int8", "int4", "float8_e4m3fn", "nf4", "fp4"])
def test_many_rows_of_bfloat16_meet_numbers_as_they_are(kind, out, columns, group, offset):
    """In tile registers where the processor has them: numbers that are exact in bfloat16, in groups of any size."""
    table = {"nf4": NF4, "fp4": tuple(map(float, FP4_DOUBLED))}.get(kind)
    bits, numbers = (4 if kind in ("int4", "nf4", "fp4") else 8), kind if kind == "float8_e4m3fn" else ""
    scheme = Scheme(bits, group, "none", "bfloat16", table=table, numbers=numbers)
    weight = make(7, out, columns, scheme, offset=offset)
    for rows in (5, 33):
        x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, columns)), jnp.bfloat16)
        got, chosen = run(x, lay_out(weight))
        assert chosen == "cpu-quantized"
        want = expected(x, weight)
        np.testing.assert_allclose(got, want, rtol=2**-8, atol=1e-5 * np.abs(want).max())


PASSES = """
import ctypes, sys
import jax, numpy as np, jax.numpy as jnp
from model_adapters.ops.cpu import build, ffi
flags, tests, file = sys.argv[1:]
source = str(build.FOLDER / "quantized.cc")
# -O1: the code is that of the other instructions, and compiled in a fraction of the time.
options = [*build.FLAGS, "-O1", *flags.split(), "-shared", f"-I{jax.ffi.include_dir()}"]
build._run([*build.find_compiler(), *options, source, "-o", file])
library = ctypes.CDLL(file)
capsule = jax.ffi.pycapsule(library.tas_quantized_linear)
jax.ffi.register_ffi_target("tas_quantized_linear", capsule, platform="cpu")
ffi._loaded = lambda: library
sys.path.insert(0, tests)
from test_quantized_product import SCHEMES, expected, make, run
from model_adapters.quantization.cpu_layout import lay_out
for scheme in list(SCHEMES.values())[::2]:
    for rows in (1, 7):
        weight = make(rows, 40, 160, scheme, offset=rows == 7)
        x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, 160)), jnp.float32)
        got, name = run(x, lay_out(weight))
        assert name == "cpu-quantized", name
        want = expected(x, weight)
        np.testing.assert_allclose(got, want, rtol=3e-6, atol=3e-6 * np.abs(want).max())
print("all equal")
"""


@needs_kernel
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86 processors")
@pytest.mark.parametrize("flags", ["-mavx2 -mfma -mf16c", thorough("-msse2"), thorough("-march=skylake-avx512")])
def test_smaller_instruction_sets_give_the_same_products(flags, tmp_path):
    """Of AVX2, AVX-512 without VNNI, and the compiler's own vectors; a process registers one library."""
    if "avx512" in flags and "avx512bw" not in build.processor():
        pytest.skip("this processor has no AVX-512")
    arguments = [sys.executable, "-c", PASSES, flags, str(Path(__file__).parent), str(tmp_path / "kernel.so")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.stdout.strip() == "all equal", done.stderr[-2000:]


@needs_kernel
@pytest.mark.parametrize("bits", [8, 4])
def test_the_layout_keeps_every_number(bits):
    weight = make(0, 50, 72, Scheme(bits, 24 if bits == 9 else 72, "int8", "float32"), offset=True, order=True)
    held = lay_out(weight)
    assert held.scheme.layout == "cpu" and held.shape == weight.shape
    np.testing.assert_array_equal(held.plain().values, weight.values)
    np.testing.assert_array_equal(dequantize(held), dequantize(weight))
    indices = jnp.asarray([[0, 49, 17], [17, 3, 3]])
    np.testing.assert_array_equal(take_rows(held, indices), take_rows(weight, indices))
    assert held.values.nbytes == 64 * 96 * bits // 8


@needs_kernel
def test_unsigned_numbers_of_four_bits_are_stored_as_they_are():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 16, (16, 64)).astype(np.int8)
    scale, offset = (rng.uniform(0.01, 0.1, (16, 2)).astype(np.float16) for _ in range(2))
    weight = make_quantized("w", values, scale, offset, scheme=Scheme(4, 32, "int8", "float32"))
    held = lay_out(weight)
    assert held.scheme.zero == 0 and held.scale.dtype == jnp.float16
    np.testing.assert_array_equal(dequantize(held), dequantize(weight))
    x = jnp.asarray(rng.standard_normal((3, 64)), jnp.float32)
    got, name = run(x, held)
    assert name == "cpu-quantized"
    np.testing.assert_allclose(got, expected(x, weight), rtol=3e-6, atol=1e-5)


@needs_kernel
def test_unsigned_numbers_of_eight_bits_become_signed_ones():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (16, 64)).astype(np.uint8)
    scale = rng.uniform(0.01, 0.1, (16, 2)).astype(np.float16)
    offset = (-100 * scale.astype(np.float32)).astype(np.float32)
    weight = make_quantized("w", values, scale, offset, scheme=Scheme(8, 32, "none", "float32"))
    x = jnp.asarray(rng.standard_normal((3, 64)), jnp.float32)
    got, name = run(x, lay_out(weight))
    assert name == "cpu-quantized"
    np.testing.assert_allclose(got, expected(x, weight), rtol=3e-6, atol=1e-4)


@needs_kernel
def test_scales_of_other_rows_are_not_read():
    weight = lay_out(make(0, 32, 48, Scheme(8, 16, "int8", "float32")))
    bad = dataclasses.replace(weight, scale=weight.scale.at[1].set(jnp.nan))
    out, _ = run(jnp.ones((2, 48), jnp.float32), bad)
    assert np.isfinite(out[:, :16]).all() and np.isnan(out[:, 16:]).all()


@needs_kernel
@pytest.mark.parametrize("act_dtype", ["int8", "none"])
def test_a_row_has_the_same_bits_in_any_batch(act_dtype):
    weight = lay_out(make(0, 48, 256, Scheme(4, 32, act_dtype, "float32"), offset=True))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((23, 256)), jnp.float32)
    every, _ = run(x, weight)
    for count in (1, 2, 3, 7, 13):
        np.testing.assert_array_equal(run(x[:count], weight)[0], every[:count])


@needs_kernel
def test_rows_with_nan_or_infinity_are_nan_and_others_are_not():
    weight = lay_out(make(0, 16, 64, Scheme(8, 32, "int8", "float32")))
    x = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    x[1, 3], x[2, 40], x[3] = np.nan, np.inf, 0
    out, _ = run(jnp.asarray(x), weight)
    assert np.isnan(out[1:3]).all() and np.isfinite(out[0]).all() and (out[3] == 0).all()


def test_fp8_rows_are_rounded_to_fp8():
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.standard_normal((8, 64)) * 100, jnp.float8_e4m3fn)
    scheme = Scheme(8, 64, "float8_e4m3fn", "float32")
    weight = make_quantized("w", values, np.full((8, 1), 0.01, np.float32), scheme=scheme)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    scale = np.abs(x).max(1, keepdims=True) / 448
    numbers = np.asarray(jnp.asarray(x / scale, jnp.float8_e4m3fn), np.float64) * scale
    got, _ = run(jnp.asarray(x), weight)
    np.testing.assert_allclose(got, numbers @ (np.asarray(values, np.float64) * 0.01).T, rtol=1e-2, atol=0.02)


@needs_kernel
@pytest.mark.parametrize("act_scale", [None, 0.02])
def test_the_kernel_multiplies_rows_that_are_rounded_to_fp8(act_scale):
    scheme = Scheme(8, 64, "float8_e4m3fn", "float32", act_scale=act_scale, numbers="float8_e4m3fn")
    weight = make(0, 24, 64, scheme)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, 64)), jnp.float32)
    bias = jnp.asarray(np.random.default_rng(2).standard_normal(24), jnp.float32)
    held = lay_out(weight)
    assert held.scheme.layout == "cpu" and held.plain().scheme == weight.scheme
    got, name = run(x, held, bias)
    by_xla, other = run(x, weight, bias)
    assert (name, other) == ("cpu-quantized", "quantized")
    np.testing.assert_allclose(got, by_xla, rtol=1e-5, atol=1e-5)


@needs_kernel
def test_halves_of_fp4_become_places_in_a_table():
    values = np.asarray(FP4_DOUBLED, np.int8)[np.random.default_rng(0).integers(0, 16, (3, 16, 64))]
    scale = np.full((3, 16, 2), 0.25, np.float32)
    weight = make_quantized("w", values, scale, scheme=Scheme(4, 32, "none", "float32"))
    held = lay_out(weight)
    assert held.values.nbytes == 3 * 16 * 32 and held.scheme.table is not None
    np.testing.assert_array_equal(dequantize(held), dequantize(weight))


def test_halves_of_fp4_keep_their_signs_as_pairs_on_a_mesh():
    values = np.asarray(FP4_DOUBLED, np.int8)[np.random.default_rng(0).integers(0, 16, (16, 64))]
    weight = make_quantized("w", values, np.ones((16, 2), np.float32), scheme=Scheme(4, 32, "none", "float32"))
    held = in_4_bits(weight)
    places = from_pairs(jnp.asarray(to_pairs(np.asarray(held.values), held.scheme.zero)), held.scheme.zero)
    np.testing.assert_array_equal(looked_up(places, held.scheme), values)


def test_a_fixed_scale_of_activations_is_used():
    weight = make(0, 8, 64, Scheme(8, 64, "int8", "float32", act_scale=0.05))
    x = 3 * np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    numbers = np.clip(np.rint(x / np.float32(0.05)), -128, 127).astype(np.float64) * 0.05
    assert numbers.min() == -128 * 0.05
    got, name = run(jnp.asarray(x), lay_out(weight))
    assert name == "quantized"
    np.testing.assert_allclose(got, numbers @ np.asarray(dequantize(weight), np.float64).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("held_as", ["plain", pytest.param("cpu", marks=needs_kernel)])
def test_a_matrix_that_model_code_has_as_in_out_is_multiplied_as_it_is_stored(held_as):
    scheme = Scheme(8, 32, "int8", "float32", transposed=True)
    weight = make(0, 24, 64, scheme)
    held = lay_out(weight) if held_as == "cpu" else weight
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 64)), jnp.float32)
    bias = jnp.asarray(np.random.default_rng(2).standard_normal(24), jnp.float32)

    def call(x, weight):
        with substituted({"w": weight}) as arrays:
            assert arrays["w"].shape == (64, 24)
            return addmm(bias, x[0], arrays["w"]), matmul(x, arrays["w"])

    with registry.record_calls() as calls:
        sums, product = jax.jit(call)(x, held)
    assert calls == {("linear", "cpu-quantized" if held_as == "cpu" else "quantized")}
    plain = dataclasses.replace(weight, scheme=dataclasses.replace(scheme, transposed=False))
    np.testing.assert_allclose(sums, expected(x[0], plain, bias), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(product.reshape(10, 24), expected(x.reshape(10, 64), plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("held_as", ["plain", pytest.param("cpu", marks=needs_kernel)])
@pytest.mark.parametrize("act_dtype", ["none", "int8"])
@pytest.mark.parametrize("layout", ["ekn", "enk"])
def test_experts_are_multiplied_as_they_are_stored(layout, act_dtype, held_as):
    scheme = Scheme(4, 32, act_dtype, "float32", transposed=layout == "ekn")
    weight = make(0, 24, 64, scheme, lead=(3,), offset=True)
    held = lay_out(weight) if held_as == "cpu" else weight
    sizes = np.array([4, 0, 5])
    x = jnp.asarray(np.random.default_rng(1).standard_normal((11, 64)), jnp.float32)

    def call(x, weight):
        with substituted({"w": weight}) as arrays:
            return grouped_matmul(x, arrays["w"], jnp.asarray(sizes), layout=layout)

    with registry.record_calls() as calls:
        got = jax.jit(call)(x, held)
    assert calls == {("grouped_matmul", "cpu-quantized" if held_as == "cpu" else "quantized")}
    begin = 0
    for expert, size in enumerate(sizes):
        scheme = Scheme(4, 32, act_dtype, "float32")
        parts = (weight.values[expert], weight.scale[expert], weight.offset[expert])
        one = make_quantized("w", *parts, scheme=scheme)
        rows = slice(begin, begin + size)
        np.testing.assert_allclose(got[rows], expected(x[rows], one), rtol=1e-5, atol=1e-5)
        begin += size
    assert not np.asarray(got[begin:]).any()


@pytest.mark.parametrize("held_as", ["plain", pytest.param("cpu", marks=needs_kernel)])
@pytest.mark.parametrize("act_dtype", ["none", "int8"])
@pytest.mark.parametrize("in_vmap", [False, True])
def test_rows_name_quantized_experts(in_vmap, act_dtype, held_as):
    weight = make(0, 24, 64, Scheme(4, 32, act_dtype, "float32"), lead=(3,), offset=True)
    held = lay_out(weight) if held_as == "cpu" else weight
    ids = np.array([[0, 2], [2, 3], [0, 0], [-1, 1]])
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 64)), jnp.float32)
    bias = jnp.asarray(np.random.default_rng(2).standard_normal((3, 24)), jnp.float32)

    def call(x, weight):
        with substituted({"w": weight}) as arrays, use("grouped_matmul", "quantized"):  # vmap has no rule for XLA's own

            def product(x, ids):
                return routed_matmul(x, arrays["w"], ids, bias)

            if not in_vmap:
                return product(x, jnp.asarray(ids))
            return jax.vmap(product)(x[:, None], jnp.asarray(ids)[:, None])[:, 0]

    with registry.record_calls() as calls:
        got = jax.jit(call)(x, held)
    assert ("routed_matmul", "cpu-quantized" if held_as == "cpu" else "quantized") in calls
    for token, choice in np.ndindex(*ids.shape):
        if not 0 <= (expert := ids[token, choice]) < 3:
            assert not np.asarray(got[token, choice]).any()
            continue
        parts = (weight.values[expert], weight.scale[expert], weight.offset[expert])
        one = make_quantized("w", *parts, scheme=Scheme(4, 32, act_dtype, "float32"))
        wanted = expected(x[token][None], one, bias[expert])[0]
        np.testing.assert_allclose(got[token, choice], wanted, rtol=1e-5, atol=1e-5)


def test_the_stored_form_is_found_by_the_array_and_by_its_transpose():
    weight = make(0, 8, 32, Scheme(8, 32, dtype="float32"))
    with substituted({"a": weight, "b": weight}) as arrays:
        assert arrays["a"] is arrays["b"] and quantized_of(arrays["a"]) is weight
        turned = arrays["a"].T
        assert quantized_of(turned) is None
        note_turned(arrays["a"], turned)
        found = quantized_of(turned)
        assert found is not None and found.scheme.transposed and found.shape == (32, 8)
    assert quantized_of(arrays["a"]) is None


@needs_kernel
@pytest.mark.parametrize("name", ["int8 by 32", "int4 of floats"])
def test_equal_rows_at_the_end_are_computed_like_any(name):
    weight = make(7, 48, 128, SCHEMES[name])
    x = np.random.default_rng(8).standard_normal((20, 128)).astype(np.float32)
    x[7:] = x[7]
    out, _ = run(jnp.asarray(x), weight)
    np.testing.assert_allclose(out, expected(jnp.asarray(x), weight), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out[7:], np.broadcast_to(out[7], (13, 48)))
