"""Products with weights of 4 or 8 bits on GPUs: numbers become bfloat16 in registers.

XLA's compiler for GPUs does not fuse the conversion of 4 bits with scales by group into a product, so that it would
write the dense weight to memory in each step. It does so with a scale for each row, which is left to it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from model_adapters.ops import registry
from model_adapters.ops.compressed_weight import quantized_of
from model_adapters.ops.linear import OP, finish, pad_rows_to
from model_adapters.ops.quantized_kernels import by_device, local_sizes, not_for_kernels

NAME = "gpu-quantized"
DTYPES = ("int4", "int8")
TILE_ROWS = 64
"""Rows of the weight that a program computes."""
MAX_TILE_COLUMNS = 128
"""Columns that it reads at a time, a divisor of a group."""
MIN_ROWS, MAX_ROWS = 16, 64
"""Rows of activations: least that tensor cores multiply, and most whose sums fit in registers."""
MULTIPROCESSORS = 132
"""Of an H100 and an H200: fewer programs than two on each divide the columns, too."""
MAX_SPLITS = 8


def _unsupported_reason(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> str | None:
    found = quantized_of(weight)
    if (reason := not_for_kernels(x, found, DTYPES)) is not None:
        return reason
    assert found is not None
    if found.scheme.table is not None:
        return "values are indices of a table"
    rows, columns, groups = local_sizes(found)
    if groups == 1:
        return "one scale a row, which XLA fuses"
    if x.shape[0] > MAX_ROWS:
        return f"{x.shape[0]} rows; the kernel is for up to {MAX_ROWS}"
    if rows % TILE_ROWS or _tile_columns(columns // groups) < MIN_ROWS:
        return f"{rows} rows in groups of {columns // groups} columns cannot be cut into tiles"
    return None


def _tile_columns(group: int) -> int:
    """Returns the columns of a tile: the largest power of two that divides a group, limited."""
    return min(group & -group, MAX_TILE_COLUMNS)


def _num_splits(programs: int, num_tiles: int) -> int:
    """Returns in how many parts the columns are computed, so that `programs` fill a GPU.

    There are `num_tiles` tiles.
    """
    splits = 1
    while splits < MAX_SPLITS and splits * programs <= MULTIPROCESSORS and num_tiles % (2 * splits) == 0:
        splits *= 2
    return splits


@registry.register(OP, NAME, ("gpu",), unsupported_reason=_unsupported_reason, takes_precedence=True)
def multiply(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Computes with a quantized weight, on one device or on each device's part of it."""
    found = quantized_of(weight)
    assert found is not None
    return finish(by_device(x, found, _product), bias, x.dtype)


def _product(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns float32[rows, out] of ``x[rows, in]`` times ``values[in, out]``.

    Scales are float32[groups, out].
    """
    num_rows, (num_columns, size) = len(x), values.shape
    group = num_columns // scale.shape[0]
    tile = _tile_columns(group)
    rows = pad_rows_to(x, 0, max(MIN_ROWS, 1 << (num_rows - 1).bit_length()))
    programs = size // TILE_ROWS
    splits = _num_splits(programs, num_columns // tile)
    out = pl.pallas_call(
        functools.partial(_kernel, group=group, tile=tile, steps=num_columns // tile // splits),
        out_shape=jax.ShapeDtypeStruct((splits, len(rows), size), jnp.float32),
        grid=(programs, splits),
        in_specs=[
            pl.BlockSpec(rows.shape, lambda j, i: (0, 0)),
            pl.BlockSpec((num_columns, TILE_ROWS), lambda j, i: (0, j)),
            pl.BlockSpec((scale.shape[0], TILE_ROWS), lambda j, i: (0, j)),
        ],
        out_specs=pl.BlockSpec((None, len(rows), TILE_ROWS), lambda j, i: (i, 0, j)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=registry.platform() != "gpu",
        name="quantized_linear",
    )(rows, values, scale)
    return (out[0] if splits == 1 else out.sum(axis=0))[:num_rows]


def _kernel(x_ref: Any, values_ref: Any, scale_ref: Any, out_ref: Any, *, group: int, tile: int, steps: int) -> None:
    """Computes the sums of a tile of the weight's rows over one part of its columns."""
    first = pl.program_id(1) * steps

    def step(number: jax.Array, sums: jax.Array) -> jax.Array:
        begin = (first + number) * tile
        matrix = values_ref[pl.ds(begin, tile), :].astype(jnp.bfloat16)
        product = jnp.dot(x_ref[:, pl.ds(begin, tile)], matrix, preferred_element_type=jnp.float32)
        return sums + product * scale_ref[begin // group, :][None, :]

    zeros = jnp.zeros((x_ref.shape[0], values_ref.shape[1]), jnp.float32)
    out_ref[...] = jax.lax.fori_loop(0, steps, step, zeros)
