"""Calls of the GPU kernel: support, tile sizes, and the combination of splits."""

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
MIN_ROWS = 16  # fewest rows and keys of a product on tensor cores
MAX_BLOCK_BYTES = 32 << 10  # keys and values of a block: two of them fit into the shared memory of any GPU from sm_80
# The page table is read before the page, so that each block in flight takes two of the compiler's stages. A decode step
# is bound by reads and has two blocks in flight; a tile of many queries, or in float32, has one.
STAGES_OF_ONE = 5  # pipeline stages for one query a tile
STAGES_OF_MANY = 3  # pipeline stages for several
MAX_GROUP = 128  # query heads of a kv head: rows of a tile
MAX_DIM = 576  # of keys and of values: columns of two power-of-two pieces
MAX_KEYS = 64  # keys of a block
MAX_FLOAT32_KEYS = 32  # for queries in float32
# Most numbers in the queries of a tile (rows times dimensions) without register spills: in 16 bits, and in float32,
# which is either three terms of 16 bits or multiplied without tensor cores, with operands in registers.
MAX_QUERIES = 128 * 256
MAX_FLOAT32_QUERIES = 32 * 128
NARROW_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")  # all their values exist in any 16-bit float
POOL_DTYPES = {
    "float32": ("float32", "bfloat16", *NARROW_DTYPES),
    "bfloat16": ("bfloat16", *NARROW_DTYPES),
    "float16": ("float16", *NARROW_DTYPES),
}


def unsupported_reason(q: jax.Array, v: jax.Array, pool: jax.Array, page_table: jax.Array) -> str | None:
    """Returns why the kernel cannot take a call, or None.

    Arrays are ``q[T, Hq, D]``, ``v[T, H, Dv]``, the pool and the page table.
    """
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
    """Returns the most numbers in the queries of a tile, rows times dimensions."""
    return MAX_FLOAT32_QUERIES if q.dtype == jnp.float32 else MAX_QUERIES


def least_rows(group: int) -> int:
    """Returns the rows that the query heads of one token and kv head take."""
    return max(MIN_ROWS, round_up_to_power(group))


def features_of(q: jax.Array, pool: jax.Array, args: AttentionArgs) -> TritonFeatures:
    """Returns the kernel's static features.

    Queries in float32 on a narrower pool are three terms in bfloat16.
    """
    has_terms = q.dtype == jnp.float32 and pool.dtype != jnp.float32
    dtype, num_terms = (jnp.dtype(jnp.bfloat16), 3) if has_terms else (q.dtype, 1)
    has_prefix = args.prefix_lens is not None
    return TritonFeatures(dtype, num_terms, args.scale, args.window, args.softcap, has_prefix, args.value_begin)


def tile_for(
    num_rows: int, num_queries: int, num_items: int, q: jax.Array, v: jax.Array, pool: jax.Array, reach: int
) -> Tile:
    """Returns the sizes of a tile of queries that see at most `reach` keys.

    `num_items` is the number of items of the call, ``q[T, Hq, D]``, ``v[T, H, Dv]``, ``pool[P, H, page, W]``.
    """
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
    """Runs the kernel over ``int32 items[num_items, fields]``, which cover every token once.

    Returns ``[T, Hq, Dv]`` in q's dtype for ``q[T, Hq, D]``, ``pool[P, H, page, W]`` and ``int32 page_table[S,
    pages_per_seq]``. The kernel is interpreted if programs are not traced for a GPU: slow, for tests.
    """
    num_tokens, query_heads, dim = q.shape
    _, heads, page, width = pool.shape
    optional = {"sinks": args.sinks, "alibi": args.alibi_slopes, "k_scale": args.k_scale, "v_scale": args.v_scale}
    optional["until"] = args.sees_until
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

    results = pl.pallas_call(
        body,
        out_shape=out_shape,
        grid=(items.shape[0], heads, tile.num_splits),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        cost_estimate=cost(items.shape[0], q, pool, page_table, value_dim),
        interpret=registry.platform() != "gpu",
        name=name,
    )(*arrays)
    return results[0] if tile.num_splits == 1 else combine(results[0], results[1], args.sinks, q.dtype, name)


def cost(num_items: int, q: jax.Array, pool: jax.Array, page_table: jax.Array, value_dim: int) -> pl.CostEstimate:
    """Returns the cost of a call whose sequences fill their pages, the upper bound."""
    num_tokens, query_heads, dim = q.shape
    capacity = page_table.shape[1] * pool.shape[2]
    read = min(page_table.shape[0], num_items) * capacity * pool.shape[1] * (dim + value_dim) * pool.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * num_tokens * query_heads * capacity * (dim + value_dim),
        transcendentals=num_tokens * query_heads * capacity,
        bytes_accessed=read + math.prod(q.shape[:2]) * (dim + value_dim) * q.dtype.itemsize,
    )


def combine(outs: jax.Array, logs: jax.Array, sinks: jax.Array | None, dtype: Any, name: str) -> jax.Array:
    """Returns attention over all splits, ``[T, Hq, Dv]`` in `dtype`.

    Args:
        outs: ``float32[splits, T, Hq, Dv]``, attention over the keys of each split.
        logs: ``float32[splits, T, Hq]``, logarithms to base 2 of their sums of weights; `MASKED` for an empty split.
        sinks: ``[Hq]`` logits without a value, or None.
        dtype: Dtype of the output.
        name: Name of the op, for profiles.
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
