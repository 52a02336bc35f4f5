"""Recurrences of a packed row on GPUs, token by token, through Pallas' Triton lowering.

A program has a sequence, one of its heads, and a part of that head's state that depends on no other part. It reads the
part from the row of the pool that the sequence begins with, keeps it in registers over all tokens of the sequence, and
writes it where a segment ends. So single tokens take the time of their states' memory; a sequence has the same numbers,
bit for bit, however it is cut and whatever else is in the row. Vectors of the next token are read while one is
computed. Long sequences may be left to `chunk_states`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from model_adapters.ops import registry
from model_adapters.ops.gpu.launch import MIN_ROWS
from model_adapters.ops.gpu.split_kv import round_up_to_power
from model_adapters.ops.gpu.state_parts import Part, SegmentTable, StatePart
from model_adapters.ops.segments import Segments
from model_adapters.ops.state_pool import over_trailing

ROWS, COLUMNS, SCALAR = 0, 1, None
"""What a vector multiplies: rows of a state, its columns, or all of it by one number."""
WARP_NUMBERS = 2048
"""Of a state in the registers of one warp: 64 of 255 for each thread."""
MAX_SUMMED = 1024
"""Most numbers of the axis of a state that is summed, which is not divided."""
Update = Callable[..., tuple[jax.Array, jax.Array]]
"""Returns the state behind a token, and what it gives, of a state and one value for each operand."""


@dataclass(frozen=True)
class Operand:
    """What a token brings along.

    Attributes:
        array: ``[T, heads, width]``, or ``[T, heads]``; a head here may be that of several heads of states.
        axis: `ROWS`, `COLUMNS` or `SCALAR`.
    """

    array: jax.Array
    axis: int | None


def unsupported_reason(pool: jax.Array, summed: int) -> str | None:
    """Returns why the kernel cannot take a pool ``[rows, H, K, V]``, or None.

    Axis `summed` of a head's state, 0 or 1, is the one that results are sums over.
    """
    if 0 in pool.shape:
        return f"a pool of shape {list(pool.shape)} has no elements"
    if (size := pool.shape[2 + summed]) > MAX_SUMMED:
        return f"sums over {size} numbers of a state; the kernel has room for {MAX_SUMMED}"
    return None


@dataclass(frozen=True)
class _Program:
    """What a program has, and how it reads vectors.

    Attributes:
        state: Its part of a head's states.
        heads: Heads of the pool.
        axes: Of the operands.
    """

    state: StatePart
    heads: int
    axes: tuple[int | None, ...]

    def vectors(self, refs: Sequence[Any], token: Any) -> tuple[jax.Array, ...]:
        """Reads what a token brings along, in float32, as it multiplies a state."""
        made = []
        for ref, axis in zip(refs, self.axes, strict=True):
            head = self.state.head // (self.heads // ref.shape[1])
            if axis is None:
                made.append(ref[token, head].astype(jnp.float32))
                continue
            part = self.state.parts[axis]
            at = ref.at[token, head, part.index]
            made.append(plgpu.load(at, mask=part.mask, other=jnp.zeros((), ref.dtype)).astype(jnp.float32))
        return tuple(made)


def _kernel(program: _Program, update: Update, summed: int, refs: Sequence[Any]) -> None:
    """Computes all segments of one sequence for a part of a head's state.

    The carry of both loops is the state and the vectors of the next token, which are read while one is computed. It
    goes through from segment to segment: what a segment writes is what the next one of the sequence would read. A
    program whose segment is not the first of its sequence has a count of 0, and does nothing.
    """
    cu, read, write, counts, *operands, pool, out, new_pool = refs
    first = pl.program_id(0)
    end_segment = first + counts[first]
    begin, end = cu[first], cu[end_segment]
    part = program.state
    given = part.parts[1 - summed]

    def of_token(token: Any, carry: Any) -> Any:
        state, vectors = carry
        following = program.vectors(operands, jnp.minimum(token + 1, end - 1))
        state, made = update(state, *vectors)
        plgpu.store(out.at[token, part.head, given.index], made.astype(out.dtype), mask=given.mask)
        return state, following

    def of_segment(segment: Any, carry: Any) -> Any:
        carry = lax.fori_loop(cu[segment], cu[segment + 1], of_token, carry)
        part.write(new_pool, write[segment], carry[0])
        return carry

    @pl.when(begin < end)
    def _has_tokens() -> None:
        carry = part.read(pool, read[first]), program.vectors(operands, begin)
        lax.fori_loop(first, end_segment, of_segment, carry)


def run_tokens(
    name: str,
    update: Update,
    operands: Sequence[Operand],
    out: jax.ShapeDtypeStruct,
    pool: jax.Array,
    segments: Segments,
    *,
    summed: int,
    without: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs `update` over all tokens of all segments, or of some.

    Args:
        name: Of the kernel.
        update: Computes a part of a state, ``[rows, columns]``, for one token.
        operands: Of the tokens.
        out: Shape ``[T, H, width]`` and dtype of the results.
        pool: ``float32[rows, H, K, V]``, updated in place if donated.
        segments: Of the T tokens.
        summed: Axis of a state that results are sums over; the other one is divided among programs.
        without: bool[R], segments of sequences that are left out; their results may be anything.

    Returns:
        The results, zeros behind the last segment, and the pool.
    """
    _, heads, *sizes = pool.shape
    sum_len = round_up_to_power(sizes[summed])
    width = min(round_up_to_power(sizes[1 - summed]), max(MIN_ROWS // 2, WARP_NUMBERS // sum_len))
    table = SegmentTable.of(segments, pool.shape[0])
    if without is not None:
        table = table._replace(counts=jnp.where(without, 0, table.counts))
    arrays = [*table, *(each.array for each in operands), pool]
    axes = tuple(each.axis for each in operands)

    def body(*refs: Any) -> None:
        parts = [Part.of(0, sum_len, sizes[summed])] * 2
        parts[1 - summed] = Part.of(pl.program_id(2) * width, width, sizes[1 - summed])
        state = StatePart(pl.program_id(1), (parts[0], parts[1]))
        _kernel(_Program(state, heads, axes), update, summed, refs)

    numbers = math.prod(pool.shape[1:])  # of a row
    cost = pl.CostEstimate(
        flops=6 * out.shape[0] * numbers, transcendentals=0, bytes_accessed=8 * len(segments.read) * numbers
    )
    made, pool = pl.pallas_call(
        body,
        out_shape=(out, jax.ShapeDtypeStruct(pool.shape, pool.dtype)),
        grid=(len(segments.read), heads, pl.cdiv(sizes[1 - summed], width)),
        input_output_aliases={len(arrays) - 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=max(1, sum_len * width // WARP_NUMBERS), num_stages=1),
        cost_estimate=cost,
        interpret=registry.platform() != "gpu",
        name=name,
    )(*arrays)
    is_in_use = jnp.arange(out.shape[0]) < segments.cu[-1]
    return jnp.where(over_trailing(is_in_use, 3), made, 0), pool
