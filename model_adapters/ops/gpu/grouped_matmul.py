"""Products of runs of rows with one weight each on GPUs: tokens sorted by expert.

XLA's compiler for GPUs multiplies every row with every expert, masks, and copies weights that are [experts, out, in].
Here a program has a tile of rows of one expert and some columns of the result (Gale et al., 2022, MegaBlocks). It reads
the expert's weight for these columns once, in either order of its axes; experts without rows are not read. The kernel
is lowered by Triton.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from model_adapters.ops import registry, spmd
from model_adapters.ops.cpu import ffi
from model_adapters.ops.gpu.launch import MIN_ROWS, NAME
from model_adapters.ops.gpu.split_kv import round_up_to_power
from model_adapters.ops.grouped_matmul import OP, Layout, reference, zero_after
from model_adapters.ops.linear import HALF
from model_adapters.ops.searchsorted import num_at_most

MAX_ROWS = 64
"""Rows of a tile: one product of a group of warps on a Hopper GPU."""
TILE_BYTES = 1 << 14
"""Of a weight that a program reads at a time: four such reads, which are under way together, fit in shared memory."""
MAX_COLUMNS = 128
NUM_STAGES = 4
MAX_NUMBERS = 1 << 31
"""Of all weights: numbers of 32 bits tell where one is."""


def _unsupported_reason(x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, layout: Layout) -> str | None:
    mesh = spmd.mesh_in_use()
    if mesh is not None and mesh.size > 1:
        return "XLA divides products on a mesh"
    if x.dtype not in HALF:
        return f"rows of {x.dtype}; the kernel is for bfloat16 and float16"
    if 0 in (*x.shape, *weight.shape):
        return "no rows, inputs or outputs"
    return f"weights of {weight.size} numbers" if weight.size >= MAX_NUMBERS else None


def tile_rows(num_rows: int, num_groups: int) -> int:
    """Returns the rows of a tile: a power of two near the mean of a group."""
    return min(MAX_ROWS, max(MIN_ROWS, round_up_to_power(-(-num_rows // num_groups))))


def tiles_of(group_sizes: jax.Array, num_rows: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the group of each tile of `size` rows, and the rows it has, int32[N] each.

    A tile has rows of one group. N is the most that `num_rows` can have; those behind the last one have none.
    """
    sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    counts = -(-sizes // size)
    last = jnp.cumsum(counts)
    number = jnp.arange(num_rows // size + min(len(sizes), num_rows), dtype=jnp.int32)
    group = jnp.minimum(num_at_most(last, number), len(sizes) - 1)
    begin = ends[group] - sizes[group] + (number - (last - counts)[group]) * size
    end = jnp.where(number < last[-1], jnp.minimum(begin + size, ends[group]), 0)
    return group, begin, end


def _kernel(refs: Any, size: int, num_columns: int, num_inputs: int, layout: Layout) -> None:
    """Computes one tile; rows and columns beyond the end are others again, and are not written."""
    groups, begins, ends, x, weight, out = refs
    tile = pl.program_id(0)
    group, begin, end = groups[tile], begins[tile], ends[tile]
    rows = begin + lax.iota(jnp.int32, size)
    columns = pl.program_id(1) * num_columns + lax.iota(jnp.int32, num_columns)
    (num_rows, num_in), num_out = x.shape, out.shape[1]
    own_rows, own_columns = jnp.minimum(rows, num_rows - 1), jnp.minimum(columns, num_out - 1)
    is_cut = num_in % num_inputs != 0

    def step(number: jax.Array, sums: jax.Array) -> jax.Array:
        inputs = number * num_inputs + lax.iota(jnp.int32, num_inputs)
        of_rows, axis = x.at[own_rows[:, None], inputs[None]], 1
        if layout == "enk":
            of_weight = weight.at[group, own_columns[:, None], inputs[None]]
        else:
            of_weight, axis = weight.at[group, inputs[:, None], own_columns[None]], 0
        if is_cut:
            mask, zero = inputs < num_in, jnp.zeros((), x.dtype)
            left = plgpu.load(of_rows, mask=jnp.broadcast_to(mask[None], (size, num_inputs)), other=zero)
            by_input = mask[None] if axis else mask[:, None]
            shape = (num_columns, num_inputs) if axis else (num_inputs, num_columns)
            right = plgpu.load(of_weight, mask=jnp.broadcast_to(by_input, shape), other=zero)
        else:
            left, right = plgpu.load(of_rows), plgpu.load(of_weight)
        return sums + lax.dot_general(left, right, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)

    @pl.when(begin < end)
    def _has_rows() -> None:
        sums = lax.fori_loop(0, pl.cdiv(num_in, num_inputs), step, jnp.zeros((size, num_columns), jnp.float32))
        mask = (rows < end)[:, None] & (columns < num_out)[None]
        plgpu.store(out.at[rows[:, None], columns[None]], sums.astype(out.dtype), mask=mask)


def _multiply(x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, layout: Layout) -> jax.Array:
    """Returns ``[T, N]``, anything behind the last group."""
    (num_rows, num_in), num_groups = x.shape, weight.shape[0]
    num_out = weight.shape[1 if layout == "enk" else 2]
    size = tile_rows(num_rows, num_groups)
    num_columns = min(MAX_COLUMNS if size == MAX_ROWS else MAX_COLUMNS // 2, max(MIN_ROWS, round_up_to_power(num_out)))
    num_inputs = min(TILE_BYTES // 2 // num_columns, max(MIN_ROWS, round_up_to_power(num_in)))
    table = tiles_of(group_sizes, num_rows, size)

    def body(*refs: Any) -> None:
        _kernel(refs, size, num_columns, num_inputs, layout)

    read = min(num_groups, num_rows) * num_in * num_out * weight.dtype.itemsize
    out: jax.Array = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((num_rows, num_out), x.dtype),
        grid=(len(table[0]), pl.cdiv(num_out, num_columns)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=NUM_STAGES),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * num_in * num_out, transcendentals=0, bytes_accessed=read + x.nbytes
        ),
        interpret=registry.platform() != "gpu",
        name=OP,
    )(*table, x, weight)
    return out


@registry.register(OP, NAME, ("gpu",), unsupported_reason=_unsupported_reason)
def grouped_matmul(x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, layout: Layout) -> jax.Array:
    """Computes a product for each tile of rows, sums in float32."""

    def kernel(x: jax.Array, weight: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return zero_after(_multiply(x, weight, group_sizes, layout=layout), group_sizes)

    def same(x: jax.Array, weight: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return reference(x, weight, group_sizes, layout=layout)

    return ffi.differentiable(kernel, same)(x, weight, group_sizes)
