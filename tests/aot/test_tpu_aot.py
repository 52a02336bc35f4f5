"""The TPU kernels compiled for v5e, v6e and tpu7x, without one: they compile and copy no pool.

Needs ``pip install libtpu`` in the version that fits the installed JAX.
"""

import re

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tpu_shapes import CHIPS, IN_8_BITS, Shape, compile_call, mesh_of

from model_adapters.ops import linear, on_platform
from model_adapters.ops.linear import product_sums

LATENTS = {"heads": 1, "dim": 576, "value_dim": 512, "options": {"value_begin": 0}}  # of DeepSeek-V3
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
    Shape(heads=2, group=4, dim=128, pool_dtype="float8_e4m3fn", page=32, sinks=True),
    Shape(heads=4, group=7, dim=64, pool_dtype="float8_e4m3fn", options={"window": 512}),
    Shape(**LATENTS, group=128),
)
RAGGED = (
    Shape(),
    Shape(heads=2, group=8, dim=64, sinks=True, page=32, options={"window": 128}),
    Shape(heads=3, group=3, dim=80, page=16, alibi=True, prefix=True),
    Shape(heads=2, group=2, dim=256, dtype="float32", options={"softcap": 50.0}),
    Shape(heads=4, group=2, dim=256, images=True, options={"window": 1024}),
    Shape(heads=2, group=4, pool_dtype="int8", page=32),
    Shape(heads=2, group=4, pool_dtype="float8_e4m3fn", page=32),
    Shape(**LATENTS, group=32, pool_dtype="int8"),
    Shape(heads=12, group=1, dim=64),
    Shape(heads=8, group=2, dim=64, rows=8, num_tokens=40),  # the last block of queries ends behind the tokens
    Shape(rows=1, num_tokens=5),
)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shape", DECODE, ids=str)
def test_decode_compiles_without_a_copy(shape, chip):
    memory = compile_call("decode_attention", shape, chip).memory_analysis()
    assert memory.alias_size_in_bytes == shape.pool.size * shape.pool.dtype.itemsize
    assert memory.temp_size_in_bytes == 0


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_ragged_attention_compiles_and_copies_its_queries_once_at_most(shape, chip):
    compiled = compile_call("paged_attention", shape, chip)
    assert " while(" not in compiled.as_text()  # a loop, and what depends on it, would be computed again in each layer
    memory = compiled.memory_analysis()
    pool_bytes = shape.pool.size * shape.pool.dtype.itemsize
    assert memory.alias_size_in_bytes == pool_bytes
    # Queries by head, whose rows are whole registers; new rows in 8 bits by tile.
    lanes = shape.dim + -shape.dim % 128
    itemsize = 4 if shape.dtype == "float32" else 2
    copied = shape.num_tokens * shape.heads * shape.group * lanes * itemsize
    tiles = shape.num_tokens // 32 + 2 * shape.rows + 2 if shape.pool_dtype in IN_8_BITS else 0
    images = 3 * tiles * shape.heads * 32 * shape.width
    assert memory.temp_size_in_bytes <= copied + images + (1 << 20)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_product_of_one_row_takes_the_matrix_unit(dtype, chip):
    """By the compiler's estimates, beside XLA's product of two rows, which it gives the matrix unit by itself."""

    def cycles(function, num_rows):
        placed = NamedSharding(mesh_of(chip), PartitionSpec())
        args = [jax.ShapeDtypeStruct(shape, dtype, sharding=placed) for shape in ((num_rows, 4096), (14336, 4096))]
        with on_platform("tpu"):
            text = jax.jit(function).trace(*args).lower(lowering_platforms=("tpu",)).compile().as_text()
        return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))

    assert cycles(linear, 1) <= 1.5 * cycles(product_sums, 2)
