"""What references of recurrent layers share: rows of a pool, and a walk over chunks.

XLA updates a donated pool in place only where it can tell that no read of the old one is left. Fusions are what hides
it: a read that is fused with the arithmetic behind it runs where the write is. So what is read and what is written is
put behind a barrier, and one row is made two, since XLA turns a gather of one row into a slice, which a barrier does
not keep from being fused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from model_adapters.ops.kv_pool import check_int_array, expect
from model_adapters.ops.searchsorted import num_at_most
from model_adapters.ops.segments import Segments

HIGHEST = jax.lax.Precision.HIGHEST
Compute = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def check_pool(op: str, pool: jax.Array, shape: tuple[int, ...], segments: Segments, dtype: Any = jnp.float32) -> None:
    """Raises InvalidArgumentError if rows of the pool are not `shape`, or segments do not fit."""
    expect(op, "pool of rows of shape", shape, pool.shape[1:])
    expect(op, "pool of dtype", jnp.dtype(dtype), pool.dtype)
    num_segments = len(segments.read)
    expect(op, "segments, at least one:", True, num_segments > 0)
    check_int_array(op, "cu", segments.cu, (num_segments + 1,))
    for name in ("read", "write", "first"):
        check_int_array(op, name, getattr(segments, name), (num_segments,))
    expect(op, "held of shape", (num_segments,), segments.held.shape)


def with_last_row(reference: Callable[..., tuple[jax.Array, jax.Array]]) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns a reference that also takes pools without a row that drops states.

    It computes with a copy that has one.
    """

    @functools.wraps(reference)
    def run(*given: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        *operands, pool, segments = given
        if segments.drops_last:
            return reference(*given, **options)
        wider = jnp.concatenate([pool, jnp.zeros_like(pool[:1])])
        out, wider = reference(*operands, wider, dataclasses.replace(segments, drops_last=True), **options)
        return out, wider[:-1]

    return run


class Chunks(NamedTuple):
    """Chunks of at most `size` tokens of some segments, none over a border of segments.

    Attributes:
        num: int32[].
        segment: int32[N].
        begin: int32[N], first token.
        lens: int32[N].
        is_first: bool[N], of its segment.
        is_last: bool[N], of its segment.
    """

    num: jax.Array
    segment: jax.Array
    begin: jax.Array
    lens: jax.Array
    is_first: jax.Array
    is_last: jax.Array

    @classmethod
    def of(cls, segments: Segments, num_tokens: int, size: int, left_out: jax.Array | None = None) -> Chunks:
        """Returns the chunks of a row of `num_tokens`, without segments ``left_out[R]``.

        None leaves out single tokens.
        """
        left_out = segments.is_single if left_out is None else left_out
        counts = -(-jnp.where(left_out, 0, segments.lens) // size)
        ends = jnp.cumsum(counts)
        index = jnp.arange(num_tokens // size + min(len(segments.read), num_tokens), dtype=jnp.int32)
        segment = jnp.minimum(num_at_most(ends, index), len(segments.read) - 1)
        place = index - (ends - counts)[segment]
        begin = segments.cu[segment] + place * size
        lens = jnp.minimum(segments.cu[segment + 1] - begin, size)
        return cls(ends[-1], segment, begin, lens, place == 0, place == counts[segment] - 1)


def over_trailing(mask: jax.Array, ndim: int) -> jax.Array:
    """Returns ``mask[n]`` as ``[n, 1, ...]`` of `ndim` axes."""
    return mask.reshape(-1, *(1,) * (ndim - 1))


def read_states(pool: jax.Array, rows: jax.Array, held: jax.Array) -> jax.Array:
    """Returns rows int32[R] of the pool ``[rows, ...]``, zeros where nothing is `held`."""
    num = len(rows)
    if num == 1:
        rows = jnp.concatenate([rows, jnp.full(1, pool.shape[0] - 1, rows.dtype)])
    states = jax.lax.optimization_barrier(pool[rows])[:num]
    return jnp.where(over_trailing(held, pool.ndim), states, 0)


def write_states(pool: jax.Array, rows: jax.Array, states: jax.Array) -> jax.Array:
    """Returns the pool ``[rows, ...]`` with `states` as its rows int32[R]."""
    states = jax.lax.optimization_barrier(states.astype(pool.dtype))
    if len(rows) == 1:
        rows = jnp.concatenate([rows, jnp.full(1, pool.shape[0] - 1, rows.dtype)])
        states = jnp.concatenate([states, states])
    return pool.at[rows].set(states)


def single_rows(segments: Segments, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rows that single tokens read and write, int32[R] each; else the last one."""
    last = pool.shape[0] - 1
    return jnp.where(segments.is_single, segments.read, last), jnp.where(segments.is_single, segments.write, last)


def last_writes(segments: Segments, pool: jax.Array) -> jax.Array:
    """Returns the row that each segment leaves its state in, int32[R].

    Of segments of one sequence that write the same row the last one counts. The others, and those without tokens, get
    the last row of the pool.
    """
    number = jnp.arange(len(segments.read))
    is_same_row = segments.is_same_sequence & (segments.write[:, None] == segments.write)
    is_dropped = jnp.any(is_same_row & (number > number[:, None]), axis=1) | (segments.lens == 0)
    return jnp.where(is_dropped, pool.shape[0] - 1, segments.write)


def walk(
    pool: jax.Array, segments: Segments, singles: jax.Array, num_tokens: int, size: int, compute: Compute
) -> tuple[jax.Array, jax.Array]:
    """Runs `compute` over the chunks of all segments but those of single tokens.

    Args:
        pool: ``float32[rows, ...]``, with the states of single tokens written.
        segments: Of the row of tokens.
        singles: ``float32[R, ...]``, results of single tokens.
        num_tokens: T.
        size: Tokens of a chunk.
        compute: Of a state, the first token of a chunk and ``bool[size]``, which of its tokens count, makes
            ``float32[size, ...]`` and the next state.

    Returns:
        ``float32[T, ...]`` and the pool.
    """
    chunks = Chunks.of(segments, num_tokens, size)

    def started(i: jax.Array, pool: jax.Array, state: jax.Array) -> jax.Array:
        """Returns what chunk i begins with: a row of the pool, or the state behind the last one."""
        segment = chunks.segment[i]
        held = jnp.where(segments.held[segment], pool[segments.read[segment]], 0)
        return jnp.where(chunks.is_first[i], held, state)

    def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        state, pool, out = carry
        mask = jnp.arange(size) < chunks.lens[i]
        made, state = compute(state, chunks.begin[i], mask)
        made = jnp.where(over_trailing(mask, out.ndim), made, cut(out, chunks.begin[i], size))
        out = jax.lax.dynamic_update_slice_in_dim(out, made, chunks.begin[i], 0)
        row = jnp.where(chunks.is_last[i], segments.write[chunks.segment[i]], pool.shape[0] - 1)
        pool = jax.lax.dynamic_update_index_in_dim(pool, state, row, 0)
        # Read here, the row is part of the carry: no later reader of the pool is left when the next chunk writes it.
        return started(jnp.minimum(i + 1, len(chunks.segment) - 1), pool, state), pool, out

    out = jnp.zeros((num_tokens + size, *singles.shape[1:]), jnp.float32)
    state = started(jnp.zeros((), jnp.int32), pool, jnp.zeros(pool.shape[1:], jnp.float32))
    _, pool, out = jax.lax.fori_loop(0, chunks.num, body, (state, pool, out))
    place = jnp.where(segments.is_single, segments.cu[:-1], num_tokens)
    return out[:num_tokens].at[place].set(singles, mode="drop"), pool


def first_tokens(segments: Segments, num_tokens: int) -> jax.Array:
    """Returns the first token of each segment, int32[R]; any for those without tokens."""
    return jnp.minimum(segments.cu[:-1], num_tokens - 1)


def padded(x: jax.Array, size: int) -> jax.Array:
    """Returns ``x[T, ...]`` in float32 with `size` tokens more, to cut any chunk from."""
    return jnp.pad(x.astype(jnp.float32), ((0, size), *((0, 0),) * (x.ndim - 1)))


def cut(x: jax.Array, begin: jax.Array, size: int) -> jax.Array:
    """Returns `size` tokens of ``x[T, ...]``."""
    return jax.lax.dynamic_slice_in_dim(x, begin, size, 0)


def cut_masked(x: jax.Array, begin: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the tokens of a chunk, zeros for those of other segments, even if NaN."""
    return jnp.where(over_trailing(mask, x.ndim), cut(x, begin, len(mask)), 0)
