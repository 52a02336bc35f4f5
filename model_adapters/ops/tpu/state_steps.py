"""Steps of one token on states by row of a pool, each read once and written once, in place.

A state is some heads of ``[K, V]``, and a block is as many of them as a megabyte holds. Blocks of all rows of a
step lie in a ring of buffers in vector memory: while one is computed in place, the next ones are read and the one
before it is written. So a step takes as long as its memory, if a block is computed in less time than it is read and
written. Segments that are not single tokens are left out of the table of steps: nothing of theirs is read or written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from model_adapters.ops.segments import Segments
from model_adapters.ops.tpu.page_buffers import LANES, SUBLANES, across, round_up

MAX_BLOCK_BYTES = 1 << 20
"""Of the heads of a block: 1.3 us of v6e's memory. No read or write hides the computation of the last one."""
MAX_BLOCK_HEADS = 32
"""Which are computed one by one, without a loop."""
NUM_BUFFERS = 6
NUM_AHEAD = NUM_BUFFERS - 2
"""Blocks that are read ahead; the other two buffers are computed in and written from."""
MAX_STATE_BYTES = 2 << 20
"""Largest state of one head, so that the ring fits into vector memory."""
MAX_ROWS = 4096
"""Most segments, whose table lies in scalar memory."""
WORKING_BYTES = 16 << 20
"""Of vector memory for everything but the ring."""
FIELDS = ("segment", "read", "write")
Update = Callable[[Any, Sequence[Any], Any, Any], None]
"""Computes block j in place, of what the row's operands and output are references to: ``(j, operands, out, block)``."""


def unsupported_reason(pool: jax.Array, segments: Segments) -> str | None:
    """Returns why the kernels cannot take a pool ``[rows, H, K, V]`` or the segments, or None."""
    rows = pool.shape[2]
    if 0 in pool.shape:
        return f"a pool of shape {list(pool.shape)} has no elements"
    if rows % SUBLANES:
        return f"states of {rows} rows; the kernel needs a multiple of {SUBLANES}"
    if (num_bytes := state_bytes(pool)) > MAX_STATE_BYTES:
        return f"states of {num_bytes} bytes a head; {MAX_STATE_BYTES} fit"
    if len(segments.read) > MAX_ROWS:
        return f"{len(segments.read)} segments; {MAX_ROWS} fit"
    return None


def state_bytes(pool: jax.Array) -> int:
    """Returns the bytes that one head's state takes in vector memory."""
    return round_up(pool.shape[2], SUBLANES) * round_up(pool.shape[3], LANES) * 4


def block_heads(pool: jax.Array, group: int) -> int:
    """Returns how many heads of the pool ``[rows, H, K, V]`` are a block.

    They are of whole groups of `group` heads, or of one group.
    """
    heads = pool.shape[1]
    most = max(1, min(MAX_BLOCK_HEADS, MAX_BLOCK_BYTES // state_bytes(pool)))
    fitting = (n for n in range(most, 0, -1) if heads % n == 0 and (n % group == 0 or group % n == 0))
    return next(fitting)


@dataclass(frozen=True)
class Columns:
    """Vectors of a row's blocks, which multiply a state's rows, as columns of ``[K, 128]``.

    A block has `width` of them; as many blocks as fit lie side by side.

    Attributes:
        width: Vectors of a block.
        num_blocks: Blocks of a row.
    """

    width: int
    num_blocks: int

    @property
    def per_tile(self) -> int:
        """Blocks of one matrix."""
        return LANES // self.width

    @property
    def num_tiles(self) -> int:
        """Matrices of a row."""
        return -(-self.num_blocks // self.per_tile)

    def laid_out(self, vectors: jax.Array) -> jax.Array:
        """Returns ``vectors[R, blocks, width, K]`` as ``[R, tiles, K, 128]``."""
        num_rows, num_blocks, width, dim = vectors.shape
        missing = self.num_tiles * self.per_tile - num_blocks
        vectors = jnp.pad(vectors, ((0, 0), (0, missing), (0, 0), (0, 0)))
        vectors = vectors.reshape(num_rows, self.num_tiles, self.per_tile * width, dim)
        vectors = jnp.pad(vectors, ((0, 0), (0, 0), (0, LANES - self.per_tile * width), (0, 0)))
        return jnp.swapaxes(vectors, 2, 3)

    def vectors(self, tiles: jax.Array) -> jax.Array:
        """Returns what was laid out: ``[R, blocks, width, K]`` of ``[R, tiles, K, 128]``."""
        num_rows, num_tiles, dim, _ = tiles.shape
        tiles = jnp.swapaxes(tiles[..., : self.per_tile * self.width], 2, 3)
        return tiles.reshape(num_rows, num_tiles * self.per_tile, self.width, dim)[:, : self.num_blocks]

    def begin(self, block: Any) -> tuple[Any, Any]:
        """Returns the tile of `block` and its first lane there."""
        return block // self.per_tile, block % self.per_tile * self.width


def spread(tile: jax.Array, lane: Any, width: int) -> jax.Array:
    """Returns column `lane`, which is data, of ``tile[K, 128]`` in all lanes of ``[K, width]``."""
    column = jnp.take_along_axis(tile, jnp.full(tile.shape, lane, jnp.int32), axis=1, mode="promise_in_bounds")
    return across(column, width)


@dataclass(frozen=True)
class _Ring:
    """Blocks of the rows of a step, numbered over all rows, in a ring of buffers.

    Attributes:
        table: int32[R * fields], of rows that have steps, in front of the others.
        num_blocks: Blocks of a row.
        pool: ``float32[rows, H, K, V]``.
        buffers: ``float32[NUM_BUFFERS, heads, K, V]``.
        reads: DMA semaphores.
        writes: DMA semaphores.
    """

    table: Any
    num_blocks: int
    pool: Any
    buffers: Any
    reads: Any
    writes: Any

    def _field(self, block: Any, name: str) -> Any:
        return self.table[block // self.num_blocks * len(FIELDS) + FIELDS.index(name)]

    def _there(self, row: Any, block: Any) -> Any:
        heads = self.buffers.shape[1]
        return self.pool.at[row, pl.ds(block % self.num_blocks * heads, heads)]

    def start_read(self, block: Any) -> None:
        """Starts to read `block`, if anything is held."""
        row, slot = self._field(block, "read"), block % NUM_BUFFERS

        @pl.when(row >= 0)
        def _held() -> None:
            pltpu.make_async_copy(self._there(row, block), self.buffers.at[slot], self.reads.at[slot]).start()

    def wait_read(self, block: Any) -> None:
        """Waits until `block` is there; zeros, if nothing is held."""
        row, slot = self._field(block, "read"), block % NUM_BUFFERS

        @pl.when(row >= 0)
        def _held() -> None:
            pltpu.make_async_copy(self._there(row, block), self.buffers.at[slot], self.reads.at[slot]).wait()

        @pl.when(row < 0)
        def _new() -> None:
            zeros = jnp.zeros(self.buffers.shape[2:], jnp.float32)

            def clear(head: Any, _: None) -> None:
                self.buffers[slot, head] = zeros

            lax.fori_loop(0, self.buffers.shape[1], clear, None)

    def write(self, block: Any, *, wait: bool) -> None:
        """Starts to write `block`, or waits until it is written; nothing of a state that is dropped."""
        row, slot = self._field(block, "write"), block % NUM_BUFFERS

        @pl.when(row >= 0)
        def _kept() -> None:
            dma = pltpu.make_async_copy(self.buffers.at[slot], self._there(row, block), self.writes.at[slot])
            dma.wait() if wait else dma.start()


def _kernel(count: Any, table: Any, *refs: Any, update: Update, num_blocks: int, num_operands: int) -> None:
    """Updates the blocks of one row in the ring, and reads ahead into the next rows.

    Blocks are numbered over all rows. In front of block b, the reads of blocks b to b + NUM_AHEAD - 1 have been
    started, and at most NUM_BUFFERS - NUM_AHEAD writes are under way. Block b + NUM_AHEAD gets the buffer of block b +
    NUM_AHEAD - NUM_BUFFERS, whose write is waited for first. Each read and write that is started is waited for once,
    those of the last blocks by the last row.
    """
    operands, (_, out, pool, *scratch) = refs[:num_operands], refs[num_operands:]
    ring, row = _Ring(table, num_blocks, pool, *scratch), pl.program_id(0)
    total = count[0] * num_blocks

    @pl.when(row == 0)
    def _begin() -> None:
        lax.fori_loop(0, jnp.minimum(NUM_AHEAD, total), lambda block, _: ring.start_read(block), None)

    def one(j: Any, _: None) -> None:
        block = row * num_blocks + j
        slot = block % NUM_BUFFERS

        # Its buffer is that of the block which is read next.
        @pl.when(block >= NUM_BUFFERS - NUM_AHEAD)
        def _free() -> None:
            ring.write(block - (NUM_BUFFERS - NUM_AHEAD), wait=True)

        @pl.when(block + NUM_AHEAD < total)
        def _ahead() -> None:
            ring.start_read(block + NUM_AHEAD)

        ring.wait_read(block)
        update(j, operands, out, ring.buffers.at[slot])
        ring.write(block, wait=False)

    @pl.when(row < count[0])
    def _used() -> None:
        lax.fori_loop(0, num_blocks, one, None)

    @pl.when(row == count[0] - 1)
    def _end() -> None:
        left = jnp.maximum(total - (NUM_BUFFERS - NUM_AHEAD), 0)
        lax.fori_loop(left, total, lambda block, _: ring.write(block, wait=True), None)


def steps_of(segments: Segments, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns the number of single tokens, int32[1], and their table, int32[R * fields].

    A row to read is -1 if nothing is held, one to write is -1 if the state is dropped. Behind the last step the table
    names its segment again, whose results stay where they are.
    """
    is_single, size = segments.is_single, len(segments.read)
    index = jnp.sort(jnp.where(is_single, jnp.arange(size, dtype=jnp.int32), size))
    count = jnp.sum(is_single.astype(jnp.int32))
    index = jnp.minimum(index, jnp.minimum(index[jnp.maximum(count - 1, 0)], size - 1))
    read = jnp.where(segments.held, segments.read, -1)[index]
    write = jnp.where(segments.write < num_rows - segments.drops_last, segments.write, -1)[index]
    return count[None], jnp.stack([index, read, write], axis=1).astype(jnp.int32).reshape(-1)


def run_steps(
    name: str,
    update: Update,
    operands: Sequence[jax.Array],
    out_shape: tuple[int, ...],
    pool: jax.Array,
    segments: Segments,
    heads: int,
    shared: Sequence[jax.Array] = (),
) -> tuple[jax.Array, jax.Array]:
    """Runs `update` on the states of all segments that are single tokens.

    Args:
        name: Of the kernel.
        update: Computes a block of `heads` heads.
        operands: ``[R, ...]`` each, of which `update` sees one row.
        out_shape: Of a row's results.
        pool: ``float32[rows, H, K, V]``, updated in place.
        segments: R of them.
        heads: Of a block.
        shared: ``[n, m]`` each, which `update` sees whole, behind the operands.

    Returns:
        ``float32[R, *out_shape]``, of which only the rows of single tokens count, and the pool.
    """
    size, num_blocks, num_operands = len(segments.read), pool.shape[1] // heads, len(operands) + len(shared)
    count, table = steps_of(segments, pool.shape[0])

    def by_row(shape: tuple[int, ...]) -> pl.BlockSpec:
        zeros = (0,) * len(shape)
        return pl.BlockSpec((1, *shape), lambda i, count, table: (table[i * len(FIELDS)], *zeros))

    block = (heads, *pool.shape[2:])
    call = pl.pallas_call(
        functools.partial(_kernel, update=update, num_blocks=num_blocks, num_operands=num_operands),
        out_shape=(jax.ShapeDtypeStruct((size, *out_shape), jnp.float32), jax.ShapeDtypeStruct(pool.shape, pool.dtype)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(size,),
            in_specs=[
                *(by_row(each.shape[1:]) for each in operands),
                *(pl.BlockSpec(each.shape, lambda *_: (0, 0)) for each in shared),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=(by_row(out_shape), pl.BlockSpec(memory_space=pl.ANY)),
            scratch_shapes=[
                pltpu.VMEM((NUM_BUFFERS, *block), jnp.float32),
                pltpu.SemaphoreType.DMA((NUM_BUFFERS,)),
                pltpu.SemaphoreType.DMA((NUM_BUFFERS,)),
            ],
        ),
        input_output_aliases={2 + num_operands: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=NUM_BUFFERS * heads * state_bytes(pool) + WORKING_BYTES,
            disable_bounds_checks=True,
        ),
        name=name,
    )
    out, pool = call(count, table, *operands, *shared, pool)
    return out, pool
