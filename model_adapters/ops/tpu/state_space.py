"""Mamba-2's state space layer on TPUs: a kernel of single tokens, and one of chunks.

The method is the recurrence of Dao and Gu (2024), section 3. A state ``[P, N]`` has its columns on lanes: inputs and
decays multiply it as columns, B and C as rows, and results are sums over lanes, in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model_adapters.ops import registry
from model_adapters.ops.segments import Segments
from model_adapters.ops.state_pool import Chunks, first_tokens
from model_adapters.ops.state_space import OP, by_head, chunked, time_steps
from model_adapters.ops.tpu import state_chunks, state_steps
from model_adapters.ops.tpu.launch import NAME
from model_adapters.ops.tpu.page_buffers import LANES, SUBLANES, across, round_up
from model_adapters.ops.tpu.state_chunks import Heads
from model_adapters.ops.tpu.state_steps import Columns, spread


def _update(j: Any, operands: Sequence[Any], out: Any, block: Any, *, given: Columns, made: Columns) -> None:
    """Computes the heads of block j; see `run_steps`."""
    b, c = operands[1][0, j], operands[2][0, j]
    heads, dim, width = block.shape
    at, begin = given.begin(j)
    vectors = operands[0][0, at]
    for head in range(heads):
        group = head * b.shape[0] // heads
        step, decay = spread(vectors, begin + head, width), spread(vectors[:SUBLANES], begin + heads + head, width)[:1]
        block[head] = block[head] * decay + step * b[group : group + 1]
    at, begin = made.begin(j)
    lane = lax.broadcasted_iota(jnp.int32, (dim, LANES), 1) - begin
    results = out[0, at]
    for head in range(heads):  # in a loop of its own: sums over lanes and columns pass through the same unit in order
        group = head * b.shape[0] // heads
        sums = jnp.sum(block[head] * c[group : group + 1], axis=1, keepdims=True)
        results = jnp.where(lane == head, sums, results)
    out[0, at] = results


def _singles(
    x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array, pool: jax.Array, segments: Segments
) -> tuple[jax.Array, jax.Array]:
    """Returns results ``float32[R, H, P]`` of single tokens, without their skip, and the pool.

    The arrays but `a` are by segment, ``x[R, H, P]``, ``dt[R, H]`` behind its softplus, b and c ``[R, G, N]``.
    """
    num_rows, heads, dim = x.shape
    group = heads // b.shape[1]
    size = state_steps.block_heads(pool, group)
    num_blocks = heads // size
    group_of = np.arange(0, heads, min(size, group)) // group

    def by_block(vectors: jax.Array) -> jax.Array:
        return vectors.reshape(num_rows, num_blocks, -1, vectors.shape[-1])

    decay = jnp.broadcast_to(jnp.exp(dt * a)[..., None], x.shape)
    given, made = Columns(2 * size, num_blocks), Columns(size, num_blocks)
    laid_out = given.laid_out(jnp.concatenate([by_block(x * dt[..., None]), by_block(decay)], axis=2))
    operands = [laid_out, by_block(b[:, group_of]), by_block(c[:, group_of])]
    update, shape = functools.partial(_update, given=given, made=made), (made.num_tiles, dim, LANES)
    out, pool = state_steps.run_steps("state_space_step", update, operands, shape, pool, segments, size)
    return made.vectors(out).reshape(num_rows, heads, dim), pool


def _chunk(
    vectors: Heads, numbers: list[Heads], states: Heads, *, lanes: Sequence[slice], width: int
) -> tuple[Heads, Heads]:
    """Returns results ``[C, width]`` of a chunk of some heads, and their next states.

    The method is that of Dao and Gu (2024), section 6.
    """
    times, heads, (totals,) = state_chunks.times, range(len(vectors)), numbers
    steps, b, c = ([x[:, each] for x in vectors] for each in lanes)
    (size, dim), states_dim = steps[0].shape, b[0].shape[1]
    scores = [times(c[n], b[n], (1, 1)) * state_chunks.decays_between(totals[n]) for n in heads]
    out = [times(c[n], states[n], (1, 1)) * across(jnp.exp(totals[n]), dim) for n in heads]
    out = [out[n] + times(scores[n], steps[n]) for n in heads]
    last = [total[size - 1 :] for total in totals]
    left = [steps[n] * across(jnp.exp(last[n] - totals[n]), dim) for n in heads]
    states = [states[n] * across(jnp.exp(last[n]), states_dim) + times(left[n], b[n], (0, 0)) for n in heads]
    if missing := width - dim:
        out = [jnp.concatenate([each, jnp.zeros((size, missing), jnp.float32)], axis=1) for each in out]
    return out, states


def _unsupported_reason(*operands: Any, **options: Any) -> str | None:
    return "no tokens" if not operands[0].shape[0] else state_steps.unsupported_reason(*operands[7:9])


@registry.register(OP, NAME, ("tpu",), unsupported_reason=_unsupported_reason)
def state_space(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array | None,
    dt_bias: jax.Array | None,
    pool: jax.Array,
    segments: Segments,
    *,
    dt_limit: tuple[float, float],
) -> tuple[jax.Array, jax.Array]:
    """Computes single tokens by one kernel and chunks of the others by another, in place."""
    num_tokens, heads, dim = x.shape
    first, a = first_tokens(segments, num_tokens), a.astype(jnp.float32)
    steps, inputs = time_steps(dt, dt_bias, dt_limit), x.astype(jnp.float32)
    b_first, c_first = (each[first].astype(jnp.float32) for each in (b, c))
    singles, pool = _singles(inputs[first], steps[first], a, b_first, c_first, pool, segments)
    skip = jnp.zeros(heads) if d is None else d.astype(jnp.float32)
    if state_chunks.unsupported_reason(pool, num_tokens) is not None:
        return chunked(x, steps, a, b, c, d, pool, segments, singles + inputs[first] * skip[:, None])
    size = state_chunks.chunk_len(num_tokens)
    chunks = Chunks.of(segments, num_tokens, size)
    totals = jnp.cumsum(state_chunks.numbers_by_chunk(steps * a, chunks, size), axis=1)
    vectors = [inputs * steps[..., None], by_head(b, heads), by_head(c, heads)]
    tokens, lanes = state_chunks.side_by_side(vectors, size)
    compute, name = functools.partial(_chunk, lanes=lanes, width=round_up(dim, LANES)), "state_space_chunk"
    out, pool = state_chunks.run_chunks(name, compute, tokens, [totals], chunks, pool, segments, singles)
    is_in_use = jnp.arange(num_tokens)[:, None, None] < segments.cu[-1]
    return (out + jnp.where(is_in_use, inputs * skip[:, None], 0)).astype(x.dtype), pool
