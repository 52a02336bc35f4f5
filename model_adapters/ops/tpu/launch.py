"""Features and constants of a TPU kernel call, and which calls the kernels support."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from model_adapters.ops.attention_args import AttentionArgs
from model_adapters.ops.tpu.page_buffers import LANES, MASKED, SUBLANES, Blocks, round_up, tile_rows

NAME = "tpu-pallas"
LOG2_E = 1.4426950408889634  # the kernels use powers of two, which the hardware computes
MAX_TABLE_BYTES = 512 << 10  # of the page table in scalar memory
MAX_BUFFER_BYTES = 32 << 20  # of the double buffer in vector memory
WORKING_BYTES = 32 << 20  # of vector memory for everything else
QUERY_DTYPES = ("float32", "bfloat16")
POOL_DTYPES = {
    "float32": ("float32", "bfloat16", "int8", "float8_e4m3fn"),
    "bfloat16": ("bfloat16", "int8", "float8_e4m3fn"),
}


@dataclass(frozen=True)
class Features:
    """Static features of the scores, and the dtype of the products' operands."""

    dtype: Any
    window: int | None
    softcap: float | None
    has_alibi: bool
    is_int8: bool

    def score(self, products: jax.Array, factor: Any, slope: Any, distance: Any) -> jax.Array:
        """Returns scores ``[R, n]`` times log2(e) of products ``[R, n]`` of queries and keys.

        `factor` and `slope` come from :func:`row_constants`, scalars or ``[R, 1]``. `distance` is the position of the
        key minus that of the query and broadcasts to the products.
        """
        scores = products * factor
        if self.softcap is not None:
            scores = (self.softcap * LOG2_E) * jnp.tanh(scores)
        if self.has_alibi:
            scores = scores + slope * distance.astype(jnp.float32)
        return scores


def row_constants(query_heads: int, args: AttentionArgs) -> jax.Array:
    """Returns constants ``float32[Hq, 4]`` of the query heads, Hq rounded up to 8.

    They are the sink, the factor of products, the ALiBi slope and the factor of sums. The first three are multiplied
    by log2(e), because the kernels use powers of two.
    """

    def column(values: jax.Array | None, default: float, factor: float = 1.0) -> jax.Array:
        if values is None:
            return jnp.full((query_heads,), default * factor, jnp.float32)
        return jnp.repeat(values.astype(jnp.float32), query_heads // values.shape[0]) * factor

    sink = jnp.full((query_heads,), MASKED, jnp.float32) if args.sinks is None else column(args.sinks, 0.0, LOG2_E)
    columns = (
        jnp.maximum(sink, MASKED),
        column(args.k_scale, 1.0, args.scale * LOG2_E if args.softcap is None else args.scale / args.softcap),
        column(args.alibi_slopes, 0.0, LOG2_E),
        column(args.v_scale, 1.0),
    )
    missing = round_up(query_heads, SUBLANES) - query_heads
    return jnp.pad(jnp.stack(columns, axis=1), ((0, missing), (0, 0)))


def product(rows: jax.Array, matrix: jax.Array, contract: int) -> jax.Array:
    """Returns ``float32`` products of ``rows[R, n]`` and axis `contract` of a matrix."""
    return lax.dot_general(
        rows,
        matrix,
        (((1,), (contract,)), ((), ())),
        precision=lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def flat_table(page_table: jax.Array, pool: jax.Array) -> jax.Array:
    """Returns ``int32 page_table[S, pages_per_seq]`` flat, with pages clipped to the pool."""
    return jnp.clip(page_table.reshape(-1), 0, pool.shape[0] - 1)


def compiler_params(blocks: Blocks, pool: jax.Array, flags: dict[str, Any] | None = None) -> pltpu.CompilerParams:
    """Returns compiler parameters: blocks in order on one core, memory for the double buffer."""
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary",),
        vmem_limit_bytes=buffer_bytes(blocks, pool) + WORKING_BYTES,
        disable_bounds_checks=True,
        flags=flags,
    )


def buffer_bytes(blocks: Blocks, pool: jax.Array) -> int:
    """Returns the bytes of the double buffer for ``pool[P, H, page, W]``."""
    return 2 * blocks.length * pool.shape[1] * pool.shape[3] * pool.dtype.itemsize


def unsupported_reason(q: jax.Array, pool: jax.Array, page_table: jax.Array) -> str | None:
    """Returns why neither kernel can take ``q[T, Hq, D]``, the pool or the page table, or None."""
    if str(q.dtype) not in QUERY_DTYPES or str(pool.dtype) not in POOL_DTYPES[str(q.dtype)]:
        return f"q is {q.dtype} and pool {pool.dtype}; the kernel has " + ", ".join(
            f"{one} over {' or '.join(pools)}" for one, pools in POOL_DTYPES.items()
        )
    if 0 in q.shape:
        return f"q{list(q.shape)} has no elements"
    if pool.shape[3] % LANES:
        return f"rows of the pool have {pool.shape[3]} elements; the kernel needs a multiple of {LANES}"
    blocks = Blocks.of(pool, page_table.shape[1])
    if blocks.piece % tile_rows(pool.dtype):
        return f"pages of {pool.shape[2]} positions; the kernel needs a multiple of {tile_rows(pool.dtype)}"
    if page_table.size * 4 > MAX_TABLE_BYTES:
        return f"a page table of {page_table.size * 4} bytes; {MAX_TABLE_BYTES} fit, larger pages make it smaller"
    if buffer_bytes(blocks, pool) > MAX_BUFFER_BYTES:
        return f"two pages of {buffer_bytes(blocks, pool) // 2} bytes; {MAX_BUFFER_BYTES} fit"
    return None
