"""Decode attention on TPUs: one query per row, all its heads at once.

The method is attention with a running softmax over blocks (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv
2205.14135) on pages (Kwon et al., arXiv 2309.06180), as a kernel that should take no longer than the reads of the pages
(int8 on tpu7x takes longer, see tests/aot): blocks are read ahead across rows, keys and values are the stationary
operand of the products, and the scores of all heads are one array without padding between groups, so that the softmax
is computed once a block. Pages of int8 are multiplied as int8 if the chip can, else in the queries' dtype.
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
from model_adapters.ops.decode_attention import OP
from model_adapters.ops.tpu import int8_matmul
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
from model_adapters.ops.tpu.page_buffers import (
    LANES,
    MASKED,
    MAX_BLOCK_BYTES,
    SUBLANES,
    BlockBuffer,
    Blocks,
    Lanes,
    across,
    round_up,
)
from model_adapters.ops.tpu.row_pipeline import Reader, Row, rows_of

FLOAT32_BLOCK_BYTES = MAX_BLOCK_BYTES // 4
"""Largest block of a call in float32.

A float32 product is several on the unit: compilation took up to 40 s with blocks of the full size, 7 s with these. By
the schedule they take 4 % longer; computing takes twice as long as reading.
"""
SCHEDULER = {"XLA_TPU_FORCE_LP_LLO_SCHEDULER": True}  # 3 to 5 % fewer cycles for heads of 64
Carry = tuple[jax.Array, jax.Array, jax.Array]  # largest score, sum of weights [R, 128], weighted values [R, lanes]


@dataclass(frozen=True)
class _Decode:
    """References and sizes of a call; `heads` kv heads, or pairs, of `group` query heads each."""

    reader: Reader
    lanes: Lanes
    features: Features
    heads: int
    group: int

    @property
    def buffer(self) -> BlockBuffer:
        """Double buffer that the reader fills."""
        return self.reader.buffer

    @property
    def blocks(self) -> Blocks:
        """Sizes of pieces and blocks."""
        return self.buffer.blocks

    @property
    def counts(self) -> list[int]:
        """Numbers of pieces that a partly visible block is computed with: the first that is enough."""
        size = self.blocks.num_pieces
        return sorted({-(-size * eighths // 8) for eighths in (1, 2, 4, 6, 8)})

    @property
    def unit(self) -> int:
        """Fewest heads whose rows are complete tiles of 8, computed in one softmax; else all heads."""
        sizes = (n for n in range(1, self.heads) if self.heads % n == 0 and n * self.group % SUBLANES == 0)
        return next(sizes, self.heads)

    def by_head(self, rows: jax.Array, first: int, other: Any, times: Any) -> jax.Array:
        """Returns `times` of row i of ``rows[R, n]`` and the matrix ``other(kv head of i)``.

        `first` is the head of row 0. All rows of the tiles that hold a head's rows are multiplied, and the rows of the
        head are selected from the result: no data moves between sublanes.
        """
        tiles: dict[int, jax.Array] = {}
        head_of = lax.broadcasted_iota(jnp.int32, (rows.shape[0], 1), 0) // self.group
        for head in range(self.unit):
            begin, end = head * self.group // SUBLANES * SUBLANES, round_up((head + 1) * self.group, SUBLANES)
            made = times(rows[begin:end], other(first + head))
            for at in range(begin, end, SUBLANES):
                new = made[at - begin : at - begin + SUBLANES]
                if at in tiles:
                    new = jnp.where(head_of[at : at + SUBLANES] == head, new, tiles[at])
                tiles[at] = new
        return jnp.concatenate([tiles[at] for at in sorted(tiles)], axis=0)

    @property
    def units(self) -> list[tuple[int, slice]]:
        """First head and query rows of each unit of heads."""
        num_rows = round_up(self.unit * self.group, SUBLANES)
        heads = range(0, self.heads, self.unit)
        return [(head, slice(i * num_rows, (i + 1) * num_rows)) for i, head in enumerate(heads)]

    def attend(
        self,
        q: jax.Array,
        constants: jax.Array,
        row: Row,
        begin: Any,
        slot: Any,
        size: int,
        carry: Carry,
        *,
        sees_all: bool = False,
    ) -> Carry:
        """Returns `carry` after `size` pieces in half `slot`, positions from `begin` on.

        `sees_all`: the row sees all of their positions. Products with keys come first, of all units, or of both halves
        of the pieces if there is one unit: some then run in parallel with the softmax of others.
        """
        count = size // 2 if self.unit == self.heads and size % 2 == 0 else size
        parts = range(0, size, count)
        keys = lax.broadcasted_iota(jnp.int32, (1, count * self.blocks.piece), 1)
        positions = [begin + part * self.blocks.piece + keys for part in parts]
        seen = [None if sees_all else (position >= row.begin) & (position < row.end) for position in positions]
        products = [self.times_keys(q, slot, part, count) for part in parts]
        for part, scores, position, mask in zip(parts, products, positions, seen, strict=True):
            distance = position - row.end + 1
            carry = self.weigh(scores, constants, distance, mask, slot, part, count, carry)
        return carry

    def times_keys(self, q: jax.Array, slot: Any, place: Any, size: int) -> list[jax.Array]:
        """Returns each unit's queries times the keys of `size` pieces from `place` of `slot` on."""

        def keys(head: int) -> jax.Array:
            return self.buffer.keys(slot, head, place, size, self.lanes, self.features.dtype)

        return [self.by_head(q[rows], head, keys, _times_keys) for head, rows in self.units]

    def weigh(
        self,
        products: list[jax.Array],
        constants: jax.Array,
        distance: jax.Array,
        seen: jax.Array | None,
        slot: Any,
        place: Any,
        size: int,
        carry: Carry,
    ) -> Carry:
        """Returns `carry` after the pieces whose keys gave `products`; `seen` None: all are visible."""
        num_keys = distance.shape[1]

        def values(head: int) -> jax.Array:
            return self.buffer.values(slot, head, place, size, self.lanes, self.features.dtype)

        made = []
        for (head, rows), scores in zip(self.units, products, strict=True):
            top, total, out = (part[rows] for part in carry)
            factor, slope = constants[rows, 1:2], constants[rows, 2:3]
            scores = self.features.score(scores, factor, slope, distance)
            if seen is not None:
                scores = jnp.where(seen, scores, MASKED)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp2(scores - across(new_top, num_keys))
            shrink = jnp.exp2(top - new_top)
            total = shrink * total + jnp.sum(weights, axis=1, keepdims=True)
            sums = self.by_head(weights, head, values, _times_values)
            made.append((new_top, total, across(shrink, out.shape[1]) * out + sums))
        top, total, out = (jnp.concatenate(parts, axis=0) for parts in zip(*made, strict=True))
        return top, total, out

    def run(self, q: jax.Array, constants: jax.Array, index: Any) -> Carry:
        """Computes all blocks of row `index`; after each, the next but one is read into its half.

        The carry is the running softmax of all heads (`Carry`), which begins with the sinks, if there are any.
        A fully visible block needs no mask, and no branch if it is known whether the next but one is full.
        """
        row = self.reader[index]
        size = self.blocks.num_pieces

        def fully_visible(begin: Any, left: Any, slot: Any, carry: Carry, *, next_is_full: bool) -> Carry:
            self.buffer.wait_block(slot)
            carry = self.attend(q, constants, row, begin, slot, size, carry, sees_all=True)
            self.reader.read_next(slot, is_full=next_is_full)
            return carry

        def partly_visible(begin: Any, left: Any, slot: Any, carry: Carry, *, count: int) -> Carry:
            self.buffer.wait(left, slot)
            self.buffer.clean(slot, row.begin - begin, row.end - begin, self.lanes.values_read)
            carry = self.attend(q, constants, row, begin, slot, count, carry)
            self.reader.read_next(slot)
            return carry

        branches = [
            functools.partial(fully_visible, next_is_full=True),
            functools.partial(fully_visible, next_is_full=False),
            *(functools.partial(partly_visible, count=count) for count in self.counts),
        ]

        def one(block: Any, carry: Carry) -> Carry:
            begin = self.blocks.begin_of(block, row.begin)
            sees_all = (row.begin <= begin) & (begin + self.blocks.length <= row.end)
            of_full = jnp.where(self.reader.next_is_full, 0, 1)
            left = row.num_pieces - block * size
            of_part = 2 + sum((left > count).astype(jnp.int32) for count in self.counts[:-1])
            slot = self.reader.take_turn()
            return lax.switch(jnp.where(sees_all, of_full, of_part), branches, begin, left, slot, carry)

        num_query_rows = q.shape[0]
        sink = jnp.broadcast_to(constants[:, :1], (num_query_rows, LANES))
        total = jnp.where(sink > MASKED / 2, 1.0, 0.0)
        carry = (sink, total, jnp.zeros((num_query_rows, self.lanes.sums_width), jnp.float32))
        return lax.fori_loop(0, pl.cdiv(row.num_pieces, size), one, carry)

    def spread(self, q: jax.Array) -> jax.Array:
        """Returns queries ``[R, D]`` in the lanes of their keys, zero in the others."""
        zeros = jnp.zeros((q.shape[0], self.lanes.query_width - self.lanes.dim), q.dtype)
        first = jnp.concatenate([q, zeros], axis=1) if zeros.size else q
        if self.lanes.num_packed == 1:
            return first
        second = jnp.concatenate([zeros, q], axis=1)
        chosen = jnp.where(self.is_second(q.shape[0]), second.astype(jnp.float32), first.astype(jnp.float32))
        return chosen.astype(q.dtype)

    def gather(self, sums: jax.Array) -> jax.Array:
        """Returns values ``[R, Dv]`` from the lanes of the weighted values of :meth:`run`."""
        if self.lanes.num_packed == 1:
            return sums[:, self.lanes.values_kept]
        dim = self.lanes.value_dim
        return jnp.where(self.is_second(sums.shape[0]), sums[:, :dim], sums[:, dim:])

    def is_second(self, num_query_rows: int) -> jax.Array:
        """Returns which rows belong to the second of two packed heads, ``[R, 1]``."""
        row = lax.broadcasted_iota(jnp.int32, (num_query_rows, 1), 0)
        return row // (self.group // 2) % 2 == 1


def _times_keys(q: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns ``float32[R, n]``: ``q[R, lanes]`` times ``keys[n, lanes]`` transposed."""
    return int8_matmul.times_keys(q, keys) if keys.dtype == jnp.int8 else product(q.astype(keys.dtype), keys, 1)


def _times_values(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Returns ``float32[R, lanes]``: ``weights[R, n]`` times ``values[n, lanes]``."""
    if values.dtype == jnp.int8:
        return int8_matmul.times_values(weights, values)
    return product(weights.astype(values.dtype), values, 0)


def _kernel(
    rows: Any,
    table: Any,
    q_ref: Any,
    constants_ref: Any,
    pool: Any,
    out_ref: Any,
    state: Any,
    buffer: Any,
    semaphores: Any,
    filled: Any,
    *,
    lanes: Lanes,
    features: Features,
    blocks: Blocks,
) -> None:
    index = pl.program_id(0)
    query_heads, heads = q_ref.shape[1], buffer.shape[2] // lanes.num_packed
    reader = Reader(rows, BlockBuffer(pool, buffer, semaphores, filled, table, blocks), state)
    decode = _Decode(reader, lanes, features, heads, query_heads // heads)

    @pl.when(index == 0)
    def _begin() -> None:
        reader.begin()

    q = q_ref[0]
    if missing := constants_ref.shape[0] - query_heads:
        q = jnp.concatenate([q, jnp.zeros((missing, q.shape[1]), q.dtype)], axis=0)
    constants = constants_ref[...]
    _, total, sums = decode.run(decode.spread(q), constants, index)
    sums = sums * (constants[:, 3:] / jnp.where(total == 0, 1.0, total)[:, :1])
    out_ref[0] = decode.gather(sums)[:query_heads].astype(out_ref.dtype)


SUPPORTED_ARGS = frozenset({"window", "softcap", "sinks", "alibi_slopes", "kv_scales", "value_begin"})
"""Fields of `AttentionArgs` that the kernel takes."""


def _unsupported_reason(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    starts: jax.Array,
    args: AttentionArgs,
) -> str | None:
    return unsupported_field(args, SUPPORTED_ARGS) or unsupported_reason(q, pool, page_table)


@registry.register(OP, NAME, ("tpu",), unsupported_reason=_unsupported_reason)
def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    lens: jax.Array,
    starts: jax.Array,
    args: AttentionArgs,
) -> tuple[jax.Array, jax.Array]:
    """Runs the Pallas kernel after the new tokens are written, in place."""
    rows = jnp.arange(lens.shape[0], dtype=jnp.int32)
    pool = write_tokens(pool, page_table, rows, lens - 1, k, args.written_values(v), args.kv_scales, in_runs=False)
    num_rows, query_heads, dim = q.shape
    _, heads, _, width = pool.shape
    is_int8, is_float32 = pool.dtype == jnp.int8, q.dtype == jnp.float32
    blocks = Blocks.of(pool, page_table.shape[1], max_bytes=FLOAT32_BLOCK_BYTES if is_float32 else MAX_BLOCK_BYTES)
    lanes = Lanes.packing(dim, args.value_columns(dim, v.shape[2]), heads)
    dtype = jnp.int8 if is_int8 and int8_matmul.multiplies_int8() else q.dtype
    features = Features(dtype, args.window, args.softcap, args.alibi_slopes is not None, is_int8)
    constants = row_constants(query_heads, args)
    call = pl.pallas_call(
        functools.partial(_kernel, lanes=lanes, features=features, blocks=blocks),
        out_shape=jax.ShapeDtypeStruct((num_rows, query_heads, v.shape[2]), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_rows,),
            in_specs=[
                pl.BlockSpec((1, query_heads, dim), lambda i, *_: (i, 0, 0)),
                pl.BlockSpec(constants.shape, lambda i, *_: (0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((1, query_heads, v.shape[2]), lambda i, *_: (i, 0, 0)),
            scratch_shapes=[
                pltpu.SMEM((3,), jnp.int32),
                pltpu.VMEM((2, blocks.num_pieces, heads, blocks.piece, width), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((2,), jnp.int32),
            ],
        ),
        compiler_params=compiler_params(blocks, pool, SCHEDULER),
        name="decode_attention",
    )
    row_fields = rows_of(lens, starts, args.window, page_table.shape[1], blocks)
    return call(row_fields, flat_table(page_table, pool), q, constants, pool), pool
