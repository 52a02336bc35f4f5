"""Products with weights of 4 or 8 bits on TPUs, dequantized in vector memory alone.

XLA reads such weights as they are stored as well, but unpacks them anew for each tile of the result; by its schedule
for v6e 4 bits take 1.7 times less than bfloat16 that way, and 2.5 times less here, where pushing weights into the
matrix unit is what takes longest. Numbers and scales are input-major, so that a group's scales are one row of lanes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from model_adapters.ops import registry
from model_adapters.ops.compressed_weight import quantized_of
from model_adapters.ops.linear import OP, finish, pad_rows_to
from model_adapters.ops.quantized_kernels import by_device, local_sizes, not_for_kernels
from model_adapters.ops.quantized_weight import Scheme, looked_up

NAME = "tpu-quantized"
DTYPES = ("int4", "uint4", "int8")
TILE_COLUMNS = (1024, 2048)
"""Columns of a tile, the first that fits; else all columns of the weight."""
TILE_ROWS = (1024, 512, 256, 128)
"""Rows of a tile, the largest that fits; one that divides first."""
MAX_TILE = 1 << 21
"""Numbers in a tile: two of them and their scales take a few megabytes of vector memory."""
SUBLANES = 8
"""Rows of a register tile in float32: groups of a tile are a multiple, or all."""
VMEM_BYTES = 48 << 20
"""Vector memory that the compiler may use; the least of the chips has 64 MB."""
MAX_ROWS = 256
"""Rows of activations that are computed with a tile of the weight; of more, each part reads the weight again."""
ROW_TILE = 16
"""Rows that a bfloat16 register tile has."""
UNIT = 128
"""Columns that the matrix unit sums over; shorter groups are scaled before the product."""


def _tile(rows: int, columns: int, groups: int) -> tuple[int, int] | None:
    """Returns columns and rows of a weight's tile; None if the kernel cannot cut it into tiles."""
    group = columns // groups

    def fits(size: int) -> bool:
        return columns % size == 0 and size % group == 0 and size // group % SUBLANES == 0

    tile_k = next((size for size in TILE_COLUMNS if columns % size == 0 and (groups == 1 or fits(size))), columns)
    sizes = [size for size in TILE_ROWS if tile_k * size <= MAX_TILE]
    if columns % UNIT or rows < UNIT or not sizes:
        return None
    return tile_k, next((size for size in sizes if rows % size == 0), min(512, sizes[0]))


def _unsupported_reason(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> str | None:
    found = quantized_of(weight)
    if (reason := not_for_kernels(x, found, DTYPES)) is not None:
        return reason
    assert found is not None
    rows, columns, groups = local_sizes(found)
    return None if _tile(rows, columns, groups) else f"a weight of {rows} rows and {columns} columns cannot be cut"


@registry.register(OP, NAME, ("tpu",), unsupported_reason=_unsupported_reason, takes_precedence=True)
def multiply(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Computes with a quantized weight, on one device or on each device's part of it."""
    found = quantized_of(weight)
    assert found is not None
    product = functools.partial(_product, scheme=found.scheme)
    return finish(by_device(x, found, product), bias, x.dtype)


def _product(x: jax.Array, values: jax.Array, scale: jax.Array, *, scheme: Scheme) -> jax.Array:
    """Returns float32[rows, out] of ``x[rows, in]`` times ``values[in, out]``.

    Scales are float32[groups, out].
    """
    num_rows, (num_columns, size) = x.shape[0], values.shape
    groups = scale.shape[0]
    group = num_columns // groups
    tile = _tile(size, num_columns, groups)
    assert tile is not None
    tile_k, tile_n = tile
    tile_m = min(num_rows + -num_rows % ROW_TILE, MAX_ROWS)
    rows = pad_rows_to(x, 0, num_rows + -num_rows % tile_m)
    groups_of_tile = 1 if groups == 1 else tile_k // group
    return pl.pallas_call(
        functools.partial(_kernel, scheme=scheme, group=min(group, tile_k), is_by_row=groups == 1),
        out_shape=jax.ShapeDtypeStruct((len(rows), size), jnp.float32),
        grid=(len(rows) // tile_m, pl.cdiv(size, tile_n), num_columns // tile_k),
        in_specs=[
            pl.BlockSpec((tile_m, tile_k), lambda m, n, k: (m, k)),
            pl.BlockSpec((tile_k, tile_n), lambda m, n, k: (k, n)),
            pl.BlockSpec((groups_of_tile, tile_n), lambda m, n, k: (0 if groups == 1 else k, n)),
        ],
        out_specs=pl.BlockSpec((tile_m, tile_n), lambda m, n, k: (m, n)),
        scratch_shapes=[pltpu.VMEM((tile_m, tile_n), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=_cost(len(rows), values, scale),
        name="quantized_linear",
    )(rows, values, scale)[:num_rows]


def _kernel(
    x_ref: Any,
    values_ref: Any,
    scale_ref: Any,
    out_ref: Any,
    sums_ref: Any,
    *,
    scheme: Scheme,
    group: int,
    is_by_row: bool,
) -> None:
    """Adds the products of a tile to the sums of its rows; the last tile of a row writes them."""
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        sums_ref[...] = jnp.zeros_like(sums_ref)

    def product(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return jnp.dot(x, matrix, preferred_element_type=jnp.float32)

    def numbers(part: slice) -> jax.Array:
        return looked_up(values_ref[part], scheme) if scheme.table else values_ref[part].astype(jnp.bfloat16)

    parts = [slice(begin, begin + group) for begin in range(0, values_ref.shape[0], group)]
    if is_by_row:
        sums_ref[...] += product(x_ref[...], numbers(slice(None)).astype(jnp.bfloat16))
    elif group % UNIT == 0 and scheme.table is None:
        total = sums_ref[...]
        for number, part in enumerate(parts):
            total += product(x_ref[:, part], numbers(part)) * scale_ref[number : number + 1]
        sums_ref[...] = total
    else:
        scaled = [
            (numbers(part).astype(jnp.float32) * scale_ref[number : number + 1]).astype(jnp.bfloat16)
            for number, part in enumerate(parts)
        ]
        sums_ref[...] += product(x_ref[...], jnp.concatenate(scaled, axis=0))

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        sums = sums_ref[...] * scale_ref[0:1] if is_by_row else sums_ref[...]
        out_ref[...] = sums.astype(out_ref.dtype)


def _cost(num_rows: int, values: jax.Array, scale: jax.Array) -> pl.CostEstimate:
    num_columns, size = values.shape
    bits = 4 if str(values.dtype).endswith("int4") else 8
    return pl.CostEstimate(
        flops=2 * num_rows * num_columns * size,
        bytes_accessed=num_columns * size * bits // 8 + 4 * scale.size + 2 * num_rows * (num_columns + size),
        transcendentals=0,
    )
