"""What the rows of a decode call see, and the order in which their blocks are read: across rows, a block ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from model_adapters.ops.tpu.pages import BlockBuffer, Blocks


@dataclass(frozen=True)
class Row:
    """What a row sees: positions ``[begin, end)``, in `num_pieces` pieces from `first` on; no piece: nothing."""

    begin: Any
    end: Any
    first: Any
    num_pieces: Any


@dataclass(frozen=True)
class Rows:
    """The rows of a call."""

    lens: Any  # int32[B]
    starts: Any  # int32[B]
    window: int | None
    pages_per_seq: int
    blocks: Blocks

    @property
    def count(self) -> int:
        """Of rows."""
        return int(self.lens.shape[0])

    @property
    def has_long(self) -> bool:
        """Whether a row that begins with a piece may have more than three blocks."""
        length = self.pages_per_seq * self.blocks.page
        return min(length, self.window or length) > 3 * self.blocks.length

    def __getitem__(self, index: Any) -> Row:
        """What row `index` sees."""
        length = self.lens[index]
        end = jnp.clip(length, 0, self.pages_per_seq * self.blocks.page)
        begin = jnp.maximum(self.starts[index], 0)
        if self.window is not None:
            begin = jnp.maximum(begin, length - self.window)
        first = begin // self.blocks.piece
        num_pieces = jnp.where(begin < end, pl.cdiv(end, self.blocks.piece) - first, 0)
        return Row(begin, end, first, num_pieces)

    def first_from(self, index: Any) -> Any:
        """The first row from `index` on that sees something; `count` if none does."""

        def sees_nothing(i: Any) -> Any:
            return (i < self.count) & (self[jnp.minimum(i, self.count - 1)].num_pieces == 0)

        return lax.while_loop(sees_nothing, lambda i: i + 1, index)

    def source(self, index: Any, row: Row, block: Any) -> Any:
        """The piece of the flat table that block `block` of row `index` begins with."""
        per_seq = self.pages_per_seq * (self.blocks.page // self.blocks.piece)
        return index * per_seq + row.first + block * self.blocks.num_pieces


@dataclass(frozen=True)
class Reader:
    """Reads the blocks of all rows in turn, each into one half of the buffer while the other's is computed with."""

    rows: Rows
    buffer: BlockBuffer
    state: Any  # int32[3]: the half whose turn it is; the row and block of it to be read next

    def begin(self, cleared: slice | None) -> None:
        """Starts to read the first two blocks of all; zeroes lanes `cleared` of what they leave of the buffer."""
        self.state[0] = 0
        self.state[1] = self.rows.first_from(0)
        self.state[2] = 0

        def one(slot: Any, _: None) -> None:
            count = self.read_next(slot)
            if cleared is not None:
                self.buffer.clear(slot, jnp.minimum(count, self.rows.blocks.num_pieces), cleared)

        lax.fori_loop(0, 2, one, None)

    def read_next(self, slot: Any) -> Any:
        """Starts to read the next block of all rows, if there is one; returns its number of pieces, uncapped."""
        index, block = self.state[1], self.state[2]
        at = jnp.minimum(index, self.rows.count - 1)
        row, size = self.rows[at], self.rows.blocks.num_pieces
        count = jnp.where(index < self.rows.count, row.num_pieces - block * size, 0)
        self.buffer.start(self.rows.source(at, row, block), count, slot)
        is_last = count <= size
        self.state[1] = self.rows.first_from(jnp.where(is_last, index + 1, index))
        self.state[2] = jnp.where(is_last, 0, block + 1)
        return count

    def skip(self, num_blocks: Any) -> None:
        """Goes on that many blocks later in the row to be read next: the caller reads them."""
        self.state[2] += num_blocks

    def take_turn(self) -> Any:
        """The half of the buffer whose turn it is; the other one is next."""
        slot = self.state[0]
        self.state[0] = 1 - slot
        return slot
