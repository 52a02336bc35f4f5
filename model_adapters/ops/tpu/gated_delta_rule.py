"""The gated delta rule on TPUs: a kernel of single tokens, and one of chunks.

The method is that of Yang et al. (2024), equation 10, with Kimi Delta Attention's decays by column of keys as an option
(Kimi Team, 2025). A state ``[K, V]`` has its keys on sublanes: keys, queries and decays multiply it as columns, values
are rows, and both products with a state are sums over sublanes, which the vector unit computes exactly in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

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


@dataclass(frozen=True)
class _DecaysOfHead:
    """Decays of a chunk that all columns of keys share.

    ``total[C, 128]`` are logarithms, added up to each token.
    """

    total: jax.Array

    def pairs(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys and queries i times keys j as they have decayed until i; 0 for j > i."""
        size, between = k.shape[0], state_chunks.decays_between(self.total)
        made = state_chunks.times(jnp.concatenate([k, q], axis=0), k, (1, 1))
        return made[:size] * between, made[size:] * between

    def since_begin(self, x: jax.Array) -> jax.Array:
        """Returns ``x[C, K]`` times what is left at each token of the state in front of the chunk."""
        return x * across(jnp.exp(self.total), x.shape[1])

    def until_end(self, x: jax.Array) -> jax.Array:
        """Returns ``x[C, K]`` times what is left of each token at the end of the chunk."""
        return x * across(jnp.exp(self.total[-1:] - self.total), x.shape[1])

    def of_state(self, state: jax.Array) -> jax.Array:
        """Returns what is left of ``state[K, V]`` at the end of the chunk."""
        return state * across(jnp.exp(self.total[-1:]), state.shape[1])


@dataclass(frozen=True)
class _DecaysOfColumns:
    """Decays of a chunk by column of keys.

    A product of two tokens' decayed vectors needs a place between them from which both decay, or one of them would
    grow without bound. So tokens are halved again and again: of each pair there is one width of halves at which it has
    a token in either half of a block. From the border between the halves on the later token decays, and up to it the
    earlier one. Logarithms are added up within halves only, so that none is the difference of two large sums.

    Attributes:
        by_width: ``[C, K]`` each, decays between a token and the border, for halves of 1, 2, 4, ... tokens.
        since: ``[C, K]``, decays from the chunk's begin to each token, inclusive.
        until: ``[C, K]``, decays behind each token to the chunk's end.
        total: ``[1, K]``, of all tokens.
    """

    by_width: list[jax.Array]
    since: jax.Array
    until: jax.Array
    total: jax.Array

    @classmethod
    def of(cls, logarithms: jax.Array) -> _DecaysOfColumns:
        """Returns the decays of ``logarithms[C, K]``."""
        size, width, by_width = logarithms.shape[0], 1, []
        row = lax.broadcasted_iota(jnp.int32, logarithms.shape, 0)
        upto, behind, total = logarithms, jnp.zeros_like(logarithms), logarithms
        while width < size:
            is_later = row // width % 2 == 1
            by_width.append(jnp.exp(jnp.where(is_later, upto, behind)))
            other = _of_other_half(total, width)
            upto, behind = jnp.where(is_later, upto + other, upto), jnp.where(is_later, behind, behind + other)
            total, width = total + other, 2 * width
        return cls(by_width, jnp.exp(upto), jnp.exp(behind), jnp.exp(total[:1]))

    def pairs(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys and queries i times keys j as they have decayed until i; 0 for j > i."""
        size = k.shape[0]
        row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
        of_keys = jnp.zeros((size, size), jnp.float32)
        of_queries = jnp.where(row == column, jnp.sum(q * k, axis=1, keepdims=True), 0.0)
        for level, decays in enumerate(self.by_width):
            width, keys, queries = 1 << level, k * decays, q * decays
            is_pair = (row // (2 * width) == column // (2 * width)) & (row // width > column // width)
            made_of: tuple[jax.Array, ...]
            if width < SUBLANES:
                made = state_chunks.times(jnp.concatenate([keys, queries], axis=0), keys, (1, 1))
                made_of = made[:size], made[size:]
            else:  # rows of earlier halves have no pair
                later = [slice(begin, begin + width) for begin in range(width, size, 2 * width)]
                made = state_chunks.times(
                    jnp.concatenate([x[at] for x in (keys, queries) for at in later]), keys, (1, 1)
                )
                made_of = tuple(_behind_zeros(part, width) for part in jnp.split(made, 2))
            of_keys, of_queries = (
                jnp.where(is_pair, new, found) for new, found in zip(made_of, (of_keys, of_queries), strict=True)
            )
        return of_keys, of_queries

    def since_begin(self, x: jax.Array) -> jax.Array:
        """Returns ``x[C, K]`` times what is left at each token of the state in front of the chunk."""
        return x * self.since

    def until_end(self, x: jax.Array) -> jax.Array:
        """Returns ``x[C, K]`` times what is left of each token at the end of the chunk."""
        return x * self.until

    def of_state(self, state: jax.Array) -> jax.Array:
        """Returns what is left of ``state[K, V]`` at the end of the chunk."""
        dim = state.shape[0]
        row, lane = (lax.broadcasted_iota(jnp.int32, (dim, dim), axis) for axis in (0, 1))
        return state * jnp.sum(jnp.where(row == lane, self.total, 0.0), axis=1, keepdims=True)


def _of_other_half(x: jax.Array, width: int) -> jax.Array:
    """Returns ``x[C, K]``, the same in `width` rows each, of the other half of a row's block."""
    size, columns = x.shape
    if width >= SUBLANES:
        return jnp.concatenate([x[(begin ^ width) : (begin ^ width) + width] for begin in range(0, size, width)])
    tiles = x.reshape(size // SUBLANES, SUBLANES, columns)
    earlier, later = pltpu.roll(tiles, width, 1), pltpu.roll(tiles, SUBLANES - width, 1)
    is_later = lax.broadcasted_iota(jnp.int32, tiles.shape, 1) // width % 2 == 1
    return jnp.where(is_later, earlier, later).reshape(size, columns)


def _behind_zeros(x: jax.Array, width: int) -> jax.Array:
    """Returns ``x[R, C]`` with `width` rows of zeros in front of `width` of it each."""
    zeros = jnp.zeros((width, x.shape[1]), x.dtype)
    return jnp.concatenate([part for at in range(0, x.shape[0], width) for part in (zeros, x[at : at + width])])


def _chunk(
    vectors: Heads, numbers: list[Heads], states: Heads, *, lanes: Sequence[slice], width: int
) -> tuple[Heads, Heads]:
    """Returns results ``[C, width]`` of a chunk of some heads, and their next states.

    The method is that of Yang et al. (2024), section 3.3. Logarithms of decays are vectors behind q, k and v, or else
    the first kind of numbers, added up.
    """
    times, size, heads = state_chunks.times, vectors[0].shape[0], range(len(vectors))
    q, k, v, *by_column = ([x[:, each] for x in vectors] for each in lanes)
    *totals, betas = numbers
    decays: list[Any] = [*map(_DecaysOfColumns.of, *by_column)] if by_column else [*map(_DecaysOfHead, *totals)]
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    pairs = [decays[n].pairs(q[n], k[n]) for n in heads]
    systems = [jnp.where(row > column, pairs[n][0] * betas[n][:, :size], 0.0) for n in heads]
    inverses = _inverses(systems)
    right = [
        across(betas[n], v[n].shape[1] + k[n].shape[1]) * jnp.concatenate([v[n], decays[n].since_begin(k[n])], axis=1)
        for n in heads
    ]
    solved = [times(inverses[n], right[n]) for n in heads]
    ends = v[0].shape[1]
    left = [jnp.concatenate([solved[n][:, ends:], decays[n].since_begin(q[n])], axis=0) for n in heads]
    known = [times(left[n], states[n]) for n in heads]
    new = [solved[n][:, :ends] - known[n][:size] for n in heads]
    out = [known[n][size:] + times(pairs[n][1], new[n]) for n in heads]
    kept = [decays[n].until_end(k[n]) for n in heads]
    states = [decays[n].of_state(states[n]) + times(kept[n], new[n], (0, 0)) for n in heads]
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
    """Computes single tokens by one kernel and chunks of the others by another, in place."""
    first = first_tokens(segments, v.shape[0])
    queries, keys, values, decays, betas = (x[first].astype(jnp.float32) for x in (q, k, v, g, beta))
    if is_normed:
        queries, keys = unit(queries), unit(keys)
    queries = queries * q.shape[2] ** -0.5
    singles, pool = _singles(queries, keys, values, decays, betas, pool, segments)
    if state_chunks.unsupported_reason(pool, v.shape[0]) is not None:
        return chunked(q, k, v, g, beta, pool, segments, singles, is_normed=is_normed)
    size = state_chunks.chunk_len(v.shape[0])
    chunks = Chunks.of(segments, v.shape[0], size)
    vectors, numbers = [*prepared(q, k, v.shape[1], is_normed), v], [state_chunks.numbers_by_chunk(beta, chunks, size)]
    if g.ndim == 3:
        vectors.append(g)
    else:
        numbers.insert(0, jnp.cumsum(state_chunks.numbers_by_chunk(g, chunks, size), axis=1))
    tokens, lanes = state_chunks.side_by_side(vectors, size)
    compute = functools.partial(_chunk, lanes=lanes, width=round_up(v.shape[2], LANES))
    name = "gated_delta_rule_chunk"
    out, pool = state_chunks.run_chunks(name, compute, tokens, numbers, chunks, pool, segments, singles)
    return out.astype(v.dtype), pool
