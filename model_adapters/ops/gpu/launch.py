"""Calls of the GPU kernel: which it refuses, the sizes of its tiles, and how splits are put together."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from model_adapters.ops import registry
from model_adapters.ops.attention_args import AttentionArgs
from model_adapters.ops.gpu.split_kv import num_splits, round_up_to_power
from model_adapters.ops.gpu.triton_kernel import (
    Inputs,
    Tile,
    TritonFeatures,
    TritonProgram,
    combine_kernel,
    kernel,
    pieces,
)

NAME = "gpu-triton"
MIN_ROWS = 16  # and least keys: no product on tensor cores is smaller
MAX_BLOCK_BYTES = 32 << 10  # keys and values of a block: two of them fit into the shared memory of any GPU from sm_80
# A page is found before it is read, so that each block on its way takes two of the compiler's stages. A decode step
# only reads, and has two blocks on their way; a tile of many queries, or in float32, works on one while one comes.
STAGES_OF_ONE = 5
STAGES_OF_MANY = 3
MAX_GROUP = 128
MAX_DIM = 576
MAX_KEYS = 64
MAX_FLOAT32_KEYS = 32  # for queries in float32
# Numbers in the queries of a tile, rows times dimensions, beside which warps hold what they sum without spilling: in 16
# bits; and in float32, which is either three terms of 16 bits or multiplied by threads, with operands in registers.
MAX_QUERIES = 128 * 256
MAX_FLOAT32_QUERIES = 32 * 128
NARROW_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")  # all their values exist in any 16-bit float
POOL_DTYPES = {
    "float32": ("float32", "bfloat16", *NARROW_DTYPES),
    "bfloat16": ("bfloat16", *NARROW_DTYPES),
    "float16": ("float16", *NARROW_DTYPES),
}


def unsupported_reason(q: jax.Array, v: jax.Array, pool: jax.Array, page_table: jax.Array) -> str | None:
    """Returns why the kernel cannot take ``q[T, Hq, D]``, ``v[T, H, Dv]``, the pool or the page table, or None."""
    if str(pool.dtype) not in POOL_DTYPES.get(str(q.dtype), ()):
        return f"q is {q.dtype} and pool {pool.dtype}; the kernel has " + "; ".join(
            f"{one} over {', '.join(pools)}" for one, pools in POOL_DTYPES.items()
        )
    if 0 in q.shape or v.shape[2] == 0 or page_table.shape[0] == 0:
        return f"q{list(q.shape)}, values of {v.shape[2]}, {page_table.shape[0]} sequences: nothing to compute"
    group = q.shape[1] // pool.shape[1]
    if group > MAX_GROUP:
        return f"{group} query heads read one kv head; the kernel has room for {MAX_GROUP}"
    if max(q.shape[2], v.shape[2]) > MAX_DIM:
        return f"keys of {q.shape[2]} and values of {v.shape[2]}; the kernel has room for {MAX_DIM}"
    if least_rows(group) * max(q.shape[2], v.shape[2]) > max_queries(q):
        return f"{group} query heads of {q.shape[2]} and {v.shape[2]} in {q.dtype}; the kernel has too few registers"
    if pool.size > 2**31 and pool.size * pool.dtype.itemsize <= 2**32:
        # Pallas' Triton lowering counts elements in 32 signed bits up to 4 GiB.
        return f"a pool of {pool.size} elements in {pool.dtype}; the kernel has up to {2**31}, or more than {2**32}"
    return None


def max_queries(q: jax.Array) -> int:
    """How many numbers the queries of a tile may have, rows times dimensions."""
    return MAX_FLOAT32_QUERIES if q.dtype == jnp.float32 else MAX_QUERIES


def least_rows(group: int) -> int:
    """Rows that the query heads of one token take."""
    return max(MIN_ROWS, round_up_to_power(group))


def features_of(q: jax.Array, pool: jax.Array, args: AttentionArgs) -> TritonFeatures:
    """Returns the kernel's features; queries float32[T, Hq, D] on a narrower pool are three terms in bfloat16."""
    has_terms = q.dtype == jnp.float32 and pool.dtype != jnp.float32
    dtype, num_terms = (jnp.dtype(jnp.bfloat16), 3) if has_terms else (q.dtype, 1)
    return TritonFeatures(dtype, num_terms, args.scale, args.window, args.softcap, args.prefix_lens is not None)


def tile_for(
    num_rows: int, num_queries: int, num_items: int, q: jax.Array, v: jax.Array, pool: jax.Array, reach: int
) -> Tile:
    """Sizes of a tile of `num_rows` rows and `num_queries` queries, of which none sees more than `reach` keys."""
    heads, group = pool.shape[1], q.shape[1] // pool.shape[1]
    row_bytes = (q.shape[2] + v.shape[2]) * max(2, pool.dtype.itemsize)  # 8 bits become 16, in registers
    num_keys = MAX_FLOAT32_KEYS if q.dtype == jnp.float32 else MAX_KEYS
    while num_keys > MIN_ROWS and num_keys * row_bytes > MAX_BLOCK_BYTES:
        num_keys //= 2
    reads_only = num_queries == 1 and q.dtype != jnp.float32
    num_stages = STAGES_OF_ONE if reads_only else STAGES_OF_MANY
    num_sums = num_rows * sum(piece.size for piece in pieces(v.shape[2]))
    is_large = num_rows >= 128 or num_sums > 8192
    if q.dtype == jnp.float32:
        is_large = pool.dtype == jnp.float32 or num_rows > MIN_ROWS
    splits = num_splits(num_items * heads, reach)
    return Tile(num_rows, num_queries, num_keys, group, splits, 8 if is_large else 4, num_stages)


def attend(
    items: jax.Array,
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    args: AttentionArgs,
    *,
    value_dim: int,
    features: TritonFeatures,
    tile: Tile,
    name: str,
) -> jax.Array:
    """Runs the kernel over `items`, which between them have every token once; ``[T, Hq, Dv]`` in q's dtype.

    Where programs are traced for another platform than a GPU the kernel is interpreted: for tests, and slow.
    """
    num_tokens, query_heads, dim = q.shape
    _, heads, page, width = pool.shape
    optional = {"sinks": args.sinks, "alibi": args.alibi_slopes, "k_scale": args.k_scale, "v_scale": args.v_scale}
    given = {key: array for key, array in optional.items() if array is not None}
    # The last dimension of the pool is never cut and the others are one: a bitcast.
    arrays = [items, page_table.reshape(-1), q, pool.reshape(-1, width), *given.values()]
    out_shape: list[Any] = [jax.ShapeDtypeStruct((num_tokens, query_heads, value_dim), q.dtype)]
    if tile.num_splits > 1:
        splits = (tile.num_splits, num_tokens, query_heads)
        out_shape = [jax.ShapeDtypeStruct((*splits, value_dim), jnp.float32), jax.ShapeDtypeStruct(splits, jnp.float32)]

    def body(*refs: Any) -> None:
        inputs = Inputs(*refs[:4], **dict(zip(given, refs[4:], strict=False)))
        out, logs = (*refs[len(arrays) :], None)[:2]
        kernel(TritonProgram(inputs, features, tile, heads, page, page_table.shape[1], dim, value_dim), out, logs)

    made = pl.pallas_call(
        body,
        out_shape=out_shape,
        grid=(items.shape[0], heads, tile.num_splits),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        cost_estimate=cost(items.shape[0], q, pool, page_table, value_dim),
        interpret=registry.platform() != "gpu",
        name=name,
    )(*arrays)
    return made[0] if tile.num_splits == 1 else combine(made[0], made[1], args.sinks, q.dtype, name)


def cost(num_items: int, q: jax.Array, pool: jax.Array, page_table: jax.Array, value_dim: int) -> pl.CostEstimate:
    """What a call costs where all sequences are as long as their pages allow: the most there is to plan for."""
    num_tokens, query_heads, dim = q.shape
    capacity = page_table.shape[1] * pool.shape[2]
    read = min(page_table.shape[0], num_items) * capacity * pool.shape[1] * (dim + value_dim) * pool.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * num_tokens * query_heads * capacity * (dim + value_dim),
        transcendentals=num_tokens * query_heads * capacity,
        bytes_accessed=read + math.prod(q.shape[:2]) * (dim + value_dim) * q.dtype.itemsize,
    )


def combine(outs: jax.Array, logs: jax.Array, sinks: jax.Array | None, dtype: Any, name: str) -> jax.Array:
    """Attention over all splits ``[T, Hq, Dv]`` in `dtype`.

    Args:
        outs: ``float32[splits, T, Hq, Dv]``, attention over the keys of each split.
        logs: ``float32[splits, T, Hq]``, logarithms to base 2 of their sums of weights; `MASKED` for an empty split.
        sinks: ``[Hq]`` logits without a value, or None.
        dtype: Of the output.
        name: Of the op, for profiles.
    """
    dims = pieces(outs.shape[3])

    def body(*refs: Any) -> None:
        combine_kernel(refs[0], refs[1], None if sinks is None else refs[2], refs[-1], dims)

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(outs.shape[1:], dtype),
        grid=outs.shape[1:3],
        compiler_params=plgpu.CompilerParams(num_warps=1 if outs.shape[0] * dims[0].size <= 2048 else 4, num_stages=1),
        interpret=registry.platform() != "gpu",
        name=f"{name}_combine",
    )(*[array for array in (outs, logs, sinks) if array is not None])
