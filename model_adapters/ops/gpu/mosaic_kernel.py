"""The decode kernel for Hopper through Pallas' Mosaic GPU lowering.

The method is that of :mod:`model_adapters.ops.gpu.triton_kernel`, with features that the Triton lowering lacks: pages
are read by the tensor memory accelerator, several blocks ahead, and warp groups multiply shared memory, 64 rows at a
time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from model_adapters.ops.gpu import warpgroup
from model_adapters.ops.gpu.split_kv import LOG2_E, MASKED, NOTHING

NUM_KEYS = 64  # of a block
NUM_ROWS = 64  # of a warp group's product
TILE_ROWS = 8  # of a tile in shared memory
TILE_COLUMNS = 64  # of 16 bits: the 128 bytes of a swizzle
MAX_STAGES = 3  # blocks in flight
SHARED_BYTES = 224 << 10  # shared memory of a program, less than the 227 KiB of Hopper for barriers and alignment


@dataclass(frozen=True)
class StageSizes:
    """Sizes and features of a call."""

    dim: int
    value_dim: int
    page: int
    num_pages: int
    pages_per_seq: int
    num_splits: int
    group: int
    scale: float
    window: int | None
    softcap: float | None

    @property
    def piece(self) -> int:
        """Number of positions that one copy reads."""
        return min(self.page, NUM_KEYS)

    @property
    def num_rows(self) -> int:
        """Number of rows of queries that are read.

        They are those of a kv head, in whole tiles of shared memory.
        """
        return self.group + -self.group % TILE_ROWS

    @property
    def row_stride(self) -> int:
        """Number of rows from the queries of one kv head to those of the next.

        The tensor memory accelerator reads rows that begin within a tile only up to its end: a group is in one tile,
        or begins with one.
        """
        return self.group if TILE_ROWS % self.group == 0 else self.num_rows

    @property
    def num_stages(self) -> int:
        """Number of blocks in flight, as many as there is shared memory for."""
        fixed_bytes = NUM_ROWS * (2 * self.dim + (2 if self.num_splits == 1 else 4) * self.value_dim)
        return min(MAX_STAGES, (SHARED_BYTES - fixed_bytes) // (2 * NUM_KEYS * (self.dim + self.value_dim)))


@dataclass(frozen=True)
class MosaicProgram:
    """One program of the kernel: a row, a kv head and a split; its references and sizes."""

    sizes: StageSizes
    q: Any  # [rows, D], of each kv head those of its group and padding
    pool: Any  # [P, H, page, W]
    table: Any  # int32[B, pages_per_seq]
    lens: Any  # int32[B]
    starts: Any  # int32[B]
    sinks: Any  # float32[Hq], or None
    out: Any  # [B, Hq, Dv] in q's dtype, or of several splits float32[splits, B, Hq, Dv]
    logs: Any  # float32[splits, B, H, 64], or None
    queries: Any  # [64, D]; this and the rest in shared memory
    keys: Any  # [stages, 64, D]
    values: Any  # [stages, 64, Dv]
    out_tile: Any  # [64, Dv] in the dtype of the output
    log_tile: Any  # float32[64]
    loaded: Any  # a barrier for each stage
    queries_loaded: Any

    def blocks(self, row: Any, split: Any) -> tuple[Any, Any, Any, Any]:
        """Returns ``(low, high, begin, end)``: a row's visible positions and the split's blocks.

        The positions are ``[low, high)``, the blocks ``[begin, end)``.
        """
        sizes, length = self.sizes, self.lens[row]
        high = jnp.minimum(length, sizes.pages_per_seq * sizes.page)
        low = jnp.maximum(self.starts[row], 0)
        if sizes.window is not None:
            low = jnp.maximum(low, length - sizes.window)
        first = lax.div(low, jnp.int32(NUM_KEYS))
        total = jnp.maximum(lax.div(jnp.maximum(high, 0) + (NUM_KEYS - 1), jnp.int32(NUM_KEYS)) - first, 0)
        share = lax.div(total + (sizes.num_splits - 1), jnp.int32(sizes.num_splits))
        begin = first + split * share
        return low, high, begin, jnp.maximum(jnp.minimum(begin + share, first + total), begin)

    def fetch(self, row: Any, head: Any, block: Any, stage: Any) -> None:
        """Starts the copies of a block into stage `stage`."""
        sizes = self.sizes
        for i in range(NUM_KEYS // sizes.piece):
            position = block * NUM_KEYS + i * sizes.piece
            column = jnp.minimum(lax.div(position, jnp.int32(sizes.page)), sizes.pages_per_seq - 1)
            page = jnp.clip(self.table[row, column], 0, sizes.num_pages - 1)
            source = self.pool.at[page, head, pl.ds(lax.rem(position, jnp.int32(sizes.page)), sizes.piece)]
            place, loaded = pl.ds(i * sizes.piece, sizes.piece), self.loaded.at[stage]
            plgpu.copy_gmem_to_smem(source.at[:, pl.ds(0, sizes.dim)], self.keys.at[stage, place], loaded)
            plgpu.copy_gmem_to_smem(
                source.at[:, pl.ds(sizes.dim, sizes.value_dim)], self.values.at[stage, place], loaded
            )

    def clean(self, low: Any, high: Any, block: Any, stage: Any) -> None:
        """Zeroes values that no query sees: their weight is zero, and 0 * NaN would be NaN."""
        position = block * NUM_KEYS + warpgroup.iota((NUM_KEYS, self.sizes.value_dim), 0)
        values = warpgroup.load(self.values.at[stage]).astype(jnp.float32)
        visible = jnp.where(jnp.logical_and(position >= low, position < high), values, 0.0)
        self.values[stage] = visible.astype(self.values.dtype)
        plgpu.commit_smem()

    def scores(self, low: Any, high: Any, block: Any, stage: Any) -> jax.Array:
        """Returns the masked scores ``float32[64, keys]`` of a block, times log2(e)."""
        products = warpgroup.scores(self.queries, self.keys.at[stage])
        if self.sizes.softcap is None:
            scores = products * (self.sizes.scale * LOG2_E)
        else:
            scores = jnp.tanh(products * (self.sizes.scale / self.sizes.softcap)) * (self.sizes.softcap * LOG2_E)
        position = block * NUM_KEYS + warpgroup.iota((NUM_ROWS, NUM_KEYS), 1)
        return jnp.where(jnp.logical_and(position >= low, position < high), scores, MASKED)

    def run(self, row: Any, head: Any, split: Any) -> Any:
        """Returns largest scores [64], sums of weights [64] and weighted values [64, Dv]."""
        low, high, begin, end = self.blocks(row, split)
        num_stages = self.sizes.num_stages
        for i in range(num_stages):
            pl.when(begin + i < end)(lambda i=i: self.fetch(row, head, begin + i, i))  # type: ignore[misc]
        plgpu.barrier_wait(self.queries_loaded)

        # The loop over the blocks of the split. The carry is the running softmax: top [64], the largest score so far
        # times log2(e); total [64], the sum of the weights 2 ** (score - top); sums [64, Dv], the values with these
        # weights. Where the largest score grows, the others shrink. Block b is in stage (b - begin) % num_stages of a
        # ring. The stage is filled again, with block b + num_stages, behind the products that read it; the first blocks
        # are under way already.
        def step(block: Any, carry: Any) -> Any:
            top, total, sums = carry
            stage = lax.rem(block - begin, jnp.int32(num_stages))
            plgpu.barrier_wait(self.loaded.at[stage])
            is_edge = jnp.logical_or(block * NUM_KEYS < low, (block + 1) * NUM_KEYS > high)
            pl.when(is_edge)(lambda: self.clean(low, high, block, stage))
            scores = self.scores(low, high, block, stage)
            new_top = jnp.maximum(top, scores.max(axis=1))
            shrink = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
            total = total * shrink + weights.sum(axis=1)
            sums = sums * lax.broadcast_in_dim(shrink, sums.shape, [0])
            sums = sums + warpgroup.sums(weights.astype(self.values.dtype), self.values.at[stage])
            pl.when(block + num_stages < end)(lambda: self.fetch(row, head, block + num_stages, stage))
            return new_top, total, sums

        top = warpgroup.by_row(jnp.full((NUM_ROWS,), NOTHING, jnp.float32))
        total = warpgroup.by_row(jnp.zeros((NUM_ROWS,), jnp.float32))
        sums = warpgroup.by_tile(jnp.zeros((NUM_ROWS, self.sizes.value_dim), jnp.float32))
        return lax.fori_loop(begin, end, step, (top, total, sums))

    def __call__(self) -> None:
        """Writes the attention, or that over this split.

        A split has the logarithm to base 2 of its sum of weights with it.
        """
        row, head, split = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("split")
        sizes, num_heads = self.sizes, self.pool.shape[1]
        heads = pl.ds(head * sizes.group, sizes.group)
        # Further rows are those of other heads, zeros, or undefined; no row depends on another.
        queries = self.q.at[pl.ds((row * num_heads + head) * sizes.row_stride, sizes.num_rows)]
        plgpu.copy_gmem_to_smem(queries, self.queries.at[pl.ds(0, sizes.num_rows)], self.queries_loaded)
        top, total, sums = self.run(row, head, split)
        if self.sinks is not None:
            total, sums = with_sinks(
                [self.sinks[head * sizes.group + i] for i in range(sizes.group)], 1, top, total, sums
            )
        divisor = jnp.where(total > 0, total, 1.0)
        made = sums * lax.broadcast_in_dim(1.0 / divisor, sums.shape, [0])
        self.out_tile[...] = made.astype(self.out_tile.dtype)
        if self.logs is not None:
            self.log_tile[...] = jnp.where(total > 0, top + jnp.log(divisor) * LOG2_E, MASKED)
        plgpu.commit_smem()
        rows = self.out_tile.at[pl.ds(0, sizes.group)]
        if self.logs is None:
            plgpu.copy_smem_to_gmem(rows, self.out.at[row, heads])
        else:
            plgpu.copy_smem_to_gmem(rows, self.out.at[split, row, heads])
            plgpu.copy_smem_to_gmem(self.log_tile, self.logs.at[split, row, head])
        plgpu.wait_smem_to_gmem(0)


def with_sinks(
    sinks: list[Any], rows_per_head: int, top: jax.Array, total: jax.Array, sums: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns sums of weights [64] and weighted values [64, Dv] with sinks of the heads.

    The first `rows_per_head` rows are those of the first head, and so on.
    """
    row = warpgroup.row_iota(NUM_ROWS)
    sink = warpgroup.by_row(jnp.full((NUM_ROWS,), sinks[0] * LOG2_E, jnp.float32))
    for i, logit in enumerate(sinks[1:], 1):
        sink = jnp.where(row >= i * rows_per_head, logit * LOG2_E, sink)
    new_top = jnp.maximum(top, sink)
    shrink = jnp.exp2(top - new_top)
    return total * shrink + jnp.exp2(sink - new_top), sums * lax.broadcast_in_dim(shrink, sums.shape, [0])


def query_rows(q: jax.Array, sizes: StageSizes) -> jax.Array:
    """Returns ``q[B, Hq, D]`` as rows ``[rows, D]``: `row_stride` for each kv head."""
    rows = q.reshape(-1, sizes.group, sizes.dim)
    rows = jnp.pad(rows, ((0, 0), (0, sizes.row_stride - sizes.group), (0, 0))).reshape(-1, sizes.dim)
    return jnp.pad(rows, ((0, -rows.shape[0] % TILE_ROWS), (0, 0)))


# As a function of its own in the program, all layers that call it share one kernel: each takes seconds to compile.
@functools.partial(jax.jit, static_argnames="sizes")
def attend(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    starts: jax.Array,
    sinks: jax.Array | None,
    sizes: StageSizes,
) -> tuple[jax.Array, ...]:
    """Returns attention, or that over each of several splits with log2 of its sum of weights.

    The logarithm of an empty split is `MASKED`.

    Args:
        q: ``[B, Hq, D]``.
        pool: ``[P, H, page, W]``.
        page_table: ``int32[B, pages_per_seq]``.
        lens: ``int32[B]``.
        starts: ``int32[B]``.
        sinks: ``float32[Hq]``, only without splits, or None.
        sizes: Sizes and features of the call.

    Returns:
        ``[B, Hq, Dv]`` in q's dtype, or ``float32[splits, B, Hq, Dv]`` and ``float32[splits, B, H, 64]``.
    """
    (batch, query_heads, _), num_heads = q.shape, pool.shape[1]
    out_type = [jax.ShapeDtypeStruct((batch, query_heads, sizes.value_dim), q.dtype)]
    if sizes.num_splits > 1:
        splits = (sizes.num_splits, batch)
        out_type = [
            jax.ShapeDtypeStruct((*splits, query_heads, sizes.value_dim), jnp.float32),
            jax.ShapeDtypeStruct((*splits, num_heads, NUM_ROWS), jnp.float32),
        ]
    arrays = [query_rows(q, sizes), pool, page_table, lens, starts, *([] if sinks is None else [sinks])]

    def body(*refs: Any) -> None:
        inputs, results, rest = refs[: len(arrays)], refs[len(arrays) : -7], refs[-7:]
        given = [*inputs, *([None] if sinks is None else []), *results, *([None] if len(results) == 1 else []), *rest]
        MosaicProgram(sizes, *given)()

    tiled = (plgpu.TilingTransform((TILE_ROWS, TILE_COLUMNS)), plgpu.SwizzleTransform(2 * TILE_COLUMNS))
    stages = (sizes.num_stages, NUM_KEYS)
    run: Any = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(batch, num_heads, sizes.num_splits),
        grid_names=("row", "head", "split"),
        scratch_types=[
            plgpu.SMEM((NUM_ROWS, sizes.dim), q.dtype, transforms=tiled),
            plgpu.SMEM((*stages, sizes.dim), pool.dtype, transforms=tiled),
            plgpu.SMEM((*stages, sizes.value_dim), pool.dtype, transforms=tiled),
            plgpu.SMEM((NUM_ROWS, sizes.value_dim), out_type[0].dtype),
            plgpu.SMEM((NUM_ROWS,), jnp.float32),
            plgpu.Barrier(num_barriers=sizes.num_stages, num_arrivals=2 * (NUM_KEYS // sizes.piece)),
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="decode_attention_mosaic",
    )
    return tuple(run(*arrays))
