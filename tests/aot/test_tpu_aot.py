"""The TPU kernels compiled for v5e, v6e and tpu7x, without one: they compile and copy no pool; the time of decode.

Needs ``pip install libtpu`` in the version that fits the installed JAX.
"""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tpu_schedule
from tpu_shapes import CHIPS, Shape, compile_call

DECODE = (
    Shape(capacity=16384),
    Shape(heads=1, group=16, dim=64, sinks=True, options={"window": 128}),
    Shape(heads=2, group=8, dim=64, sinks=True, page=32),
    Shape(heads=5, group=3, dim=80, page=16, alibi=True, capacity=16384),
    Shape(heads=8, group=1, dim=96, page=32, dtype="float32", options={"window": 1000}),
    Shape(heads=4, group=2, dim=256, options={"softcap": 50.0}, capacity=16384),
    Shape(heads=2, group=4, dim=192, value_dim=128),
    Shape(heads=8, group=4, dim=128, dtype="float32", pool_dtype="bfloat16", capacity=16384),
    Shape(heads=2, group=4, dim=128, pool_dtype="int8", page=32, sinks=True),
    Shape(heads=4, group=7, dim=64, pool_dtype="int8", options={"window": 512}),
    Shape(heads=5, group=3, dim=80, page=32, dtype="float32", pool_dtype="int8", capacity=16384),
    Shape(heads=2, group=4, page=4096, num_pages=33),
)
RAGGED = (
    Shape(),
    Shape(heads=2, group=8, dim=64, sinks=True, page=32, options={"window": 128}),
    Shape(heads=3, group=3, dim=80, page=16, alibi=True, prefix=True),
    Shape(heads=2, group=2, dim=256, dtype="float32", options={"softcap": 50.0}),
    Shape(heads=2, group=4, pool_dtype="int8", page=32),
)
# At most this share of the time that reading a block takes, cycles in which nothing starts counted. v6e and tpu7x have
# two units for products; either takes a register of 16 keys in 4 cycles, because it turns them, and one of values in 2.
# The 1024 of each in a block of 8 MiB take 3072 cycles: 62 % of the time on tpu7x. No unit of tpu7x multiplies int8; as
# bfloat16, 4 MiB of it are as many registers: 123 % there, so that int8 takes longer than its memory. Those of v5e and
# v6e do, 32 keys a register: 34 % on v6e. Keys that stream past the queries instead take 4 cycles a register as well.
LIMIT = 0.7
# Heads of 64 are turned by half of their lanes before they are multiplied; the first products of a block wait for that.
LIMITS = {
    ("tpu7x", "long rows", str(Shape(heads=8, group=8, dim=64))): 0.73,
    ("tpu7x", "long rows", str(Shape(pool_dtype="int8"))): 1.31,
    # Branches keep products and starts of DMAs apart here, where the next but one block may be of another row.
    ("tpu7x", "ends", str(Shape())): 0.79,
    ("tpu7x", "ends", str(Shape(heads=8, group=1))): 0.79,
    ("tpu7x", "ends", str(Shape(heads=4, group=2, dim=256))): 0.79,
    ("tpu7x", "ends", str(Shape(heads=8, group=8, dim=64))): 0.79,
    ("tpu7x", "ends", str(Shape(pool_dtype="int8"))): 1.39,
}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shape", DECODE, ids=str)
def test_decode_compiles_without_a_copy(shape, chip):
    memory = compile_call("decode_attention", shape, chip).memory_analysis()
    assert memory.alias_size_in_bytes == shape.pool.size * shape.pool.dtype.itemsize
    assert memory.temp_size_in_bytes == 0


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_ragged_attention_compiles_and_copies_its_queries_at_most(shape, chip):
    memory = compile_call("paged_attention", shape, chip).memory_analysis()
    pool_bytes = shape.pool.size * shape.pool.dtype.itemsize
    assert memory.alias_size_in_bytes == pool_bytes
    # Queries and outputs by head, whose rows are whole registers; new int8 rows by tile.
    lanes = shape.dim + -shape.dim % 128
    itemsize = 4 if shape.dtype == "float32" else 2
    copied = 3 * shape.num_tokens * shape.heads * shape.group * lanes * itemsize
    tiles = shape.num_tokens // 32 + 2 * shape.rows + 2 if shape.pool_dtype == "int8" else 0
    images = 3 * tiles * shape.heads * 32 * shape.width
    assert memory.temp_size_in_bytes <= copied + images + (1 << 20)


@functools.cache
def schedule(chip):
    """The shares of DMA time of each shape, out of a process of its own."""
    script = Path(tpu_schedule.__file__)
    made = subprocess.run([sys.executable, str(script), chip], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-4000:]
    return json.loads(made.stdout.splitlines()[-1])


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("loop", ["long rows", "ends"])
@pytest.mark.parametrize("shape", tpu_schedule.SHAPES, ids=str)
def test_decode_takes_its_share_of_the_time_it_reads_at_most(shape, loop, chip):
    share = schedule(chip)[str(shape)][loop]
    assert 0.05 < share <= LIMITS.get((chip, loop, str(shape)), LIMIT)


TWO_LOOPS = """
 0x0   :  { %1 = nop }
 0x1 LB: > { %2 = nop }
 0x2   : > { %3 = nop }
 0x3 LB: >> { %4 = vmatpush3 }
 0x4   :  {} /* End region 7 */
 0x5   : >> { %5 = dma.general }
 0x6 LB: >>> { %6 = dma.general  ;;  %7 = nop }
 0x7   : >>> { %8 = dma.general }
 0x8   : >> { %9 = nop }
 0x9   : > { %10 = nop }
"""


def test_the_loop_is_found_and_its_dmas_are_counted_as_often_as_they_run():
    # Six bundles, and the two that start two DMAs run twice more for six pieces.
    assert tpu_schedule.inner_loop_cycles(TWO_LOOPS, 6) == [6 + 2 * 2]
