"""What the rows of a decode call see, and the order in which their blocks are read: across rows, a block ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from model_adapters.ops.tpu.page_buffers import BlockBuffer, Blocks, following_of

FIELDS = ("begin", "end", "source", "num_pieces", "following")


@dataclass(frozen=True)
class Row:
    """What a row sees: positions ``[begin, end)``, in `num_pieces` pieces from `source` of the flat page table on.

    No piece: nothing. `following` is the next row that sees something; the number of rows, if none does.
    """

    begin: Any
    end: Any
    source: Any
    num_pieces: Any
    following: Any


def rows_of(lens: jax.Array, starts: jax.Array, window: int | None, pages_per_seq: int, blocks: Blocks) -> jax.Array:
    """``int32[B * fields]``, flat: rows of ``lens[B]`` positions, the first ``starts[B]`` of them never seen."""
    end = jnp.clip(lens, 0, pages_per_seq * blocks.page)
    begin = jnp.maximum(starts, 0)
    if window is not None:
        begin = jnp.maximum(begin, lens - window)
    first = begin // blocks.piece
    num_pieces = jnp.where(begin < end, -(-end // blocks.piece) - first, 0)
    index = jnp.arange(lens.shape[0], dtype=jnp.int32)
    source = index * (pages_per_seq * (blocks.page // blocks.piece)) + first
    return jnp.stack([begin, end, source, num_pieces, following_of(num_pieces)], axis=1).reshape(-1)


@dataclass(frozen=True)
class Reader:
    """Reads the blocks of all rows in turn, each into one half of the buffer while the other's is computed with."""

    rows: Any  # int32[B * fields], as of rows_of
    buffer: BlockBuffer
    state: Any  # int32[3]: the half whose turn it is; the row and block of it to be read next

    @property
    def num_rows(self) -> int:
        """Rows, also those that see nothing."""
        return int(self.rows.shape[0]) // len(FIELDS)

    def __getitem__(self, index: Any) -> Row:
        """What row `index` sees."""
        return Row(*(self.rows[index * len(FIELDS) + i] for i in range(len(FIELDS))))

    def begin(self) -> None:
        """Starts to read the first two blocks of all."""
        self.buffer.begin()
        first = self[0]
        self.state[0] = 0
        self.state[1] = jnp.where(first.num_pieces > 0, 0, first.following)
        self.state[2] = 0
        lax.fori_loop(0, 2, lambda slot, _: self.read_next(slot), None)

    @property
    def next_is_whole(self) -> Any:
        """Whether the next block of all rows is a whole one."""
        return self._next()[1] >= self.buffer.blocks.num_pieces

    def read_next(self, slot: Any, *, is_whole: bool | None = None) -> None:
        """Starts to read the next block of all rows, if there is one; `is_whole`: what is known of it, None: nothing.

        Without a branch the compiler puts the starts of DMAs beside products, so that what is known is worth much.
        """
        row, count = self._next()
        source = row.source + self.state[2] * self.buffer.blocks.num_pieces
        if is_whole is None:
            self.buffer.start(source, count, slot)
        elif is_whole:
            self.buffer.start_block(source, slot)
        else:
            self.buffer.start_pieces(source, count, slot)
        is_last = count <= self.buffer.blocks.num_pieces
        self.state[1] = jnp.where(is_last, row.following, self.state[1])
        self.state[2] = jnp.where(is_last, 0, self.state[2] + 1)

    def _next(self) -> tuple[Row, Any]:
        """The row to be read next and how many pieces of it are left; the last row and none, if all is read."""
        index = self.state[1]
        row = self[jnp.minimum(index, self.num_rows - 1)]
        left = row.num_pieces - self.state[2] * self.buffer.blocks.num_pieces
        return row, jnp.where(index < self.num_rows, left, 0)

    def take_turn(self) -> Any:
        """The half of the buffer whose turn it is; the other one is next."""
        slot = self.state[0]
        self.state[0] = 1 - slot
        return slot
