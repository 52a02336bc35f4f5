"""Chunks of prompts on states by row of a pool.

The state stays in vector memory between a segment's chunks.

A call has all vectors of a token and head side by side in one array ``[T, H, lanes]``, so that a chunk of some heads is
one DMA from any token on. It is turned to tokens by head in vector memory, computed head by head, and its results are
written back the same way. The next chunk is read, and the one before it written, while one is computed. Single numbers
of a token and head, such as decays, lie in columns, laid out by chunk.
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
from jax.experimental.pallas import tpu as pltpu

from model_adapters.ops.segments import Segments
from model_adapters.ops.state_pool import Chunks
from model_adapters.ops.tpu.page_buffers import LANES, SUBLANES, round_up
from model_adapters.ops.tpu.state_steps import Columns, spread

CHUNK_LENS = (16, 32, 64)
"""Of which a row of tokens takes the shortest that it fits into, or the last."""
MAX_HEADS = 32
"""Of a call whose heads are no multiple of 8, which are then one block."""
NUM_PARALLEL = 4
"""Heads that are computed together, step by step, so that one's products run while another one's are waited for."""
MAX_TABLE = 32 << 10
"""Most chunks, whose table lies in scalar memory."""
VMEM_BYTES = 48 << 20
FIELDS = ("begin", "len", "read", "write")
NO_ROW, NEW = -1, -2
Heads = list[jax.Array]
Compute = Callable[[Heads, list[Heads], Heads], tuple[Heads, Heads]]
"""Of some heads: from the vectors of a chunk ``[C, lanes]``, zeros behind its tokens, its numbers by kind, each in all
lanes of ``[C, 128]``, and states ``[K, V]``: results ``[C, lanes]`` and the next states."""


def unsupported_reason(pool: jax.Array, num_tokens: int) -> str | None:
    """Returns why a pool ``[rows, H, K, V]`` or a row of tokens cannot be taken, or None."""
    if (heads := pool.shape[1]) % SUBLANES and heads > MAX_HEADS:
        return f"{heads} heads; the kernel of chunks needs a multiple of {SUBLANES}, or at most {MAX_HEADS}"
    if num_tokens > MAX_TABLE:
        return f"{num_tokens} tokens; the kernel of chunks has {MAX_TABLE}"
    return None


def chunk_len(num_tokens: int) -> int:
    """Returns the most tokens of a chunk."""
    return next((size for size in CHUNK_LENS if num_tokens <= size), CHUNK_LENS[-1])


def side_by_side(arrays: list[jax.Array], size: int) -> tuple[jax.Array, list[slice]]:
    """Returns arrays ``[T, H, n]`` in one ``float32[T + size, H, lanes]``, and their lanes."""
    widths = [round_up(x.shape[2], LANES) for x in arrays]
    padded = [
        jnp.pad(x.astype(jnp.float32), ((0, size), (0, 0), (0, width - x.shape[2])))
        for x, width in zip(arrays, widths, strict=True)
    ]
    begins = [sum(widths[:i]) for i in range(len(widths))]
    lanes = [slice(begin, begin + x.shape[2]) for begin, x in zip(begins, arrays, strict=True)]
    return jnp.concatenate(padded, axis=2), lanes


def numbers_by_chunk(x: jax.Array, chunks: Chunks, size: int) -> jax.Array:
    """Returns numbers ``x[T, H]`` by chunk, ``float32[N, size, H]``, zeros behind its tokens."""
    place = jnp.arange(size, dtype=jnp.int32)
    token = jnp.minimum(chunks.begin[:, None] + place, x.shape[0] - 1)
    return jnp.where((place < chunks.lens[:, None])[..., None], x.astype(jnp.float32)[token], 0)


def as_row(column: jax.Array) -> jax.Array:
    """Returns a ``column[C, C]``, the same in all lanes, as ``[1, C]``."""
    row, lane = (lax.broadcasted_iota(jnp.int32, column.shape, axis) for axis in (0, 1))
    return jnp.sum(jnp.where(row == lane, column, 0.0), axis=0, keepdims=True)


def decays_between(total: jax.Array) -> jax.Array:
    """Returns how much is left at token i of what token j has added, ``[C, C]``; 0 for j > i.

    ``total[C, 128]`` are logarithms of decays, added up to each token.
    """
    total = total[:, : total.shape[0]]
    row, lane = (lax.broadcasted_iota(jnp.int32, total.shape, axis) for axis in (0, 1))
    return jnp.where(row >= lane, jnp.exp(jnp.minimum(total - as_row(total), 0.0)), 0.0)


def times(x: jax.Array, y: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Returns the product of two matrices in float32, over an axis of each."""
    over = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(x, y, over, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def begin_state(row: Any, there: Any, state: Any, semaphore: Any) -> None:
    """Reads ``state[heads, K, V]`` if there is a `row`; clears it where that is `NEW`."""

    @pl.when(row >= 0)
    def _held() -> None:
        dma = pltpu.make_async_copy(there, state, semaphore)
        dma.start()
        dma.wait()

    @pl.when(row == NEW)
    def _new() -> None:
        def clear(head: Any, _: None) -> None:
            state[head] = jnp.zeros(state.shape[1:], jnp.float32)

        lax.fori_loop(0, state.shape[0], clear, None)


def end_state(row: Any, state: Any, there: Any, semaphore: Any) -> None:
    """Writes ``state[heads, K, V]`` if there is a `row`."""

    @pl.when(row >= 0)
    def _keep() -> None:
        dma = pltpu.make_async_copy(state, there, semaphore)
        dma.start()
        dma.wait()


@dataclass(frozen=True)
class _Walk:
    """References of a call, for some heads.

    Attributes:
        table: int32[N * fields].
        at_heads: The heads of this part of the grid.
        pool: ``float32[rows, H, K, V]``.
        state: ``float32[heads, K, V]``.
        states: DMA semaphore.
    """

    table: Any
    at_heads: Any
    pool: Any
    state: Any
    states: Any

    def field(self, chunk: Any, name: str) -> Any:
        """Returns a number of the table."""
        return self.table[chunk * len(FIELDS) + FIELDS.index(name)]

    def tokens(self, ref: Any, chunk: Any, size: int) -> Any:
        """Returns the rows of ``[T, H, lanes]`` from the first token of a chunk on."""
        return ref.at[pl.ds(self.field(chunk, "begin"), size), self.at_heads]

    def begin_state(self, chunk: Any) -> None:
        """Reads the state of a segment that begins, which the segment before may have written."""
        row = self.field(chunk, "read")
        begin_state(row, self.pool.at[jnp.maximum(row, 0), self.at_heads], self.state, self.states)

    def end_state(self, chunk: Any) -> None:
        """Writes the state of a segment that ends, if it is kept."""
        row = self.field(chunk, "write")
        end_state(row, self.state, self.pool.at[jnp.maximum(row, 0), self.at_heads], self.states)

    def compute(
        self, compute: Compute, vectors: Any, matrix: Any, made: Any, used: Any, first: Any, width: int
    ) -> None:
        """Computes all heads, some together.

        Args:
            compute: Of some heads.
            vectors: ``[heads, C, lanes]``.
            matrix: ``[C, 128]``, with the numbers of the heads from lane `first` on, `width` in all.
            made: ``[heads, C, lanes]``, takes the results.
            used: ``bool[C, 1]``, which tokens count.
            first: A lane.
            width: Number of lanes.
        """
        heads = self.state.shape[0]
        parallel = next(n for n in range(NUM_PARALLEL, 0, -1) if heads % n == 0)

        def some_heads(i: Any, _: None) -> None:
            group, lane = [i * parallel + n for n in range(parallel)], first + i * parallel
            spreads = [
                [spread(matrix, lane + kind + n, LANES) for n in range(parallel)] for kind in range(0, width, heads)
            ]
            given = [jnp.where(used, vectors[head], 0.0) for head in group]
            results, new = compute(given, spreads, [self.state[head] for head in group])
            for n, head in enumerate(group):
                made[head], self.state[head] = results[n], new[n]

        lax.fori_loop(0, heads // parallel, some_heads, None)


def _kernel(
    count: Any,
    table: Any,
    tokens: Any,
    numbers: Any,
    _: Any,
    out: Any,
    pool: Any,
    given: Any,
    given_numbers: Any,
    by_head: Any,
    made_by_head: Any,
    made: Any,
    state: Any,
    reads: Any,
    writes: Any,
    states: Any,
    *,
    compute: Compute,
    columns: Columns,
) -> None:
    size, heads = given.shape[1:3]
    begin = 0 if heads % SUBLANES else pl.multiple_of(pl.program_id(0) * heads, heads)  # all heads, or some of 8
    walk = _Walk(table, pl.ds(begin, heads), pool, state, states)
    tile, first_lane = columns.begin(pl.program_id(0))

    def read(chunk: Any, *, wait: bool) -> None:
        slot, there = chunk % 2, (walk.tokens(tokens, chunk, size), numbers.at[chunk, tile])
        for source, target in zip(there, (given, given_numbers), strict=True):
            dma = pltpu.make_async_copy(source, target.at[slot], reads.at[slot])
            dma.wait() if wait else dma.start()

    def write(chunk: Any) -> Any:
        return pltpu.make_async_copy(made.at[chunk % 2], walk.tokens(out, chunk, size), writes.at[chunk % 2])

    def one(chunk: Any, _: None) -> None:
        slot = chunk % 2
        read(chunk, wait=True)
        pl.when(chunk + 1 < count[0])(lambda: read(chunk + 1, wait=False))
        walk.begin_state(chunk)
        by_head[...] = jnp.swapaxes(given[slot], 0, 1)
        used = lax.broadcasted_iota(jnp.int32, (size, 1), 0) < walk.field(chunk, "len")
        walk.compute(compute, by_head, given_numbers[slot], made_by_head, used, first_lane, columns.width)
        made[slot] = jnp.swapaxes(made_by_head[...], 0, 1)
        # A chunk's rows behind its tokens are those of the next one, which is written later.
        pl.when(chunk > 0)(lambda: write(chunk - 1).wait())
        write(chunk).start()
        walk.end_state(chunk)

    @pl.when(count[0] > 0)
    def _any() -> None:
        read(0, wait=False)
        lax.fori_loop(0, count[0], one, None)
        write(count[0] - 1).wait()


def _table(chunks: Chunks, segments: Segments, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns the number of chunks, int32[1], and their table, int32[N * fields]."""
    read = jnp.where(segments.held, segments.read, NEW)[chunks.segment]
    write = jnp.where(segments.write < num_rows - segments.drops_last, segments.write, NO_ROW)[chunks.segment]
    read, write = jnp.where(chunks.is_first, read, NO_ROW), jnp.where(chunks.is_last, write, NO_ROW)
    fields = jnp.stack([chunks.begin, chunks.lens, read, write], axis=1)
    return chunks.num[None].astype(jnp.int32), fields.astype(jnp.int32).reshape(-1)


def run_chunks(
    name: str,
    compute: Compute,
    tokens: jax.Array,
    numbers: list[jax.Array],
    chunks: Chunks,
    pool: jax.Array,
    segments: Segments,
    singles: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Runs `compute` over the chunks of all segments but those of single tokens.

    Args:
        name: Of the kernel.
        compute: Of some heads.
        tokens: ``float32[T + size, H, lanes]``, as of :func:`side_by_side`.
        numbers: ``float32[N, size, H]``, kinds of numbers of a token and head, as of :func:`numbers_by_chunk`.
        chunks: N of them.
        pool: ``float32[rows, H, K, V]``, updated in place.
        segments: Of the T tokens.
        singles: ``float32[R, H, width]``, results of single tokens.

    Returns:
        ``float32[T, H, width]`` and the pool.
    """
    num_chunks, size, num_heads = numbers[0].shape
    num_tokens, width = tokens.shape[0] - size, singles.shape[2]
    heads = SUBLANES if num_heads % SUBLANES == 0 else num_heads
    columns = Columns(len(numbers) * heads, num_heads // heads)
    by_block = [jnp.swapaxes(x, 1, 2).reshape(num_chunks, -1, heads, size) for x in numbers]
    laid_out = columns.laid_out(jnp.concatenate(by_block, axis=2))
    call = _call(name, functools.partial(_kernel, compute=compute, columns=columns), tokens, width, pool, size, heads)
    out, pool = call(*_table(chunks, segments, pool.shape[0]), tokens, laid_out, pool)
    in_use = jnp.arange(num_tokens)[:, None, None] < segments.cu[-1]
    place = jnp.where(segments.is_single, segments.cu[:-1], num_tokens)
    return jnp.where(in_use, out[:num_tokens, :, :width], 0.0).at[place].set(singles, mode="drop"), pool


def _call(name: str, kernel: Any, tokens: jax.Array, width: int, pool: jax.Array, size: int, heads: int) -> Any:
    """Returns the call of `kernel` on blocks of `heads` heads and chunks of `size` tokens."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    lanes, padded = tokens.shape[2], round_up(width, LANES)
    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((*tokens.shape[:2], padded), jnp.float32),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(tokens.shape[1] // heads,),
            in_specs=[anywhere] * 3,
            out_specs=(anywhere, anywhere),
            scratch_shapes=[
                pltpu.VMEM((2, size, heads, lanes), jnp.float32),
                pltpu.VMEM((2, size, LANES), jnp.float32),
                pltpu.VMEM((heads, size, lanes), jnp.float32),
                pltpu.VMEM((heads, size, padded), jnp.float32),
                pltpu.VMEM((2, size, heads, padded), jnp.float32),
                pltpu.VMEM((heads, *pool.shape[2:]), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        input_output_aliases={4: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True
        ),
        name=name,
    )
