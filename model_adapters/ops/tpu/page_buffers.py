"""Lanes of keys and values, blocks of a row and their double buffer, for the TPU kernels.

A pool is ``[P, H, page, W]``; a page of all heads is contiguous in memory and one DMA. Several pages of one row form a
block. The next block, also of the next row, is read while one is computed.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # columns of a register
SUBLANES = 8  # rows of a register, of 32 bits
MASKED = -1e30  # below every real score; finite, so that the difference of two is no NaN
MAX_PIECE_LEN = 256  # positions of one DMA
MAX_BLOCK_LEN = 4096  # positions of a block
MAX_BLOCK_BYTES = 8 << 20  # of a block in the dtype of its products
MAX_UNROLLED = 64  # starts of DMAs without a loop


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def tile_rows(dtype: Any) -> int:
    """Returns the rows of a tile of `dtype` in vector memory: 8 of 32 bits, 16 of 16, 32 of 8."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def following_of(num_pieces: jax.Array) -> jax.Array:
    """Returns int32[n]: after each index the next with ``num_pieces[n] > 0``, else n."""
    count = num_pieces.shape[0]
    index = jnp.where(num_pieces > 0, jnp.arange(count, dtype=jnp.int32), count)
    return jnp.append(lax.cummin(index, reverse=True)[1:], jnp.int32(count))


def across(column: jax.Array, width: int) -> jax.Array:
    """Returns ``column[R, 128]``, one value per row in every lane, as ``[R, width]``.

    No data moves between lanes.
    """
    if width <= LANES:
        return column[:, :width]
    repeated = jnp.concatenate([column] * -(-width // LANES), axis=1)
    return repeated if width % LANES == 0 else repeated[:, :width]


@dataclass(frozen=True)
class Lanes:
    """Lanes of keys and values in the last axis of a pool, in registers of 128 lanes.

    Keys are ``[0, dim)`` and are read as ``[0, key_end)``; the query is zero in the additional lanes. Values are
    ``[first_value, first_value + value_dim)``, behind the keys or among them, and are read as ``[value_begin,
    value_end)``; additional lanes are cut from the output.
    """

    dim: int
    first_value: int
    value_dim: int
    num_packed: int = 1  # heads side by side in one matrix of keys or values

    @classmethod
    def of(cls, dim: int, columns: slice) -> Lanes:
        """Returns the lanes of one head by itself, with values in `columns`."""
        return cls(dim, columns.start, columns.stop - columns.start)

    @classmethod
    def packing(cls, dim: int, columns: slice, heads: int) -> Lanes:
        """Packs two heads if keys and the values behind them fill half of the lanes or all."""
        one = cls.of(dim, columns)
        is_fitting = dim == one.value_dim == one.first_value and dim in (LANES // 2, LANES)
        return dataclasses.replace(one, num_packed=2) if is_fitting and heads % 2 == 0 else one

    @property
    def key_end(self) -> int:
        """End of the registers that hold keys."""
        return round_up(self.dim, LANES)

    @property
    def value_begin(self) -> int:
        """Begin of the registers that hold values."""
        return self.first_value // LANES * LANES

    @property
    def value_end(self) -> int:
        """End of the registers that hold values."""
        return round_up(self.first_value + self.value_dim, LANES)

    @property
    def query_width(self) -> int:
        """Number of lanes of a query that is multiplied with a matrix of keys."""
        return self.key_end if self.num_packed == 1 else self.num_packed * self.dim

    @property
    def sums_width(self) -> int:
        """Number of lanes of a product with a matrix of values."""
        return self.value_end - self.value_begin if self.num_packed == 1 else self.num_packed * self.value_dim

    @property
    def values_read(self) -> slice:
        """Lanes of the pool that are summed for an output."""
        return slice(self.value_begin, self.value_end)

    @property
    def values_kept(self) -> slice:
        """Lanes of the output within the lanes that are summed."""
        begin = self.first_value - self.value_begin
        return slice(begin, begin + self.value_dim)


@dataclass(frozen=True)
class Blocks:
    """Sizes of pieces and blocks: a piece is one DMA, a page has one or more, a block several.

    A page is one piece unless it is long, as in a cache with one page per row.
    """

    page: int
    piece: int  # positions
    num_pieces: int  # in a block

    @classmethod
    def of(
        cls, pool: jax.Array, pages_per_seq: int, max_len: int = MAX_BLOCK_LEN, max_bytes: int = MAX_BLOCK_BYTES
    ) -> Blocks:
        """Returns blocks that hide their fixed costs, for ``pool[P, H, page, W]``."""
        _, heads, page, width = pool.shape
        piece = page
        while piece > MAX_PIECE_LEN and piece % (2 * tile_rows(pool.dtype)) == 0:
            piece //= 2
        piece_bytes = heads * piece * width * max(pool.dtype.itemsize, 2)  # int8 may be multiplied as bfloat16
        most = min(max_bytes // piece_bytes, max_len // piece, pages_per_seq * (page // piece))
        return cls(page, piece, max(1, most))

    @property
    def length(self) -> int:
        """Number of positions in a block."""
        return self.piece * self.num_pieces

    def begin_of(self, block: Any, first: Any) -> Any:
        """Returns the first position of block `block` of a row read from `first` on."""
        return first // self.piece * self.piece + block * self.length


@dataclass(frozen=True)
class BlockBuffer:
    """The double buffer ``buffer[2, pieces, H, piece, W]``, filled from ``pool[P, H, page, W]``.

    ``table`` is the flat page table in scalar memory. Each :meth:`start` needs one :meth:`wait` with the same `count`
    and `slot` before that half is used or filled again. All entries of the table must be pages of the pool: a DMA
    outside of memory stops the device.
    """

    pool: Any
    buffer: Any
    semaphores: Any  # DMA[2]
    filled: Any  # int32[2]: pieces of each half that may have been written
    table: Any  # int32[rows * pages_per_seq]
    blocks: Blocks

    def _copy(self, index: Any, slot: Any, i: Any) -> Any:
        """Returns the DMA of piece `index` of the flat table to place `i` of half `slot`."""
        per_page = self.blocks.page // self.blocks.piece
        entry = index if per_page == 1 else index // per_page
        source = self.pool.at[self.table[entry]]
        if per_page > 1:
            begin = pl.multiple_of(index % per_page * self.blocks.piece, self.blocks.piece)
            source = source.at[:, pl.ds(begin, self.blocks.piece)]
        return pltpu.make_async_copy(source, self.buffer.at[slot, i], self.semaphores.at[slot])

    def start(self, first: Any, count: Any, slot: Any) -> None:
        """Starts reads of `count` pieces, at most a block, from piece `first` of the flat table on."""
        size = self.blocks.num_pieces

        @pl.when(count >= size)
        def _full() -> None:
            self.start_block(first, slot)

        @pl.when(count < size)
        def _part() -> None:
            self.start_pieces(first, count, slot)

    def start_pieces(self, first: Any, count: Any, slot: Any) -> None:
        """Starts reads of `count` pieces, less than a block, from piece `first` on."""
        self.filled[slot] = jnp.maximum(self.filled[slot], count)
        lax.fori_loop(0, count, lambda i, _: self._copy(first + i, slot, i).start(), None)

    def start_block(self, first: Any, slot: Any) -> None:
        """Starts reads of a full block from piece `first` on, unrolled if it is short."""
        size = self.blocks.num_pieces
        self.filled[slot] = size
        step = math.gcd(size, MAX_UNROLLED)

        def some(j: Any, _: None) -> None:
            for i in range(step):
                self._copy(first + j * step + i, slot, j * step + i).start()

        some(0, None) if step == size else lax.fori_loop(0, size // step, some, None)

    def wait(self, count: Any, slot: Any) -> None:
        """Waits for `count` pieces, at most a block."""

        @pl.when(count >= self.blocks.num_pieces)
        def _full() -> None:
            self.wait_block(slot)

        @pl.when(count < self.blocks.num_pieces)
        def _part() -> None:
            here = self.buffer.at[slot, 0]
            lax.fori_loop(
                0, count, lambda i, _: pltpu.make_async_copy(here, here, self.semaphores.at[slot]).wait(), None
            )

    def wait_block(self, slot: Any) -> None:
        """Waits for a full block."""
        here = self.buffer.at[slot]
        pltpu.make_async_copy(here, here, self.semaphores.at[slot]).wait()  # one wait for the bytes of all

    def keys(self, slot: Any, head: Any, first: Any, count: int, lanes: Lanes, dtype: Any) -> jax.Array:
        """Returns keys ``[n, key lanes]`` of `count` pieces from `first` on."""
        if lanes.num_packed == 1:
            return self._rows(slot, head, first, count, slice(0, lanes.key_end)).astype(dtype)
        return self._packed(slot, head, first, count, lanes, dtype, keys=True)

    def values(self, slot: Any, head: Any, first: Any, count: int, lanes: Lanes, dtype: Any) -> jax.Array:
        """Returns values ``[n, value lanes]`` of `count` pieces from `first` on."""
        if lanes.num_packed == 1:
            return self._rows(slot, head, first, count, lanes.values_read).astype(dtype)
        return self._packed(slot, head, first, count, lanes, dtype, keys=False)

    def _rows(self, slot: Any, head: Any, first: Any, count: int, lanes: slice) -> jax.Array:
        read = self.buffer[slot, pl.ds(first, count), head, :, lanes]
        return read.reshape(count * self.blocks.piece, -1)

    def _packed(
        self, slot: Any, pair: Any, first: Any, count: int, lanes: Lanes, dtype: Any, *, keys: bool
    ) -> jax.Array:
        """Returns keys or values of two heads ``[n, 2 * dim]``, values with the second head first.

        Heads of 64 are moved between lanes for that: rotated by half of the lanes, keys and values of the second head
        are next to those of the first.
        """
        if lanes.dim == LANES:
            half = slice(0, LANES) if keys else slice(LANES, 2 * LANES)
            a, b = (self._rows(slot, 2 * pair + i, first, count, half) for i in range(2))
            return jnp.concatenate([a, b] if keys else [b, a], axis=1).astype(dtype)
        a, b = (self._rows(slot, 2 * pair + i, first, count, slice(0, LANES)).astype(dtype) for i in range(2))
        if packs := jnp.dtype(dtype).itemsize < 4:  # lanes are rotated and selected 32 bits at a time
            a, b = pltpu.bitcast(a, jnp.int32), pltpu.bitcast(b, jnp.int32)
        b = pltpu.roll(b, LANES // 2, 1)
        is_low = lax.broadcasted_iota(jnp.int32, a.shape, 1) < LANES // 2
        both = jnp.where(is_low, a, b) if keys else jnp.where(is_low, b, a)
        return pltpu.bitcast(both, dtype) if packs else both

    def begin(self) -> None:
        """Marks both halves as possibly written; to be called before the first start."""
        for slot in range(2):
            self.filled[slot] = self.blocks.num_pieces

    def clean(self, slot: Any, begin: Any, end: Any, lanes: slice) -> None:
        """Zeroes `lanes` of a half outside of positions ``[begin, end)``.

        `begin` is in the first piece. Their weights are zero, but 0 * NaN is NaN, and NaN may be left from tokens of
        another sequence in the page or from an earlier block in this half. Integers have no NaN.
        """
        if jnp.issubdtype(self.buffer.dtype, jnp.integer):
            return
        piece = self.blocks.piece

        @pl.when(begin > 0)
        def _front() -> None:
            self._keep(slot, 0, begin, piece, lanes)

        @pl.when((end < self.blocks.length) & (end % piece > 0))
        def _back() -> None:
            self._keep(slot, end // piece, 0, end % piece, lanes)

        def clear(i: Any, _: None) -> None:
            shape = (*self.buffer.shape[2:4], lanes.stop - lanes.start)
            self.buffer[slot, i, :, :, lanes] = jnp.zeros(shape, self.buffer.dtype)

        count = jnp.minimum(pl.cdiv(end, piece), self.blocks.num_pieces)
        lax.fori_loop(count, self.filled[slot], clear, None)
        self.filled[slot] = count

    def _keep(self, slot: Any, i: Any, begin: Any, end: Any, lanes: slice) -> None:
        """Zeroes `lanes` of piece `i` outside of its positions ``[begin, end)``."""
        values = self.buffer[slot, i, :, :, lanes]
        position = lax.broadcasted_iota(jnp.int32, values.shape, 1)
        visible = jnp.where((position >= begin) & (position < end), values.astype(jnp.float32), 0.0)
        self.buffer[slot, i, :, :, lanes] = visible.astype(self.buffer.dtype)
