"""Quantized products compiled for TPUs, an H100 and an H200: weights are read as they are stored, never made dense.

Tests with ``gpu`` in their names need XLA's plug-in for CUDA, all others libtpu.
"""

import functools
import json
import subprocess
import sys
from pathlib import Path

import gpu_compile
import pytest
import quantized_schedule
from quantized_shapes import FORMS, IN, OUT, ROWS, bytes_of, compile_lookup, compile_product
from tpu_shapes import CHIPS, mesh_of

OF_TPUS = [name for name in FORMS if not name.startswith("fp8")]  # a TPU's have become int8 when they are loaded
BY_ROW = [name for name in OF_TPUS if "by row" in name]
KERNEL = [name for name in OF_TPUS if "activations" not in name]
ACTIVATIONS = 2 * ROWS * (IN + OUT)
SMALL = 2 * ACTIVATIONS + (1 << 20)
"""Bytes of temporaries that are no weights: rounded rows, their scales, partial sums."""


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", BY_ROW)
def test_xla_writes_no_dense_weight_for_a_product(name, chip):
    compiled, _ = compile_product(FORMS[name], mesh_of(chip), "tpu", implementation="quantized")
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == pytest.approx(bytes_of(FORMS[name]) + 2 * ROWS * IN, rel=0.02)
    assert memory.temp_size_in_bytes <= SMALL


# On tpu7x the compiler turns an int8 table before each lookup, which is a copy of it (docs/quantization.md).
LOOKUPS = [(name, chip) for name in ("int8 by row", "int4 by 128", "fp4 by 32") for chip in CHIPS]
LOOKUPS.remove(("int8 by row", "tpu7x"))


@pytest.mark.parametrize(("name", "chip"), LOOKUPS)
def test_a_lookup_writes_no_dense_table(name, chip):
    memory = compile_lookup(FORMS[name], mesh_of(chip), "tpu").memory_analysis()
    assert memory.temp_size_in_bytes <= 8 * ROWS * IN


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", KERNEL)
def test_the_kernel_is_chosen_and_needs_no_temporaries(name, chip):
    compiled, implementation = compile_product(FORMS[name], mesh_of(chip), "tpu")
    assert implementation == "tpu-quantized"
    assert compiled.memory_analysis().temp_size_in_bytes <= 4 * ROWS * OUT + (1 << 16)  # the sums, in float32


@pytest.mark.parametrize(("out", "columns", "rows"), [(1280, 8192, 64), (8192, 3584, 8), (16032, 1024, 256)])
def test_the_kernel_takes_the_other_products_of_the_layer(out, columns, rows):
    compiled, implementation = compile_product(
        FORMS["int4 by 128"], mesh_of("v6e"), "tpu", out=out, columns=columns, rows=rows
    )
    assert implementation == "tpu-quantized"
    assert compiled.memory_analysis().temp_size_in_bytes <= 4 * rows * out + (1 << 16)


@functools.cache
def schedule(chip):
    """Time of a tile by the compiler's schedule, of its memory, and of bfloat16's memory; from a process of its own."""
    script = Path(quantized_schedule.__file__)
    made = subprocess.run([sys.executable, str(script), chip], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-4000:]
    return json.loads(made.stdout.splitlines()[-1])


# What a tile takes, the longer of schedule and memory, of the time that reading it in bfloat16 takes.
LIMITS = {
    ("v6e", "int4 by 128"): 0.45,
    ("v6e", "int4 by row"): 0.45,
    ("v6e", "int8 by 128"): 0.55,
    ("v5e", "int4 by 128"): 0.45,
    ("tpu7x", "int4 by 128"): 0.75,
}


@pytest.mark.parametrize(("chip", "name"), LIMITS)
def test_a_tile_takes_its_share_of_the_time_of_bfloat16_at_most(chip, name):
    times = schedule(chip)[name]
    assert 0.1 < max(times["schedule"], times["memory"]) / times["bfloat16"] <= LIMITS[chip, name]


OPTIONS = {"xla_gpu_autotune_level": "0"}
OF_GPUS = ["int8 by row", "fp8 by row", "fp8 by row, fp8 activations", "int8 by row, int8 activations"]


@pytest.mark.parametrize("gpu", gpu_compile.GPUS)
@pytest.mark.parametrize("name", OF_GPUS)
def test_xla_writes_no_dense_weight_on_a_gpu(name, gpu):
    compiled, implementation = compile_product(FORMS[name], gpu_compile.mesh(gpu), "gpu", options=OPTIONS)
    assert implementation == "quantized"
    partial_sums = 8 * 4 * ROWS * OUT  # of a product in up to eight parts of its columns
    assert compiled.memory_analysis().temp_size_in_bytes <= partial_sums < bytes_of(FORMS[name]) / 3


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("gpu", gpu_compile.GPUS)
@pytest.mark.parametrize("name", ["int4 by 128", "int4 by 32", "int8 by 128"])
def test_the_gpu_kernel_is_chosen_and_needs_partial_sums_alone(name, gpu):
    compiled, implementation = compile_product(FORMS[name], gpu_compile.mesh(gpu), "gpu", options=OPTIONS)
    assert implementation == "gpu-quantized"
    assert compiled.memory_analysis().temp_size_in_bytes <= 3 * 4 * ROWS * OUT + (1 << 16)
