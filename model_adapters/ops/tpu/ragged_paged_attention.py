"""Attention of ragged runs of new tokens on TPUs: prefill, chunks, and mixed steps.

The method is FlashAttention (Dao et al., arXiv 2205.14135): a running softmax over blocks of keys; blocks that no query
of a block of queries sees are skipped. Query heads of one kv head are more rows of its products.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from model_adapters.ops import registry
from model_adapters.ops.attention_args import AttentionArgs, unsupported_field
from model_adapters.ops.kv_pool import token_positions
from model_adapters.ops.paged_attention import OP
from model_adapters.ops.tpu.kv_write import write_tokens
from model_adapters.ops.tpu.launch import (
    NAME,
    Features,
    compiler_params,
    flat_table,
    product,
    row_constants,
    unsupported_reason,
)
from model_adapters.ops.tpu.page_buffers import LANES, MASKED, BlockBuffer, Blocks, Lanes, across, round_up
from model_adapters.ops.tpu.query_blocks import NARROW, heads_of_product, heads_of_registers, num_queries_of
from model_adapters.ops.tpu.work_items import FIELDS, Item, items_of

MAX_KEYS = 1024  # positions of a block
MAX_KEYS_BYTES = 4 << 20  # of a block


@dataclass(frozen=True)
class _Ragged:
    """References and sizes of a call; `heads` kv heads of `group` query heads each."""

    items: Any  # int32[num_items * fields]
    constants: Any  # float32[rows * 4]
    q: Any  # [Hq, queries, D]
    out: Any  # [queries, Hq * Dv]
    mask: Any  # float32[queries, keys]
    top: Any  # float32[H, group * queries, 128]
    total: Any  # the same
    sums: Any  # float32[H, group * queries, value lanes]
    buffer: BlockBuffer
    lanes: Lanes
    features: Features
    heads: int
    group: int
    has_prefix: bool
    until: Any = None  # int32[queries, 1], or None

    @property
    def blocks(self) -> Blocks:
        """Sizes of pieces and blocks."""
        return self.buffer.blocks

    @property
    def num_items(self) -> int:
        """Number of items, including empty ones."""
        return self.items.shape[0] // len(FIELDS)

    def item(self, index: Any) -> Item:
        """Returns item `index`."""
        return Item(*(self.items[index * len(FIELDS) + i] for i in range(len(FIELDS))))

    def fetch(self, item: Item, block: Any, slot: Any) -> None:
        """Starts the reads of block `block` of the keys of `item`."""
        before = block * self.blocks.num_pieces
        self.buffer.start(item.source + before, item.num_pieces - before, slot)

    def fetch_very_first(self) -> None:
        """Starts the reads of the first block of the call."""
        self.buffer.begin()
        own = self.item(0)
        index = jnp.where(own.num_pieces > 0, 0, own.following)

        @pl.when(index < self.num_items)
        def _read() -> None:
            self.fetch(self.item(index), 0, 0)

    def column(self, head: Any, field: int, num_queries: int) -> jax.Array:
        """Returns constant `field` of a kv head's query heads, ``[group * num_queries, 1]``."""
        first = head * self.group
        columns = [
            jnp.full((num_queries, 1), self.constants[(first + g) * 4 + field], jnp.float32) for g in range(self.group)
        ]
        return jnp.concatenate(columns, axis=0)

    def begin(self, num_queries: int) -> None:
        """Initializes the running softmax of `num_queries` queries of all heads."""
        rows = self.group * num_queries

        def one(head: Any, _: None) -> None:
            sink = jnp.broadcast_to(self.column(head, 0, num_queries), (rows, LANES))
            self.top[head, :rows] = sink
            self.total[head, :rows] = jnp.where(sink > MASKED / 2, 1.0, 0.0)
            self.sums[head, :rows] = jnp.zeros((rows, self.sums.shape[2]), jnp.float32)

        lax.fori_loop(0, self.heads, one, None)

    def positions(self, item: Item, block: Any, first: Any, num_queries: int) -> tuple[jax.Array, jax.Array]:
        """Returns positions of keys ``[1, keys]`` and queries ``[queries, 1]`` from `first` on."""
        keys = self.blocks.begin_of(block, item.low) + lax.broadcasted_iota(jnp.int32, (1, self.blocks.length), 1)
        queries = first + item.shift + lax.broadcasted_iota(jnp.int32, (num_queries, 1), 0)
        return keys, queries

    def write_mask(self, item: Item, keys: jax.Array, queries: jax.Array, row: Any) -> None:
        """Writes the additive mask, 0 where a query sees a key; the first query is row `row`."""
        last = queries if self.until is None else jnp.maximum(queries, self.until[pl.ds(row, queries.shape[0])])
        visible = keys <= last
        if self.features.window is not None:
            visible &= keys > queries - self.features.window
        if self.has_prefix:
            visible |= keys < item.prefix
        visible &= keys < item.high
        self.mask[: queries.shape[0]] = jnp.where(visible, 0.0, MASKED)

    def needs_mask(self, item: Item, block: Any) -> Any:
        """Returns whether some query of the item does not see some key of the block."""
        begin = self.blocks.begin_of(block, item.low)
        sees_all = begin + self.blocks.length - 1 <= item.begin + item.shift
        if self.features.window is not None:
            sees_all &= begin > item.end - 1 + item.shift - self.features.window
        return ~sees_all

    def in_key_lanes(self, q: jax.Array) -> jax.Array:
        """Returns queries ``[R, D]`` as ``[R, key lanes]``, zero in additional lanes."""
        num_more = self.lanes.key_end - self.lanes.dim
        return jnp.concatenate([q, jnp.zeros((q.shape[0], num_more), q.dtype)], axis=1) if num_more else q

    def attend(self, head: Any, slot: Any, row: Any, num_queries: int, distance: Any, mask: Any | None) -> None:
        """Adds the block in `slot` to the softmax of a kv head's queries from `row` on."""
        dtype, length = self.features.dtype, self.blocks.length
        keys = self.buffer.keys(slot, head, 0, self.blocks.num_pieces, self.lanes, dtype)
        values = self.buffer.values(slot, head, 0, self.blocks.num_pieces, self.lanes, dtype)
        at_once = heads_of_product(self.group, num_queries)

        def products(begin: int) -> jax.Array:
            q = self.q[pl.ds(head * self.group + begin, at_once), pl.ds(row, num_queries)]
            return product(self.in_key_lanes(q.reshape(at_once * num_queries, -1)), keys, 1)

        following = products(0)
        for begin in range(
            0, self.group, at_once
        ):  # products of some query heads in parallel with the softmax of others
            scores = following
            if begin + at_once < self.group:
                following = products(begin + at_once)
            parts = []
            for g in range(at_once):
                at = (head * self.group + begin + g) * 4
                part = scores[g * num_queries : (g + 1) * num_queries]
                part = self.features.score(part, self.constants[at + 1], self.constants[at + 2], distance)
                parts.append(part if mask is None else part + mask[:num_queries])
            scores = jnp.concatenate(parts, axis=0)
            rows = slice(begin * num_queries, (begin + at_once) * num_queries)
            top = self.top[head, rows]
            new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp2(scores - across(new_top, length))
            shrink = jnp.exp2(top - new_top)
            self.top[head, rows] = new_top
            self.total[head, rows] = shrink * self.total[head, rows] + jnp.sum(weights, axis=1, keepdims=True)
            sums = self.sums[head, rows]
            self.sums[head, rows] = across(shrink, sums.shape[1]) * sums + product(weights.astype(dtype), values, 0)

    def finish(self, item: Item, first: Any, row: Any, num_queries: int) -> None:
        """Writes the item's rows of the output and leaves those of other items."""
        rows = self.group * num_queries
        token = first + lax.broadcasted_iota(jnp.int32, (num_queries, 1), 0)
        own = (token >= item.begin) & (token < item.end) & (token + item.shift >= 0)
        num_aligned = heads_of_registers(self.group, self.lanes.value_dim)
        at_once = max(num_aligned, 1)

        def one(head: Any, _: None) -> None:
            total = self.total[head, :rows, :1]
            seen = (self.top[head, :rows, :1] > MASKED / 2) & (total > 0)
            factor = jnp.where(seen, self.column(head, 3, num_queries) / jnp.where(seen, total, 1.0), 0.0)
            made = (self.sums[head, :rows] * factor)[:, self.lanes.values_kept]
            parts = [made[g * num_queries : (g + 1) * num_queries] for g in range(self.group)]
            for begin in range(0, self.group, at_once):
                part = jnp.concatenate(parts[begin : begin + at_once], axis=1)
                column = (head * self.group + begin) * self.lanes.value_dim
                column = pl.multiple_of(column, LANES) if num_aligned else column
                place = (pl.ds(row, num_queries), pl.ds(column, part.shape[1]))
                old = self.out[place].astype(jnp.float32)
                self.out[place] = jnp.where(own, part, old).astype(self.out.dtype)

        if num_aligned:
            lax.fori_loop(0, self.heads, one, None)
        else:  # columns that begin within a register have to be known when the kernel is compiled
            for head in range(self.heads):
                one(head, None)

    def run(self, item: Item, slot_ref: Any, first: Any, row: Any, num_queries: int) -> None:
        """Computes all blocks of an item as `num_queries` rows; token `first` is row `row`.

        The running softmax of all heads is in scratch memory (`top`, `total`, `sums`). `slot_ref` has the half of the
        buffer whose block is computed next: its reads have been started by the block before, of this item or of one
        before it. In front of each block the next one's are started into the other half, of this item or of the next
        that has any.
        """
        self.begin(num_queries)
        num_blocks = pl.cdiv(item.num_pieces, self.blocks.num_pieces)

        def step(block: Any, _: None) -> None:
            slot = slot_ref[0]
            is_last = block + 1 == num_blocks
            target = jnp.where(is_last, item.following, pl.program_id(0))

            @pl.when(target < self.num_items)
            def _ahead() -> None:
                self.fetch(self.item(target), jnp.where(is_last, 0, block + 1), 1 - slot)

            slot_ref[0] = 1 - slot
            self.buffer.wait(item.num_pieces - block * self.blocks.num_pieces, slot)
            begin = self.blocks.begin_of(block, item.low)
            self.buffer.clean(slot, item.low - begin, item.high - begin, slice(0, self.buffer.buffer.shape[4]))
            keys, queries = self.positions(item, block, first, num_queries)
            distance = keys - queries if self.features.has_alibi else None

            masked = self.needs_mask(item, block)

            @pl.when(masked)
            def _some_hidden() -> None:
                self.write_mask(item, keys, queries, row)
                lax.fori_loop(
                    0, self.heads, lambda h, _: self.attend(h, slot, row, num_queries, distance, self.mask), None
                )

            @pl.when(~masked)
            def _all_visible() -> None:
                lax.fori_loop(0, self.heads, lambda h, _: self.attend(h, slot, row, num_queries, distance, None), None)

        lax.fori_loop(0, num_blocks, step, None)
        self.finish(item, first, row, num_queries)


def _kernel(
    items: Any,
    table: Any,
    constants: Any,
    q: Any,
    pool: Any,
    *refs: Any,
    lanes: Lanes,
    features: Features,
    blocks: Blocks,
    num_tokens: int,
    has_prefix: bool,
    has_until: bool,
) -> None:
    until, (out, slot_ref, *scratch) = (refs[0], refs[1:]) if has_until else (None, refs)
    mask, top, total, sums, buffer, semaphores, filled = scratch
    pages = BlockBuffer(pool, buffer, semaphores, filled, table, blocks)
    heads = buffer.shape[2]
    group = q.shape[0] // heads
    ragged = _Ragged(
        items, constants, q, out, mask, top, total, sums, pages, lanes, features, heads, group, has_prefix, until
    )
    index, num_queries = pl.program_id(0), q.shape[1]
    item = ragged.item(index)

    @pl.when(index == 0)
    def _begin() -> None:
        slot_ref[0] = 0
        ragged.fetch_very_first()

    row = item.begin % num_queries

    @pl.when((row == 0) & (item.begin < num_tokens))
    def _new_block() -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)

    tile = pl.multiple_of(row // NARROW * NARROW, NARROW)
    is_narrow = row + item.end - item.begin <= tile + NARROW

    @pl.when((item.num_pieces > 0) & is_narrow)
    def _narrow() -> None:
        ragged.run(item, slot_ref, item.begin - row + tile, tile, NARROW)

    if num_queries > NARROW:

        @pl.when((item.num_pieces > 0) & ~is_narrow)
        def _wide() -> None:
            ragged.run(item, slot_ref, item.begin - row, 0, num_queries)


SUPPORTED_ARGS = frozenset(
    {"window", "softcap", "sinks", "alibi_slopes", "prefix_lens", "kv_scales", "sees_until", "value_begin"}
)
"""Fields of `AttentionArgs` that the kernel takes."""


def _unsupported_reason(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    args: AttentionArgs,
) -> str | None:
    return unsupported_field(args, SUPPORTED_ARGS) or unsupported_reason(q, pool, page_table)


@registry.register(OP, NAME, ("tpu",), unsupported_reason=_unsupported_reason)
def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    args: AttentionArgs,
) -> tuple[jax.Array, jax.Array]:
    """Runs the Pallas kernel after the new tokens are written, in place."""
    seqs, positions = token_positions(q.shape[0], kv_lens, cu_q_lens)
    pool = write_tokens(pool, page_table, seqs, positions, k, args.written_values(v), args.kv_scales, in_runs=True)
    num_tokens, query_heads, dim = q.shape
    lanes = Lanes.of(dim, args.value_columns(dim, v.shape[2]))
    blocks = Blocks.of(pool, page_table.shape[1], MAX_KEYS, MAX_KEYS_BYTES)
    features = Features(q.dtype, args.window, args.softcap, args.alibi_slopes is not None, pool.dtype == jnp.int8)
    constants = row_constants(query_heads, args)
    num_queries = num_queries_of(num_tokens, query_heads, lanes.value_end - lanes.value_begin)
    padded = round_up(num_tokens, num_queries)
    pages_per_seq = page_table.shape[1]
    items = items_of(padded, num_queries, blocks, pages_per_seq, kv_lens, cu_q_lens, args)
    kernel = functools.partial(
        _kernel,
        lanes=lanes,
        features=features,
        blocks=blocks,
        num_tokens=padded,
        has_prefix=args.prefix_lens is not None,
        has_until=args.sees_until is not None,
    )
    until = [] if args.sees_until is None else [args.sees_until[:, None]]
    # Heads first: a block of queries of one head is then a matrix that begins a tile. The last block may end behind the
    # tokens: what it reads there is undefined and stays in rows of no sequence, what it writes there is dropped.
    q = jnp.swapaxes(q, 0, 1)
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((num_tokens, query_heads * v.shape[2]), q.dtype),
        grid_spec=_grid(items.shape[0], q, pool, lanes, blocks, num_queries, has_until=bool(until)),
        compiler_params=compiler_params(blocks, pool),
        name="paged_attention",
    )
    out = call(items.reshape(-1), flat_table(page_table, pool), constants.reshape(-1), q, pool, *until)
    return out.reshape(num_tokens, query_heads, v.shape[2]), pool


def _grid(
    num_items: int,
    q: jax.Array,
    pool: jax.Array,
    lanes: Lanes,
    blocks: Blocks,
    num_queries: int,
    *,
    has_until: bool,
) -> pltpu.PrefetchScalarGridSpec:
    """Returns a grid of one step an item; items of a block of queries share its copy."""
    query_heads, num_tokens, _ = q.shape
    heads, width = pool.shape[1], pool.shape[3]
    rows = query_heads // heads * num_queries

    def block_at(i: Any, items: Any, *_: Any) -> tuple[Any, Any]:
        return jnp.minimum(items[i * len(FIELDS)], num_tokens - 1) // num_queries, 0

    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(num_items,),
        in_specs=[
            pl.BlockSpec((query_heads, num_queries, lanes.dim), lambda *at: (0, *block_at(*at))),
            pl.BlockSpec(memory_space=pl.ANY),
            *([pl.BlockSpec((num_queries, 1), block_at)] if has_until else []),
        ],
        out_specs=pl.BlockSpec((num_queries, query_heads * lanes.value_dim), block_at),
        scratch_shapes=[
            pltpu.SMEM((1,), jnp.int32),
            pltpu.VMEM((num_queries, blocks.length), jnp.float32),
            pltpu.VMEM((heads, rows, LANES), jnp.float32),
            pltpu.VMEM((heads, rows, LANES), jnp.float32),
            pltpu.VMEM((heads, rows, lanes.value_end - lanes.value_begin), jnp.float32),
            pltpu.VMEM((2, blocks.num_pieces, heads, blocks.piece, width), pool.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SMEM((2,), jnp.int32),
        ],
    )
