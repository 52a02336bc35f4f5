"""The gated delta rule on TPUs: a kernel of single tokens, and one of chunks.

The method is that of Yang et al. (2024), equation 10, with Kimi Delta Attention's decays by column of keys as an option
(Kimi Team, 2025). A state ``[K, V]`` has its keys on sublanes: keys, queries and decays multiply it as columns, values
are rows, and both products with a state are sums over sublanes, which the vector unit computes exactly in float32.
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
from model_adapters.ops.gated_delta_rule import OP, chunked, prepared, unit
from model_adapters.ops.segments import Segments
from model_adapters.ops.state_pool import Chunks, first_tokens
from model_adapters.ops.tpu import state_chunks, state_steps
from model_adapters.ops.tpu.launch import NAME
from model_adapters.ops.tpu.page_buffers import LANES, SUBLANES, across, round_up
from model_adapters.ops.tpu.state_chunks import Heads
from model_adapters.ops.tpu.state_steps import Columns, spread


def _update(
    j: Any, operands: Sequence[Any], out: Any, block: Any, *, columns: Columns, key_heads: int, by_column: bool
) -> None:
    """Computes the heads of block j; see `run_steps`."""
    v = operands[1][0, j]
    heads, dim, width = block.shape
    at, begin = columns.begin(j)
    vectors, results = operands[0][0, at], []
    for head in range(heads):
        key_head = head * key_heads // heads

        def column(index: int, rows: int = dim) -> jax.Array:
            return spread(vectors[: max(rows, SUBLANES)], begin + index, width)[:rows]

        k, q = column(key_head), column(key_heads + key_head)
        decay, beta = column(2 * key_heads + head, dim if by_column else 1), column(2 * key_heads + heads + head, 1)
        state = block[head] * decay
        delta = (v[head : head + 1] - jnp.sum(state * k, axis=0, keepdims=True)) * beta
        state = state + k * delta
        block[head] = state
        results.append(jnp.sum(state * q, axis=0, keepdims=True))
    out[0, j] = jnp.concatenate(results, axis=0)


def _singles(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, pool: jax.Array, segments: Segments
) -> tuple[jax.Array, jax.Array]:
    """Returns results ``float32[R, H, V]`` of the segments that are one token, and the pool.

    Queries, scaled, and keys are ``[R, Hk, K]``; the other arrays are by segment as well.
    """
    num_rows, heads, width = v.shape
    group = heads // k.shape[1]
    size = state_steps.block_heads(pool, group)
    num_blocks, dim = heads // size, k.shape[2]
    key_head_of = np.arange(0, heads, min(size, group)) // group
    key_heads = len(key_head_of) // num_blocks

    def by_block(x: jax.Array) -> jax.Array:
        return x.reshape(num_rows, num_blocks, -1, x.shape[-1])

    decay = jnp.broadcast_to(jnp.exp(g).reshape(num_rows, heads, -1), (num_rows, heads, dim))
    vectors = [k[:, key_head_of], q[:, key_head_of], decay, jnp.broadcast_to(beta[..., None], decay.shape)]
    columns = Columns(2 * (key_heads + size), num_blocks)
    update = functools.partial(_update, columns=columns, key_heads=key_heads, by_column=g.ndim == 3)
    laid_out = columns.laid_out(jnp.concatenate([by_block(x) for x in vectors], axis=2))
    operands = [laid_out, by_block(v)]
    shape = (num_blocks, size, width)
    out, pool = state_steps.run_steps("gated_delta_rule_step", update, operands, shape, pool, segments, size)
    return out.reshape(num_rows, heads, width), pool


BLOCK = 16
"""Rows of a triangular matrix that are inverted by substitution; products join the blocks."""
PACKED = 2
"""Matrices of at most 64 columns whose blocks are inverted side by side, in the 128 lanes of a register."""


def _inverses(systems: Heads) -> Heads:
    """Returns the inverses of ``1 + system[C, C]``, each 0 on and above its diagonal.

    Blocks of 16 on the diagonal are inverted by forward substitution, all at once: block b of a matrix lies in its own
    lanes, and step j takes row j, which is final, out of the rows behind it, by column j of each block. Two blocks and
    the matrix L between them then give ``T - T L T`` of the inverses T that were found, and so do two of those.
    """
    size = systems[0].shape[0]
    row, lane = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    inverses = _inverses_of_blocks(systems)
    width = BLOCK
    while width < size:
        is_between = (row // (2 * width) == lane // (2 * width)) & (row // width > lane // width)
        between = [jnp.where(is_between, system, 0.0) for system in systems]
        between = [state_chunks.times(each, inverse) for each, inverse in zip(between, inverses, strict=True)]
        behind = [state_chunks.times(inverse, each) for inverse, each in zip(inverses, between, strict=True)]
        inverses = [inverse - each for inverse, each in zip(inverses, behind, strict=True)]
        width *= 2
    return inverses


def _inverses_of_blocks(systems: Heads) -> Heads:
    """Returns the inverses of only the blocks of 16 on the diagonals of ``1 + system[C, C]``."""
    size = systems[0].shape[0]
    num_blocks, width = size // BLOCK, LANES // PACKED
    block_of = lax.broadcasted_iota(jnp.int32, (BLOCK, size), 1) // BLOCK
    row, lane = (lax.broadcasted_iota(jnp.int32, (BLOCK, LANES), axis) for axis in (0, 1))
    inverses = []
    for first in range(0, len(systems), PACKED):
        group = [systems[min(first + n, len(systems) - 1)] for n in range(PACKED)]
        parts = []
        for system in group:
            blocks = [system[b * BLOCK : (b + 1) * BLOCK] for b in range(num_blocks)]
            part = sum(jnp.where(block_of == b, block, 0.0) for b, block in enumerate(blocks))
            parts += [part] if size == width else [part, jnp.zeros((BLOCK, width - size), jnp.float32)]
        packed, x = jnp.concatenate(parts, axis=1), jnp.where(row == lane % BLOCK, 1.0, 0.0)
        for j in range(BLOCK - 1):
            column = jnp.take_along_axis(packed, lane // BLOCK * BLOCK + j, axis=1, mode="promise_in_bounds")
            x = x - column * x[j : j + 1]
        for n in range(min(PACKED, len(systems) - first)):
            part = x[:, n * width : n * width + size]
            inverses.append(jnp.concatenate([jnp.where(block_of == b, part, 0.0) for b in range(num_blocks)], axis=0))
    return inverses


def _chunk(
    vectors: Heads, numbers: list[Heads], states: Heads, *, lanes: Sequence[slice], width: int
) -> tuple[Heads, Heads]:
    """Returns results ``[C, width]`` of a chunk of some heads, and their next states.

    The method is that of Yang et al. (2024), section 3.3.
    """
    times, size, heads = state_chunks.times, vectors[0].shape[0], range(len(vectors))
    q, k, v = ([x[:, each] for x in vectors] for each in lanes)
    totals, betas = numbers
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    pairs = [times(jnp.concatenate([k[n], q[n]], axis=0), k[n], (1, 1)) for n in heads]
    between = [state_chunks.decays_between(total) for total in totals]
    systems = [jnp.where(row > column, pairs[n][:size] * between[n] * betas[n][:, :size], 0.0) for n in heads]
    inverses = _inverses(systems)
    since = [jnp.exp(total) for total in totals]
    right = [
        jnp.concatenate([v[n] * across(betas[n], v[n].shape[1]), k[n] * across(betas[n] * since[n], k[n].shape[1])], 1)
        for n in heads
    ]
    solved = [times(inverses[n], right[n]) for n in heads]
    ends = v[0].shape[1]
    left = [jnp.concatenate([solved[n][:, ends:], q[n] * across(since[n], q[n].shape[1])], axis=0) for n in heads]
    known = [times(left[n], states[n]) for n in heads]
    new = [solved[n][:, :ends] - known[n][:size] for n in heads]
    out = [known[n][size:] + times(pairs[n][size:] * between[n], new[n]) for n in heads]
    last = [total[size - 1 :] for total in totals]
    kept = [k[n] * across(jnp.exp(last[n] - totals[n]), k[n].shape[1]) for n in heads]
    states = [states[n] * across(jnp.exp(last[n]), ends) + times(kept[n], new[n], (0, 0)) for n in heads]
    if missing := width - ends:
        out = [jnp.concatenate([each, jnp.zeros((size, missing), jnp.float32)], axis=1) for each in out]
    return out, states


def _unsupported_reason(*operands: Any, **options: Any) -> str | None:
    return "no tokens" if not operands[0].shape[0] else state_steps.unsupported_reason(*operands[5:7])


@registry.register(OP, NAME, ("tpu",), unsupported_reason=_unsupported_reason)
def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    segments: Segments,
    *,
    is_normed: bool,
) -> tuple[jax.Array, jax.Array]:
    """Computes single tokens by one kernel and chunks of the others by another, in place.

    Chunks with decays by column are walked as the reference does.
    """
    first = first_tokens(segments, v.shape[0])
    queries, keys, values, decays, betas = (x[first].astype(jnp.float32) for x in (q, k, v, g, beta))
    if is_normed:
        queries, keys = unit(queries), unit(keys)
    queries = queries * q.shape[2] ** -0.5
    singles, pool = _singles(queries, keys, values, decays, betas, pool, segments)
    if g.ndim == 3 or state_chunks.unsupported_reason(pool, v.shape[0]) is not None:
        return chunked(q, k, v, g, beta, pool, segments, singles, is_normed=is_normed)
    size = state_chunks.chunk_len(v.shape[0])
    chunks = Chunks.of(segments, v.shape[0], size)
    numbers = [state_chunks.numbers_by_chunk(x, chunks, size) for x in (g, beta)]
    numbers[0] = jnp.cumsum(numbers[0], axis=1)
    tokens, lanes = state_chunks.side_by_side([*prepared(q, k, v.shape[1], is_normed), v], size)
    compute = functools.partial(_chunk, lanes=lanes, width=round_up(v.shape[2], LANES))
    name = "gated_delta_rule_chunk"
    out, pool = state_chunks.run_chunks(name, compute, tokens, numbers, chunks, pool, segments, singles)
    return out.astype(v.dtype), pool
