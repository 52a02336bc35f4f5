"""States of long sequences of a packed row on GPUs, chunk by chunk, through Triton.

A program has a sequence, one of its heads, and some columns of that head's state that depend on no others. It reads
them from the row of the pool that the sequence begins with, keeps them in registers over all chunks, and writes them
where a segment ends. A chunk takes a few products on tensor cores in place of a step for each of its tokens; what it
needs of its tokens alone, `chunk_pairs` has found. Chunks begin where segments do, and numbers depend on that by the
rounding of float32; they do not depend on other sequences.

Sequences of few tokens stay with `token_steps`, whose results are written into, so that a row may have both kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from model_adapters.ops import registry
from model_adapters.ops.cpu import ffi
from model_adapters.ops.gpu.chunk_pairs import ChunkOperands, Tokens, pairs_of, terms_of, times
from model_adapters.ops.gpu.state_parts import Part, SegmentTable, StatePart
from model_adapters.ops.searchsorted import num_at_most
from model_adapters.ops.segments import Segments
from model_adapters.ops.state_pool import Chunks

MIN_LONG = 32
"""Tokens of a sequence in a row from which on it is computed in chunks."""
CHUNK_LEN = 64
NUM_COLUMNS = {128: 32, 256: 16}
"""Columns of a state in the registers of a program, by the most rows."""
States = tuple[jax.Array, ...]
"""Parts ``[k, v]`` of a state, by its keys."""


def long_sequences(segments: Segments, num_tokens: int, dim: int, *, most: int) -> jax.Array | None:
    """Returns which segments go in chunks, bool[R]; None if there can be none.

    There can be none in a row of at most one token a segment, as decode steps are, nor with states of more rows, `dim`,
    than registers hold, `most`. All sequences go token by token where sums may not depend on a row.
    """
    num_segments = len(segments.read)
    if num_tokens < max(MIN_LONG, num_segments + 1) or dim > most:
        return None
    if ffi.is_batch_invariant():
        return None
    return jnp.sum(jnp.where(segments.is_same_sequence, segments.lens, 0), axis=1) >= MIN_LONG


@dataclass(frozen=True)
class _ColumnsProgram:
    """What a program has: some columns of a head's state ``[K, V]``, in parts of its keys.

    Attributes:
        refs: References to q, k, v, factors and multiples of values in the results, and to `Pairs`.
        head: Of the states.
        heads: Heads of the states.
        keys: Parts of K.
        columns: Of V.
        is_turned: Whether states are ``[V, K]`` in the pool.
    """

    refs: Sequence[Any]
    head: Any
    heads: int
    keys: list[Part]
    columns: Part
    is_turned: bool

    def read(self, pool: Any, row: Any) -> States:
        """Reads the state of a row."""
        if self.is_turned:
            return tuple(StatePart(self.head, (self.columns, keys)).read(pool, row).T for keys in self.keys)
        return tuple(StatePart(self.head, (keys, self.columns)).read(pool, row) for keys in self.keys)

    def write(self, pool: Any, row: Any, states: States) -> None:
        """Writes the state of a row."""
        for keys, state in zip(self.keys, states, strict=True):
            if self.is_turned:
                StatePart(self.head, (self.columns, keys)).write(pool, row, state.T)
            else:
                StatePart(self.head, (keys, self.columns)).write(pool, row, state)

    def chunk(self, number: Any, begin: Any, end: Any, states: States, out: Any) -> States:
        """Computes chunk `number`, of the tokens from `begin` on in front of `end`.

        Returns the states behind it.
        """
        q, k, v, factor, skip, *pairs = self.refs
        within, over_chunk, until, since, *solved = pairs
        place = begin + lax.iota(jnp.int32, CHUNK_LEN)
        tokens = Tokens(place, place < end, self.head, self.heads)
        by_head = len(until.shape) == 2
        new, skipped = tokens.vectors(solved[1] if solved else v, self.columns), None
        if solved:
            for keys, state in zip(self.keys, states, strict=True):
                new = new - times(tokens.terms(solved[0], keys), state)
        else:
            skipped, new = new * tokens.numbers(skip)[:, None], new * tokens.numbers(factor)[:, None]
        made = times(tokens.terms(within, Part.of(0, CHUNK_LEN, CHUNK_LEN)), new)
        if skipped is not None:
            made = made + skipped
        read = jnp.zeros_like(new)
        for keys, state in zip(self.keys, states, strict=True):
            read = read + times(tokens.terms(q if by_head else until, keys), state)
        if by_head:
            read, new = read * tokens.numbers(until)[:, None], new * tokens.numbers(since)[:, None]
        tokens.write(out, self.columns, made + read)
        behind = []
        for keys, state in zip(self.keys, states, strict=True):
            if by_head:
                left = state * over_chunk[number, self.head, 0]
            else:
                decays = plgpu.load(over_chunk.at[number, self.head, keys.index], mask=keys.mask, other=0.0)
                left = state * decays[:, None]
            behind.append(left + times(tokens.terms(k if by_head else since, keys), new, (0, 0)))
        return tuple(behind)


def _kernel(program: _ColumnsProgram, table: Sequence[Any], pool: Any, out: Any, new_pool: Any) -> None:
    """Computes all segments of one sequence; the loops carry the state."""
    firsts, cu, read, write, counts, first_chunks = table
    first = firsts[pl.program_id(0)]
    count = counts[first]  # 0 behind the last segment

    def segment(index: Any, states: States) -> States:
        begin, end = cu[index], cu[index + 1]
        num = lax.div(end - begin + (CHUNK_LEN - 1), jnp.int32(CHUNK_LEN))

        def chunk(i: Any, states: States) -> States:
            return program.chunk(first_chunks[index] + i, begin + i * CHUNK_LEN, end, states, out)

        states = lax.fori_loop(0, num, chunk, states)
        program.write(new_pool, write[index], states)
        return states

    @pl.when(count > 0)
    def _any() -> None:
        lax.fori_loop(first, first + count, segment, program.read(pool, read[first]))


def _table(segments: Segments, is_long: jax.Array, num_rows: int, num_tokens: int) -> list[jax.Array]:
    """Returns what programs read: first segments of long sequences, and of R segments.

    These are where they begin, the rows that they read and write, how many of its sequence follow each first one, and
    the number of their first chunk.
    """
    table = SegmentTable.of(segments, num_rows)
    counts = jnp.where(is_long, table.counts, 0)
    num_long = min(len(counts), num_tokens // MIN_LONG)
    firsts = num_at_most(jnp.cumsum(counts > 0), jnp.arange(num_long, dtype=jnp.int32))
    counts = jnp.concatenate([counts, jnp.zeros(1, jnp.int32)])
    num_chunks = -(-jnp.where(is_long, segments.lens, 0) // CHUNK_LEN)
    return [firsts, *table[:3], counts, (jnp.cumsum(num_chunks) - num_chunks).astype(jnp.int32)]


def run_chunks(
    name: str,
    operands: ChunkOperands,
    made: jax.Array,
    pool: jax.Array,
    segments: Segments,
    is_long: jax.Array,
    *,
    summed: int,
) -> tuple[jax.Array, jax.Array]:
    """Computes the sequences that are long.

    Args:
        name: Of the kernels.
        operands: Of the T tokens.
        made: ``[T, H, V]``, results of the other sequences, which stay; written in place.
        pool: ``float32[rows, H, K, V]``, updated in place; with axes of a state the other way round if `summed` is 1.
        segments: Of the T tokens.
        is_long: As of :func:`long_sequences`.
        summed: Axis of a state that results are sums over.

    Returns:
        Results and the pool.
    """
    num_tokens, heads, width = made.shape
    chunks = Chunks.of(segments, num_tokens, CHUNK_LEN, left_out=~is_long)
    pairs = pairs_of(name, operands, chunks, CHUNK_LEN)
    table = _table(segments, is_long, pool.shape[0], num_tokens)
    queries, keys = (jnp.stack(terms_of(x)) for x in (operands.q, operands.k))
    tokens = [queries, keys, operands.v, operands.factor, operands.skip]
    given = [*table, *(operands.factor if each is None else each for each in tokens)]
    arrays = [*given, *(each for each in pairs if each is not None), made, pool]

    num_columns = next(num for most, num in NUM_COLUMNS.items() if operands.k.shape[2] <= most)

    def body(*refs: Any) -> None:
        columns = Part.of(pl.program_id(2) * num_columns, num_columns, width)
        parts = [operands.key_part(index) for index in range(operands.num_key_parts())]
        tokens, (pool, out, new_pool) = refs[len(table) : -4], refs[-3:]
        program = _ColumnsProgram(tokens, pl.program_id(1), heads, parts, columns, is_turned=summed == 1)
        _kernel(program, refs[: len(table)], pool, out, new_pool)

    numbers = num_tokens * heads * operands.k.shape[2]
    made, pool = pl.pallas_call(
        body,
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (made, pool)],
        grid=(len(table[0]), heads, pl.cdiv(width, num_columns)),
        input_output_aliases={len(arrays) - 2: 0, len(arrays) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        cost_estimate=pl.CostEstimate(
            flops=8 * numbers * width, transcendentals=numbers, bytes_accessed=16 * numbers + 8 * made.size
        ),
        interpret=registry.platform() != "gpu",
        name=f"{name}_chunk",
    )(*arrays)
    return made, pool
