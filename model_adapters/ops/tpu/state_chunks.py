"""Chunks of prompts on states by row of a pool: the state stays in vector memory between a segment's chunks.

A call has all vectors of a token and head side by side in one array ``[T, H, lanes]``, so that a chunk of some heads is
one DMA from any token on. It is turned to tokens by head in vector memory, computed head by head, and its results are
written back the same way. The next chunk is read, and the one before it written, while one is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from model_adapters.ops.segments import Segments
from model_adapters.ops.state_pool import Chunks
from model_adapters.ops.tpu.page_buffers import LANES, SUBLANES, round_up

CHUNK_LEN = 64
MAX_HEADS = 16
"""Of a call whose heads are no multiple of 8, which are then one block."""
NUM_PARALLEL = 2
"""Heads that are computed together, so that one's products run while another one's numbers are not there yet."""
MAX_TABLE = 32 << 10
"""Most chunks, whose table lies in scalar memory."""
VMEM_BYTES = 48 << 20
FIELDS = ("begin", "len", "read", "write")
NO_ROW, NEW = -1, -2
Compute = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""Of a chunk's vectors ``[C, lanes]``, zeros behind its tokens, and a state ``[K, V]``: results and the next state."""


def unsupported_reason(pool: jax.Array, num_tokens: int) -> str | None:
    """Returns why the kernels cannot take the pool ``float32[rows, H, K, V]`` or a row of tokens, or None."""
    if (heads := pool.shape[1]) % SUBLANES and heads > MAX_HEADS:
        return f"{heads} heads; the kernel of chunks needs a multiple of {SUBLANES}, or at most {MAX_HEADS}"
    if num_tokens > MAX_TABLE:
        return f"{num_tokens} tokens; the kernel of chunks has {MAX_TABLE}"
    return None


def side_by_side(arrays: list[jax.Array], size: int) -> tuple[jax.Array, list[slice]]:
    """Returns ``[T, H, n]`` each in one array ``float32[T + size, H, lanes]``, and the lanes of each."""
    widths = [round_up(x.shape[2], LANES) for x in arrays]
    padded = [
        jnp.pad(x.astype(jnp.float32), ((0, size), (0, 0), (0, width - x.shape[2])))
        for x, width in zip(arrays, widths, strict=True)
    ]
    begins = [sum(widths[:i]) for i in range(len(widths))]
    lanes = [slice(begin, begin + x.shape[2]) for begin, x in zip(begins, arrays, strict=True)]
    return jnp.concatenate(padded, axis=2), lanes


def cumulative(x: jax.Array) -> jax.Array:
    """Returns sums over the tokens ``x[C, lanes]`` up to each."""
    size = x.shape[0]
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return times((row >= column).astype(jnp.float32), x)


def as_row(column: jax.Array) -> jax.Array:
    """Returns ``column[C, 1]`` as ``[1, C]``."""
    size = column.shape[0]
    row, lane = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return jnp.sum(jnp.where(row == lane, column, 0.0), axis=0, keepdims=True)


def decays_between(total: jax.Array) -> jax.Array:
    """Returns how much is left at token i of what token j has added, ``[C, C]``, of ``total[C, 1]``; 0 for j > i."""
    size = total.shape[0]
    row, lane = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return jnp.where(row >= lane, jnp.exp(jnp.minimum(total - as_row(total), 0.0)), 0.0)


def times(x: jax.Array, y: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Returns the product of two matrices in float32, over an axis of each."""
    over = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(x, y, over, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _kernel(
    count: Any,
    table: Any,
    tokens: Any,
    _: Any,
    out: Any,
    pool: Any,
    given: Any,
    by_head: Any,
    made_by_head: Any,
    made: Any,
    state: Any,
    reads: Any,
    writes: Any,
    states: Any,
    *,
    compute: Compute,
) -> None:
    size, heads = given.shape[1:3]
    at_heads = pl.ds(pl.program_id(0) * heads, heads)

    def field(chunk: Any, name: str) -> Any:
        return table[chunk * len(FIELDS) + FIELDS.index(name)]

    def read(chunk: Any) -> Any:
        there = tokens.at[pl.ds(field(chunk, "begin"), size), at_heads]
        return pltpu.make_async_copy(there, given.at[chunk % 2], reads.at[chunk % 2])

    def write(chunk: Any) -> Any:
        there = out.at[pl.ds(field(chunk, "begin"), size), at_heads]
        return pltpu.make_async_copy(made.at[chunk % 2], there, writes.at[chunk % 2])

    def begin_state(row: Any) -> None:
        """Reads the state of a segment, which the segment before may have written."""

        @pl.when(row >= 0)
        def _held() -> None:
            dma = pltpu.make_async_copy(pool.at[row, at_heads], state, states)
            dma.start()
            dma.wait()

        @pl.when(row == NEW)
        def _new() -> None:
            def clear(head: Any, _: None) -> None:
                state[head] = jnp.zeros(state.shape[1:], jnp.float32)

            lax.fori_loop(0, heads, clear, None)

    def one(chunk: Any, _: None) -> None:
        slot = chunk % 2
        read(chunk).wait()

        @pl.when(chunk + 1 < count[0])
        def _ahead() -> None:
            read(chunk + 1).start()

        begin_state(field(chunk, "read"))
        by_head[...] = jnp.swapaxes(given[slot], 0, 1)
        used = lax.broadcasted_iota(jnp.int32, (size, 1), 0) < field(chunk, "len")
        parallel = NUM_PARALLEL if heads % NUM_PARALLEL == 0 else 1

        def some_heads(i: Any, _: None) -> None:
            group = [i * parallel + n for n in range(parallel)]
            results = [compute(jnp.where(used, by_head[head], 0.0), state[head]) for head in group]
            for head, (result, new) in zip(group, results, strict=True):
                made_by_head[head], state[head] = result, new

        lax.fori_loop(0, heads // parallel, some_heads, None)
        made[slot] = jnp.swapaxes(made_by_head[...], 0, 1)

        # A chunk's rows behind its tokens are those of the next one, which is written later.
        @pl.when(chunk > 0)
        def _in_order() -> None:
            write(chunk - 1).wait()

        write(chunk).start()
        row = field(chunk, "write")

        @pl.when(row >= 0)
        def _keep() -> None:
            dma = pltpu.make_async_copy(state, pool.at[row, at_heads], states)
            dma.start()
            dma.wait()

    @pl.when(count[0] > 0)
    def _any() -> None:
        read(0).start()
        lax.fori_loop(0, count[0], one, None)
        write(count[0] - 1).wait()


def _table(segments: Segments, num_tokens: int, size: int, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns the number of chunks, int32[1], and their table, int32[N * fields]."""
    chunks = Chunks.of(segments, num_tokens, size)
    read = jnp.where(segments.held, segments.read, NEW)[chunks.segment]
    write = jnp.where(segments.write < num_rows - 1, segments.write, NO_ROW)[chunks.segment]
    read, write = jnp.where(chunks.is_first, read, NO_ROW), jnp.where(chunks.is_last, write, NO_ROW)
    fields = jnp.stack([chunks.begin, chunks.lens, read, write], axis=1)
    return chunks.num[None].astype(jnp.int32), fields.astype(jnp.int32).reshape(-1)


def run_chunks(
    name: str,
    compute: Compute,
    tokens: jax.Array,
    width: int,
    pool: jax.Array,
    segments: Segments,
    singles: jax.Array,
    size: int,
) -> tuple[jax.Array, jax.Array]:
    """Runs `compute` over the chunks of all segments but those of single tokens.

    Args:
        name: Of the kernel.
        compute: Of one head.
        tokens: ``float32[T + size, H, lanes]``, as of :func:`side_by_side`.
        width: Of a token's and head's results.
        pool: ``float32[rows, H, K, V]``, updated in place.
        segments: Of the T tokens.
        singles: ``float32[R, H, width]``, results of single tokens.
        size: Most tokens of a chunk.

    Returns:
        ``float32[T, H, width]`` and the pool.
    """
    num_tokens, num_heads = tokens.shape[0] - size, tokens.shape[1]
    heads = SUBLANES if num_heads % SUBLANES == 0 else num_heads
    count, table = _table(segments, num_tokens, size, pool.shape[0])
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    lanes, padded = tokens.shape[2], round_up(width, LANES)
    call = pl.pallas_call(
        functools.partial(_kernel, compute=compute),
        out_shape=(
            jax.ShapeDtypeStruct((*tokens.shape[:2], padded), jnp.float32),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_heads // heads,),
            in_specs=[anywhere, anywhere],
            out_specs=(anywhere, anywhere),
            scratch_shapes=[
                pltpu.VMEM((2, size, heads, lanes), jnp.float32),
                pltpu.VMEM((heads, size, lanes), jnp.float32),
                pltpu.VMEM((heads, size, padded), jnp.float32),
                pltpu.VMEM((2, size, heads, padded), jnp.float32),
                pltpu.VMEM((heads, *pool.shape[2:]), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        input_output_aliases={3: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True
        ),
        name=name,
    )
    out, pool = call(count, table, tokens, pool)
    in_use = jnp.arange(num_tokens)[:, None, None] < segments.cu[-1]
    place = jnp.where(segments.is_single, segments.cu[:-1], num_tokens)
    return jnp.where(in_use, out[:num_tokens, :, :width], 0.0).at[place].set(singles, mode="drop"), pool
