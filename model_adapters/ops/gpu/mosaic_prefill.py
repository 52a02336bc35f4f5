"""The kernel for runs of queries on Hopper through Pallas' Mosaic GPU lowering.

A program has three warp groups. One reads pages by the tensor memory accelerator into a ring of stages; two compute,
64 rows each, with scores, weights and sums in registers. While one of the two takes a softmax, the other has the
tensor cores. The method is that of FlashAttention-3 (Shah et al., arXiv 2407.08608), as in JAX's own
``jax.experimental.pallas.ops.gpu.attention_mgpu`` for dense arrays.

The 64 rows of a warp group are `num_heads` query heads of one kv head, each with the same ``64 / num_heads`` tokens:
keys and values are read once for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from model_adapters.ops.gpu import warpgroup
from model_adapters.ops.gpu.mosaic_kernel import NUM_ROWS, SHARED_BYTES, TILE_COLUMNS, TILE_ROWS, with_sinks
from model_adapters.ops.gpu.split_kv import LOG2_E, NOTHING
from model_adapters.ops.gpu.work_items import FIELDS, SplitKVItem

NUM_GROUPS = 2  # warp groups that compute
MAX_KEYS = 128  # of a block: scores of more leave too few registers for the sums
MIN_KEYS = 64
MAX_STAGES = 4  # blocks in flight
ALTERNATES = True  # whether the two groups take turns on the tensor cores
# Registers of a thread, of the 65536 of a multiprocessor: 2 groups of 128 threads that compute, and one that copies.
COMPUTE_REGISTERS = 232
COPY_REGISTERS = 40


@dataclass(frozen=True)
class PrefillSizes:
    """Sizes and features of a call."""

    dim: int
    value_dim: int
    page: int
    num_pages: int
    pages_per_seq: int
    num_heads: int
    scale: float
    window: int | None
    softcap: float | None

    @property
    def num_queries(self) -> int:
        """Number of tokens of a warp group's rows."""
        return NUM_ROWS // self.num_heads

    @property
    def fixed_bytes(self) -> int:
        """Bytes of shared memory besides the ring.

        They hold queries, outputs of another width, and rows of partial tiles.
        """
        output = 0 if self.dim == self.value_dim else self.value_dim
        return NUM_GROUPS * NUM_ROWS * 2 * (self.dim + output + TILE_COLUMNS)

    def stages_of(self, num_keys: int) -> int:
        """Returns how many blocks of `num_keys` keys fit into shared memory."""
        return min(MAX_STAGES, (SHARED_BYTES - self.fixed_bytes) // (2 * num_keys * (self.dim + self.value_dim)))

    @property
    def num_keys(self) -> int:
        """Number of keys of a block.

        It is the largest of which two fit and that pages divide or are divided by.
        """
        num_keys = MAX_KEYS
        while num_keys > MIN_KEYS and (self.stages_of(num_keys) < 2 or (num_keys % self.page and self.page % num_keys)):
            num_keys //= 2
        return num_keys

    @property
    def num_stages(self) -> int:
        """Number of blocks in flight."""
        return self.stages_of(self.num_keys)

    @property
    def piece(self) -> int:
        """Number of positions that one copy reads."""
        return min(self.page, self.num_keys)


@dataclass(frozen=True)
class PrefillProgram:
    """One program of the kernel: an item and the query heads of its rows.

    It holds the program's references and sizes.
    """

    sizes: PrefillSizes
    items: Any  # int32[num_items, fields]
    table: Any  # int32[S, pages_per_seq]
    sinks: Any  # float32[Hq], or None
    q: Any  # [T, Hq, D]
    pool: Any  # [P, H, page, W]
    out: Any  # [T, Hq, Dv]
    queries: Any  # [2, 64, D]; this and the rest in shared memory
    outputs: Any  # [2, 64, Dv], the queries' own memory if the widths are equal
    keys: Any  # [stages, keys, D]
    values: Any  # [stages, keys, Dv]
    rows: Any  # [2, 64, 64], columns of the rows of a partial tile
    queries_loaded: Any  # barriers for each group
    keys_loaded: Any  # for each stage
    values_loaded: Any
    keys_read: Any  # for each stage: both groups have read it
    values_read: Any
    turns: Any  # one group has the tensor cores
    cleaned: Any  # both groups have cleaned their half of a block

    def item(self) -> SplitKVItem:
        """Returns the program's item, the last first.

        Queries at the end of a prompt see the most keys.
        """
        index = self.items.shape[0] - 1 - lax.axis_index("item")
        return SplitKVItem(*(self.items[index, i] for i in range(len(FIELDS))))

    def blocks(self, item: SplitKVItem) -> tuple[Any, Any, Any, Any]:
        """Returns ends of the item's blocks: ``[first, inner)`` and ``[outer, last)`` need masks.

        Every query of the item sees all keys of the blocks ``[inner, outer)``.
        """
        num_keys = jnp.int32(self.sizes.num_keys)
        first = lax.div(item.low, num_keys)
        last = jnp.maximum(lax.div(jnp.maximum(item.high, 0) + (num_keys - 1), num_keys), first)
        inner, causal = first, jnp.maximum(jnp.minimum(item.begin + item.shift + 1, item.high), 0)
        if self.sizes.window is not None:
            window_begin = jnp.maximum(item.end + item.shift - self.sizes.window, 0)
            inner = jnp.clip(lax.div(window_begin + (num_keys - 1), num_keys), first, last)
        return first, inner, jnp.clip(lax.div(causal, num_keys), inner, last), last

    def fetch(self, item: SplitKVItem, kv_head: Any) -> None:
        """Copies all blocks of the item, each as soon as its stage is free."""
        sizes, (first, _, _, last) = self.sizes, self.blocks(item)

        def copy(sources: Any, columns: Any, ref: Any, loaded: Any, stage: Any) -> None:
            for i, source in enumerate(sources):
                target = ref.at[stage, pl.ds(i * sizes.piece, sizes.piece)]
                plgpu.copy_gmem_to_smem(source.at[:, columns], target, loaded.at[stage])

        def step(block: Any, _: Any) -> None:
            sources = []
            for i in range(sizes.num_keys // sizes.piece):
                position = block * sizes.num_keys + i * sizes.piece
                column = jnp.minimum(lax.div(position, jnp.int32(sizes.page)), sizes.pages_per_seq - 1)
                page = jnp.clip(self.table[item.seq, column], 0, sizes.num_pages - 1)
                offset = lax.rem(position, jnp.int32(sizes.page)) if sizes.page > sizes.piece else 0
                sources.append(self.pool.at[page, kv_head, pl.ds(offset, sizes.piece)])
            stage, is_used = lax.rem(block - first, jnp.int32(sizes.num_stages)), block - first >= sizes.num_stages
            pl.when(is_used)(lambda: plgpu.barrier_wait(self.keys_read.at[stage]))
            copy(sources, pl.ds(0, sizes.dim), self.keys, self.keys_loaded, stage)
            pl.when(is_used)(lambda: plgpu.barrier_wait(self.values_read.at[stage]))
            copy(sources, pl.ds(sizes.dim, sizes.value_dim), self.values, self.values_loaded, stage)

        lax.fori_loop(first, last, step, None)

    def take_turn(self) -> None:
        """Waits until the other group, too, is where the tensor cores change hands."""
        if ALTERNATES:
            plgpu.barrier_arrive(self.turns)
            plgpu.barrier_wait(self.turns)

    def clean(self, item: SplitKVItem, group: Any, block: Any, stage: Any) -> None:
        """Zeroes values that no query sees: their weight is zero, and 0 * NaN would be NaN.

        Each group does 64 keys, and waits for the other.
        """

        @pl.when(group * NUM_ROWS < self.sizes.num_keys)
        def _() -> None:
            position = warpgroup.iota((NUM_ROWS, TILE_COLUMNS), 0)
            position = position + (block * self.sizes.num_keys + group * NUM_ROWS)
            is_visible = jnp.logical_and(position >= item.low, position < item.high)
            for column in range(0, self.sizes.value_dim, TILE_COLUMNS):  # in pieces: registers hold the sums, too
                place = (stage, pl.ds(group * NUM_ROWS, NUM_ROWS), pl.ds(column, TILE_COLUMNS))
                values = warpgroup.load(self.values.at[place]).astype(jnp.float32)
                self.values[place] = jnp.where(is_visible, values, 0.0).astype(self.values.dtype)
            plgpu.commit_smem()

        plgpu.barrier_arrive(self.cleaned)
        plgpu.barrier_wait(self.cleaned)

    def masked(self, scores: jax.Array, item: SplitKVItem, base: Any, block: Any) -> jax.Array:
        """Returns ``float32[64, keys]`` scores with minus infinity where a query does not see a key."""
        query = jnp.bitwise_and(warpgroup.iota(scores.shape, 0), self.sizes.num_queries - 1)
        key = block * self.sizes.num_keys + warpgroup.iota(scores.shape, 1)
        behind = query + (base + item.shift) - key
        visible = jnp.logical_and(behind >= 0, key < item.high)
        if self.sizes.window is not None:
            visible = jnp.logical_and(visible, behind < self.sizes.window)
        return jnp.where(visible, scores, -jnp.inf)

    def attend(self, item: SplitKVItem, group: Any, base: Any) -> Any:
        """Returns largest scores times log2(e), sums of weights, both [64], and values [64, Dv]."""
        sizes, (first, inner, outer, last) = self.sizes, self.blocks(item)
        # A positive factor can wait until after the maximum, where it is part of a fused multiplication and addition.
        factor = sizes.scale * LOG2_E if sizes.softcap is None and sizes.scale > 0 else 1.0

        def stage_of(block: Any) -> Any:
            return lax.rem(block - first, jnp.int32(sizes.num_stages))

        # The loop over the item's blocks. The carry is the running softmax: top [64], the largest score so far times
        # log2(e); total [64], the sum of the weights 2 ** (score - top); sums [64, Dv], the values with these weights.
        # Where the largest score grows, the others shrink.
        #
        # The warp group that copies waits for `keys_read` and `values_read` of a stage before it fills it again, so
        # both groups that compute arrive there once for each block behind which another one waits for the stage, and
        # never else. `turns` is passed by both groups at the same time, as often by one as by the other: twice in a
        # step, and by group 1 once in front of the loop, by group 0 once behind it. So they are half a step apart, and
        # one multiplies while the other takes its softmax.
        def step(block: Any, carry: Any, has_mask: bool) -> Any:
            top, total, sums = carry
            stage = stage_of(block)
            scores = warpgroup.scores(self.queries.at[group], self.keys.at[stage], self.take_turn)
            is_needed = block + sizes.num_stages < last  # another block waits for the stage
            pl.when(is_needed)(lambda: plgpu.barrier_arrive(self.keys_read.at[stage]))
            if sizes.softcap is not None:
                scores = jnp.tanh(scores * (sizes.scale / sizes.softcap)) * (sizes.softcap * LOG2_E)
            elif factor == 1.0:
                scores = scores * (sizes.scale * LOG2_E)
            if has_mask:
                scores = self.masked(scores, item, base, block)
            new_top = jnp.maximum(top, scores.max(axis=1) * factor)
            shrink = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
            sums = sums * lax.broadcast_in_dim(shrink, sums.shape, [0])
            total = total * shrink + weights.sum(axis=1)
            narrow = weights.astype(self.values.dtype)
            new_top, total, sums, narrow = lax.optimization_barrier((new_top, total, sums, narrow))
            if ALTERNATES:
                plgpu.barrier_arrive(self.turns)
            plgpu.barrier_wait(self.values_loaded.at[stage])
            if has_mask:
                begin, end = block * sizes.num_keys, (block + 1) * sizes.num_keys
                is_edge = jnp.logical_or(begin < item.low, end > item.high)
                pl.when(is_edge)(lambda: self.clean(item, group, block, stage))
            if ALTERNATES:
                plgpu.barrier_wait(self.turns)

            def wait_for_next_keys() -> None:
                pl.when(block + 1 < last)(lambda: plgpu.barrier_wait(self.keys_loaded.at[stage_of(block + 1)]))

            sums = warpgroup.add_product(sums, narrow, self.values.at[stage], wait_for_next_keys)
            pl.when(is_needed)(lambda: plgpu.barrier_arrive(self.values_read.at[stage]))
            return new_top, total, sums

        top = warpgroup.by_row(jnp.full((NUM_ROWS,), NOTHING, jnp.float32))
        total = warpgroup.by_row(jnp.zeros((NUM_ROWS,), jnp.float32))
        carry = top, total, warpgroup.by_tile(jnp.zeros((NUM_ROWS, sizes.value_dim), jnp.float32))
        pl.when(first < last)(lambda: plgpu.barrier_wait(self.keys_loaded.at[0]))
        pl.when(group == 1)(self.take_turn)
        if sizes.window is not None:
            carry = lax.fori_loop(first, inner, functools.partial(step, has_mask=True), carry)
        carry = lax.fori_loop(inner, outer, functools.partial(step, has_mask=False), carry)
        carry = lax.fori_loop(outer, last, functools.partial(step, has_mask=True), carry)
        pl.when(group == 0)(self.take_turn)
        return carry

    def first_query(self, item: SplitKVItem, group: Any) -> Any:
        """Returns the token of a group's first row.

        A copy of queries begins and ends with a tile of shared memory.

        The tensor memory accelerator reads a tile that begins between two tiles of the array only up to the second.
        """
        return jnp.bitwise_and(item.begin, -TILE_ROWS) + group * self.sizes.num_queries

    def store(self, item: SplitKVItem, group: Any, base: Any, head: Any, made: jax.Array) -> None:
        """Writes the rows of the item's tokens, ``[64, Dv]``: all at once, or else one by one."""
        num_queries, value_dim = self.sizes.num_queries, self.sizes.value_dim
        begin = jnp.clip(jnp.maximum(item.begin, self.first_query(item, group)) - base, 0, num_queries)
        end = jnp.clip(item.end - base, begin, num_queries)
        is_complete = jnp.logical_and(begin == 0, end == num_queries)

        @pl.when(is_complete)
        def _() -> None:
            self.outputs[group] = made
            plgpu.commit_smem()
            for i in range(self.sizes.num_heads):
                source = self.outputs.at[group, pl.ds(i * num_queries, num_queries)]
                plgpu.copy_smem_to_gmem(source, self.out.at[pl.ds(base, num_queries), head + i])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(jnp.logical_not(is_complete))
        def _() -> None:
            for column in range(0, value_dim, TILE_COLUMNS):
                self.rows[group] = made[:, column : column + TILE_COLUMNS]
                plgpu.commit_smem()

                def copy(query: Any, _: Any, column: int = column) -> None:
                    for i in range(self.sizes.num_heads):
                        source = self.rows.at[group, pl.ds(i * num_queries + query, 1)]
                        target = self.out.at[pl.ds(base + query, 1), head + i, pl.ds(column, TILE_COLUMNS)]
                        plgpu.copy_smem_to_gmem(source, target)

                lax.fori_loop(begin, end, copy, None)
                plgpu.wait_smem_to_gmem(0)

    def compute(self, item: SplitKVItem, group: Any, head: Any) -> None:
        """Writes the attention of one group's rows."""
        num_queries, num_tokens = self.sizes.num_queries, self.q.shape[0]
        # A tile at the end begins earlier, so that all of it is inside of the array; those rows are not written.
        base = jnp.minimum(self.first_query(item, group), num_tokens - num_queries)
        for i in range(self.sizes.num_heads):
            target = self.queries.at[group, pl.ds(i * num_queries, num_queries)]
            source = self.q.at[pl.ds(base, num_queries), head + i]
            plgpu.copy_gmem_to_smem(source, target, self.queries_loaded.at[group])
        plgpu.barrier_wait(self.queries_loaded.at[group])
        top, total, sums = self.attend(item, group, base)
        if self.sinks is not None:
            sinks = [self.sinks[head + i] for i in range(self.sizes.num_heads)]
            total, sums = with_sinks(sinks, num_queries, top, total, sums)
        inverse = 1.0 / jnp.where(total > 0, total, 1.0)
        made = (sums * lax.broadcast_in_dim(inverse, sums.shape, [0])).astype(self.out.dtype)
        self.store(item, group, base, head, made)

    def __call__(self) -> None:
        """Runs the three warp groups."""
        item, group = self.item(), lax.axis_index("wg")
        head = lax.axis_index("head") * self.sizes.num_heads
        kv_head = lax.div(head, jnp.int32(self.q.shape[1] // self.pool.shape[1]))
        is_used = item.begin < item.end

        @pl.when(jnp.logical_and(is_used, group < NUM_GROUPS))
        def _() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            self.compute(item, group, head)

        @pl.when(jnp.logical_and(is_used, group == NUM_GROUPS))
        def _() -> None:
            plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
            self.fetch(item, kv_head)


# As a function of its own in the program, all layers that call it share one kernel: each takes seconds to compile.
@functools.partial(jax.jit, static_argnames="sizes")
def attend_runs(
    items: jax.Array,
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    sinks: jax.Array | None,
    sizes: PrefillSizes,
) -> jax.Array:
    """Returns the attention ``[T, Hq, Dv]`` of all items.

    Args:
        items: ``int32[num_items, fields]`` that cover every token once, each of up to ``2 * num_queries`` tokens from
            a multiple of `TILE_ROWS` on.
        q: ``[T, Hq, D]``, a multiple of `TILE_ROWS` tokens and at least `num_queries`.
        pool: ``[P, H, page, W]``.
        page_table: ``int32[S, pages_per_seq]``.
        sinks: ``float32[Hq]`` or None.
        sizes: Sizes and features of the call.
    """
    tiled = (plgpu.TilingTransform((TILE_ROWS, TILE_COLUMNS)), plgpu.SwizzleTransform(2 * TILE_COLUMNS))
    stages = (sizes.num_stages, sizes.num_keys)

    def tile(*shape: int) -> Any:
        return plgpu.SMEM(shape, q.dtype, transforms=tiled)

    def barriers(number: int, num_arrivals: int) -> Any:
        return plgpu.Barrier(num_barriers=number, num_arrivals=num_arrivals)

    def body(items: Any, table: Any, q: Any, pool: Any, *refs: Any) -> None:
        sink_ref, out, queries, outputs, *rest = refs if sinks is not None else (None, *refs)
        PrefillProgram(
            sizes, items, table, sink_ref, q, pool, out, queries, queries if outputs is None else outputs, *rest
        )()

    run: Callable[..., jax.Array] = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((*q.shape[:2], sizes.value_dim), q.dtype),
        grid=(items.shape[0], q.shape[1] // sizes.num_heads),
        grid_names=("item", "head"),
        num_threads=NUM_GROUPS + 1,
        thread_name="wg",
        scratch_types=[
            tile(NUM_GROUPS, NUM_ROWS, sizes.dim),
            None if sizes.dim == sizes.value_dim else tile(NUM_GROUPS, NUM_ROWS, sizes.value_dim),
            tile(*stages, sizes.dim),
            tile(*stages, sizes.value_dim),
            plgpu.SMEM((NUM_GROUPS, NUM_ROWS, TILE_COLUMNS), q.dtype),
            barriers(NUM_GROUPS, sizes.num_heads),
            barriers(sizes.num_stages, sizes.num_keys // sizes.piece),
            barriers(sizes.num_stages, sizes.num_keys // sizes.piece),
            barriers(sizes.num_stages, NUM_GROUPS),
            barriers(sizes.num_stages, NUM_GROUPS),
            barriers(1, NUM_GROUPS),
            barriers(1, NUM_GROUPS),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="paged_attention_mosaic",
    )
    return run(items, page_table, q, pool, *([] if sinks is None else [sinks]))
