"""What the TPU kernels share: which lanes hold keys and values, how a row is cut into blocks, their double buffer.

A pool is ``[P, H, page, W]``; a page of all its heads is one contiguous piece of memory and one DMA. Several pages of
one row make a block, and the next block is on its way while one is computed with, across rows as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
SUBLANES = 8
MASKED = -1e30  # below every real score; finite, so that the difference of two is no NaN
MAX_PIECE_LEN = 256
MAX_BLOCK_LEN = 4096
MAX_BLOCK_BYTES = 8 << 20  # as they are multiplied
MAX_UNROLLED = 64


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is no less than `value`."""
    return -(-value // multiple) * multiple


def tile_rows(dtype: Any) -> int:
    """Rows of a tile of `dtype` in vector memory: 8 of 32 bits, and as many times more as fit into 32 bits."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def following_of(num_pieces: jax.Array) -> jax.Array:
    """int32[n]: behind each of ``num_pieces[n]`` the next one that is not zero; n, if none is."""
    count = num_pieces.shape[0]
    index = jnp.where(num_pieces > 0, jnp.arange(count, dtype=jnp.int32), count)
    return jnp.append(lax.cummin(index, reverse=True)[1:], jnp.int32(count))


def across(column: jax.Array, width: int) -> jax.Array:
    """``column[R, 128]``, one value per row in every lane, as ``[R, width]``; nothing moves between lanes."""
    if width <= LANES:
        return column[:, :width]
    whole = jnp.concatenate([column] * -(-width // LANES), axis=1)
    return whole if width % LANES == 0 else whole[:, :width]


@dataclass(frozen=True)
class Lanes:
    """Where keys and values lie in the last dimension of a pool, in whole registers of 128 lanes.

    Keys are ``[0, dim)`` and are read as ``[0, key_end)``; the query is zero where that reads too much. Values are
    ``[dim, dim + value_dim)`` and are read as ``[value_begin, value_end)``; what is too much is cut from the output.
    """

    dim: int
    value_dim: int
    num_packed: int = 1  # heads side by side in one matrix of keys or values

    @classmethod
    def packing(cls, dim: int, value_dim: int, heads: int) -> Lanes:
        """Two heads at once where both keys and values of one fill half of the lanes or all of them."""
        is_fitting = dim == value_dim and dim in (LANES // 2, LANES)
        return cls(dim, value_dim, 2 if is_fitting and heads % 2 == 0 else 1)

    @property
    def key_end(self) -> int:
        """End of the registers that hold keys."""
        return round_up(self.dim, LANES)

    @property
    def value_begin(self) -> int:
        """Begin of the registers that hold values."""
        return self.dim // LANES * LANES

    @property
    def value_end(self) -> int:
        """End of the registers that hold values."""
        return round_up(self.dim + self.value_dim, LANES)

    @property
    def query_width(self) -> int:
        """Lanes of a query that is multiplied with a matrix of keys."""
        return self.key_end if self.num_packed == 1 else self.num_packed * self.dim

    @property
    def sums_width(self) -> int:
        """Lanes of a product with a matrix of values."""
        return self.value_end - self.value_begin if self.num_packed == 1 else self.num_packed * self.value_dim

    @property
    def values_read(self) -> slice:
        """Lanes of the pool that are summed for an output."""
        return slice(self.value_begin, self.value_end)

    @property
    def values_kept(self) -> slice:
        """The values proper within what is summed."""
        begin = self.dim - self.value_begin
        return slice(begin, begin + self.value_dim)


@dataclass(frozen=True)
class Blocks:
    """How the positions of a row are cut: a page into pieces of one DMA each, and pieces put together to a block.

    A page is one piece unless it is long, as that of a cache with one page per row is.
    """

    page: int
    piece: int  # positions
    num_pieces: int  # in a block

    @classmethod
    def of(
        cls, pool: jax.Array, pages_per_seq: int, max_len: int = MAX_BLOCK_LEN, max_bytes: int = MAX_BLOCK_BYTES
    ) -> Blocks:
        """Large enough that a block's fixed costs do not count, and no longer than a row."""
        _, heads, page, width = pool.shape
        piece = page
        while piece > MAX_PIECE_LEN and piece % (2 * tile_rows(pool.dtype)) == 0:
            piece //= 2
        piece_bytes = heads * piece * width * max(pool.dtype.itemsize, 2)  # int8 may be multiplied as bfloat16
        most = min(max_bytes // piece_bytes, max_len // piece, pages_per_seq * (page // piece))
        return cls(page, piece, max(1, most))

    @property
    def length(self) -> int:
        """Positions in a block."""
        return self.piece * self.num_pieces

    def begin_of(self, block: Any, first: Any) -> Any:
        """The position that block `block` of a row begins with whose first position is `first`."""
        return first // self.piece * self.piece + block * self.length


@dataclass(frozen=True)
class BlockBuffer:
    """The double buffer ``buffer[2, pieces, H, piece, W]``, filled from ``pool[P, H, page, W]``.

    ``table`` is the page table in scalar memory, flat. Each :meth:`start` is followed by one :meth:`wait` with the same
    `count` and `slot` before what it reads is used or that half is filled again. All entries of the table are pages of
    the pool: a DMA outside of memory stops the device.
    """

    pool: Any
    buffer: Any
    semaphores: Any  # DMA[2]
    filled: Any  # int32[2]: pieces of each half that something may lie in
    table: Any  # int32[rows * pages_per_seq]
    blocks: Blocks

    def _copy(self, index: Any, slot: Any, i: Any) -> Any:
        """The DMA of piece `index`, counted through the flat table, to place `i` of half `slot`."""
        per_page = self.blocks.page // self.blocks.piece
        entry = index if per_page == 1 else index // per_page
        source = self.pool.at[self.table[entry]]
        if per_page > 1:
            begin = pl.multiple_of(index % per_page * self.blocks.piece, self.blocks.piece)
            source = source.at[:, pl.ds(begin, self.blocks.piece)]
        return pltpu.make_async_copy(source, self.buffer.at[slot, i], self.semaphores.at[slot])

    def start(self, first: Any, count: Any, slot: Any) -> None:
        """Starts to read `count` pieces, or a block if that is less, from piece `first` of the flat table on."""
        size = self.blocks.num_pieces

        @pl.when(count >= size)
        def _whole() -> None:
            self.start_block(first, slot)

        @pl.when(count < size)
        def _part() -> None:
            self.start_pieces(first, count, slot)

    def start_pieces(self, first: Any, count: Any, slot: Any) -> None:
        """Starts to read `count` pieces, less than a block, from piece `first` of the flat table on."""
        self.filled[slot] = jnp.maximum(self.filled[slot], count)
        lax.fori_loop(0, count, lambda i, _: self._copy(first + i, slot, i).start(), None)

    def start_block(self, first: Any, slot: Any) -> None:
        """Starts to read a whole block from piece `first` of the flat table on; no branch if its pieces are few."""
        size = self.blocks.num_pieces
        self.filled[slot] = size
        step = math.gcd(size, MAX_UNROLLED)

        def some(j: Any, _: None) -> None:
            for i in range(step):
                self._copy(first + j * step + i, slot, j * step + i).start()

        some(0, None) if step == size else lax.fori_loop(0, size // step, some, None)

    def wait(self, count: Any, slot: Any) -> None:
        """Waits until `count` pieces, or a block if that is less, are there."""

        @pl.when(count >= self.blocks.num_pieces)
        def _whole() -> None:
            self.wait_block(slot)

        @pl.when(count < self.blocks.num_pieces)
        def _part() -> None:
            here = self.buffer.at[slot, 0]
            lax.fori_loop(
                0, count, lambda i, _: pltpu.make_async_copy(here, here, self.semaphores.at[slot]).wait(), None
            )

    def wait_block(self, slot: Any) -> None:
        """Waits until a whole block is there."""
        here = self.buffer.at[slot]
        pltpu.make_async_copy(here, here, self.semaphores.at[slot]).wait()  # one wait for the bytes of all

    def keys(self, slot: Any, head: Any, first: Any, count: int, lanes: Lanes, dtype: Any) -> jax.Array:
        """Keys ``[n, key lanes]`` of `count` pieces from `first` on."""
        if lanes.num_packed == 1:
            return self._rows(slot, head, first, count, slice(0, lanes.key_end)).astype(dtype)
        return self._packed(slot, head, first, count, lanes, dtype, keys=True)

    def values(self, slot: Any, head: Any, first: Any, count: int, lanes: Lanes, dtype: Any) -> jax.Array:
        """Values ``[n, value lanes]`` of `count` pieces from `first` on."""
        if lanes.num_packed == 1:
            return self._rows(slot, head, first, count, lanes.values_read).astype(dtype)
        return self._packed(slot, head, first, count, lanes, dtype, keys=False)

    def _rows(self, slot: Any, head: Any, first: Any, count: int, lanes: slice) -> jax.Array:
        read = self.buffer[slot, pl.ds(first, count), head, :, lanes]
        return read.reshape(count * self.blocks.piece, -1)

    def _packed(
        self, slot: Any, pair: Any, first: Any, count: int, lanes: Lanes, dtype: Any, *, keys: bool
    ) -> jax.Array:
        """Keys of two heads side by side, or their values, those of the second head first: ``[n, 2 * dim]``.

        Heads of 64 must be moved for that: turned by half its lanes, the second head has its keys beside those of the
        first, and its values too.
        """
        if lanes.dim == LANES:
            half = slice(0, LANES) if keys else slice(LANES, 2 * LANES)
            a, b = (self._rows(slot, 2 * pair + i, first, count, half) for i in range(2))
            return jnp.concatenate([a, b] if keys else [b, a], axis=1).astype(dtype)
        a, b = (self._rows(slot, 2 * pair + i, first, count, slice(0, LANES)).astype(dtype) for i in range(2))
        if packs := jnp.dtype(dtype).itemsize < 4:  # lanes are turned and chosen 32 bits at a time
            a, b = pltpu.bitcast(a, jnp.int32), pltpu.bitcast(b, jnp.int32)
        b = pltpu.roll(b, LANES // 2, 1)
        is_low = lax.broadcasted_iota(jnp.int32, a.shape, 1) < LANES // 2
        both = jnp.where(is_low, a, b) if keys else jnp.where(is_low, b, a)
        return pltpu.bitcast(both, dtype) if packs else both

    def begin(self) -> None:
        """To be called before the first start: nothing is known of what lies in the buffer."""
        for slot in range(2):
            self.filled[slot] = self.blocks.num_pieces

    def clean(self, slot: Any, begin: Any, end: Any, lanes: slice) -> None:
        """Zeroes `lanes` of a half outside of its positions ``[begin, end)``; `begin` is in its first piece or before.

        A weight of zero is multiplied with what lies there, which may be NaN: of tokens that another sequence had in
        the page, or of what was read into this half before. Integers have none.
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
        there = self.buffer[slot, i, :, :, lanes]
        position = lax.broadcasted_iota(jnp.int32, there.shape, 1)
        kept = jnp.where((position >= begin) & (position < end), there.astype(jnp.float32), 0.0)
        self.buffer[slot, i, :, :, lanes] = kept.astype(self.buffer.dtype)
