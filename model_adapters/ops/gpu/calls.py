"""Calls of the GPU kernel: which it refuses, the sizes of its tiles, and how splits are put together."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from model_adapters.ops import registry
from model_adapters.ops.gpu.flash import LOG2_E, MASKED, Features, Inputs, Program, Tile, kernel, pieces

NAME = "gpu-triton"
NUM_PROGRAMS = 264  # two for each multiprocessor of an H200; other data-centre GPUs have as many within a factor of two
MAX_SPLITS = 64
MIN_SPLIT_LEN = 128
MAX_STAGE_BYTES = 32 << 10  # keys and values on their way; three stages of it fit into 99 KiB, the least of sm_80 on
MAX_STAGES_BYTES = 72 << 10
MAX_GROUP = 128
MAX_DIM = 256
QUERY_DTYPES = ("float32", "bfloat16", "float16")
NARROW_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")  # every value of theirs is one of bfloat16
POOL_DTYPES = (*QUERY_DTYPES, *NARROW_DTYPES)


def round_up_to_power(value: int) -> int:
    """The smallest power of two that is no less than `value`."""
    return 1 << (value - 1).bit_length() if value > 1 else 1


def why_not(q: jax.Array, v: jax.Array, pool: jax.Array, page_table: jax.Array) -> str | None:
    """Why the kernel cannot take a call, or None."""
    for name, array, dtypes in (("q", q, QUERY_DTYPES), ("pool", pool, POOL_DTYPES)):
        if str(array.dtype) not in dtypes:
            return f"{name} is {array.dtype}; the kernel has {', '.join(dtypes)}"
    if 0 in q.shape or v.shape[2] == 0 or page_table.shape[0] == 0:
        return f"q{list(q.shape)}, values of {v.shape[2]}, {page_table.shape[0]} sequences: nothing to compute"
    group = q.shape[1] // pool.shape[1]
    if group > MAX_GROUP:
        return f"{group} query heads read one kv head; the kernel has room for {MAX_GROUP}"
    if max(q.shape[2], v.shape[2]) > MAX_DIM:
        return f"heads of {q.shape[2]} and {v.shape[2]}; the kernel has registers for {MAX_DIM}"
    if 2**31 < pool.size and pool.size * pool.dtype.itemsize <= 2**32:
        # Pallas' Triton lowering counts elements in 32 signed bits up to 4 GiB.
        return f"a pool of {pool.size} elements in {pool.dtype}; the kernel has up to {2**31}, or more than {2**32}"
    return None


def compute_dtype(q: jax.Array, pool: jax.Array) -> Any:
    """The dtype of the products' operands: the narrowest that holds both without rounding."""
    return q.dtype if str(pool.dtype) in NARROW_DTYPES else jnp.promote_types(q.dtype, pool.dtype)


def tile_for(
    num_rows: int, num_queries: int, num_items: int, pool: jax.Array, group: int, reach: int, dim: int, value_dim: int
) -> Tile:
    """Sizes of a tile of `num_rows` rows and `num_queries` queries, of which none sees more than `reach` keys."""
    row_bytes = (dim + value_dim) * pool.dtype.itemsize
    num_keys = 64
    while num_keys > 16 and num_keys * row_bytes > MAX_STAGE_BYTES:
        num_keys //= 2
    num_stages = min(4, max(2, MAX_STAGES_BYTES // (num_keys * row_bytes)))
    num_splits = min(-(-NUM_PROGRAMS // (num_items * pool.shape[1])), -(-reach // MIN_SPLIT_LEN), MAX_SPLITS)
    num_sums = num_rows * sum(piece.size for piece in pieces(value_dim))
    num_warps = 8 if num_sums > 8192 else 4
    return Tile(num_rows, num_queries, num_keys, group, round_up_to_power(num_splits), num_warps, num_stages)


def attend(
    items: jax.Array,
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    sinks: jax.Array | None,
    alibi: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    value_dim: int,
    features: Features,
    tile: Tile,
    name: str,
) -> jax.Array:
    """Runs the kernel over `items`, which between them have every token once; ``[T, Hq, Dv]`` in q's dtype.

    Where programs are traced for another platform than a GPU the kernel is interpreted: for tests, and slow.
    """
    num_tokens, query_heads, dim = q.shape
    num_pages, heads, page, width = pool.shape
    optional = {"sinks": sinks, "alibi": alibi, "k_scale": k_scale, "v_scale": v_scale}
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
        kernel(Program(inputs, features, tile, heads, page, page_table.shape[1], dim, value_dim), out, logs)

    made = pl.pallas_call(
        body,
        out_shape=out_shape,
        grid=(items.shape[0], heads, tile.num_splits),
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        cost_estimate=cost(items.shape[0], q, pool, page_table, value_dim),
        interpret=registry.platform() != "gpu",
        name=name,
    )(*arrays)
    return made[0] if tile.num_splits == 1 else combine(made[0], made[1], sinks).astype(q.dtype)


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


def combine(outs: jax.Array, logs: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Attention over all splits.

    Args:
        outs: ``float32[splits, T, Hq, Dv]``, attention over the keys of each split.
        logs: ``float32[splits, T, Hq]``, logarithms to base 2 of their sums of weights; `MASKED` where a split is empty.
        sinks: ``[Hq]`` logits without a value, or None.
    """
    top = jnp.max(logs, axis=0)
    sink = None if sinks is None else sinks.astype(jnp.float32) * LOG2_E
    if sink is not None:
        top = jnp.maximum(top, sink)
    weights = jnp.where(logs > MASKED / 2, jnp.exp2(logs - top), 0.0)
    total = jnp.sum(weights, axis=0)
    if sink is not None:
        total = total + jnp.exp2(sink - top)
    total = jnp.where(total == 0, 1.0, total)
    return jnp.sum(outs * weights[..., None], axis=0) / total[..., None]
