"""Key ranges of the rows of a decode call, and reads of their blocks, two ahead across rows.

Blocks are read in the order in which they are used, into the two halves of a buffer by turns. A half is filled again
only when its block has been used: so at most two reads are under way, and the first block of a row is read while the
last one of the row before is computed.
"""

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
    """Positions ``[begin, end)`` of a row, in `num_pieces` pieces from `source` on.

    A row without pieces sees nothing. `following` is the next row with pieces, or the number of rows.
    """

    begin: Any
    end: Any
    source: Any
    num_pieces: Any
    following: Any


def rows_of(lens: jax.Array, starts: jax.Array, window: int | None, pages_per_seq: int, blocks: Blocks) -> jax.Array:
    """Returns ``int32[B * fields]``: rows of ``lens[B]`` positions, seen from ``starts[B]`` on."""
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
    """Reads the blocks of all rows in order into one half, while the other is used."""

    rows: Any  # int32[B * fields], as of rows_of
    buffer: BlockBuffer
    state: Any  # int32[3]: the half to use next; row and block to read next

    @property
    def num_rows(self) -> int:
        """Number of rows, including those that see nothing."""
        return int(self.rows.shape[0]) // len(FIELDS)

    def __getitem__(self, index: Any) -> Row:
        """Returns row `index`."""
        return Row(*(self.rows[index * len(FIELDS) + i] for i in range(len(FIELDS))))

    def begin(self) -> None:
        """Starts the reads of the first two blocks."""
        self.buffer.begin()
        first = self[0]
        self.state[0] = 0
        self.state[1] = jnp.where(first.num_pieces > 0, 0, first.following)
        self.state[2] = 0
        lax.fori_loop(0, 2, lambda slot, _: self.read_next(slot), None)

    @property
    def next_is_full(self) -> Any:
        """Whether the next block to read is a full one."""
        return self._next()[1] >= self.buffer.blocks.num_pieces

    def read_next(self, slot: Any, *, is_full: bool | None = None) -> None:
        """Starts the reads of the next block, if any; `is_full` if that is known.

        Without a branch the compiler schedules the starts of DMAs in parallel with products, which saves much time.
        """
        row, count = self._next()
        source = row.source + self.state[2] * self.buffer.blocks.num_pieces
        if is_full is None:
            self.buffer.start(source, count, slot)
        elif is_full:
            self.buffer.start_block(source, slot)
        else:
            self.buffer.start_pieces(source, count, slot)
        is_last = count <= self.buffer.blocks.num_pieces
        self.state[1] = jnp.where(is_last, row.following, self.state[1])
        self.state[2] = jnp.where(is_last, 0, self.state[2] + 1)

    def _next(self) -> tuple[Row, Any]:
        """Returns the row to read next and its pieces left; the last row and 0 at the end."""
        index = self.state[1]
        row = self[jnp.minimum(index, self.num_rows - 1)]
        left = row.num_pieces - self.state[2] * self.buffer.blocks.num_pieces
        return row, jnp.where(index < self.num_rows, left, 0)

    def take_turn(self) -> Any:
        """Returns the half of the buffer to use now; the other one is next."""
        slot = self.state[0]
        self.state[0] = 1 - slot
        return slot
