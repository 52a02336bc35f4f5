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
from model_adapters.ops.state_pool import first_tokens
from model_adapters.ops.tpu import state_chunks, state_steps
from model_adapters.ops.tpu.launch import NAME
from model_adapters.ops.tpu.page_buffers import LANES, SUBLANES, round_up
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
"""Rows of a triangular system that are solved by substitution; products bring them to the rows behind."""


def _solved(system: jax.Array, right: jax.Array) -> jax.Array:
    """Returns ``x[C, n]`` of ``(1 + system[C, C]) x = right[C, n]``, where `system` is 0 on and above its diagonal."""
    size, solved = system.shape[0], []
    for begin in range(0, size, BLOCK):
        rows = slice(begin, min(begin + BLOCK, size))
        x = right[rows]
        if solved:
            x = x - state_chunks.times(system[rows, :begin], jnp.concatenate(solved, axis=0))
        for j in range(rows.stop - begin - 1):  # row j is final: it is taken out of those behind
            x = x - system[rows, begin + j : begin + j + 1] * x[j : j + 1]
        solved.append(x)
    return jnp.concatenate(solved, axis=0)


def _chunk(
    x: jax.Array, state: jax.Array, *, lanes: Sequence[slice], width: int
) -> tuple[jax.Array, jax.Array]:
    """Returns results ``[C, width]`` of a chunk of one head, and its next state (Yang et al., section 3.3)."""
    times = state_chunks.times
    q, k, v, gates = (x[:, each] for each in lanes)
    size = x.shape[0]
    beta, total = gates[:, 1:2], state_chunks.cumulative(x[:, lanes[3].start :])[:, :1]
    between, since, end = state_chunks.decays_between(total), jnp.exp(total), total[size - 1 :]
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    pairs = times(jnp.concatenate([k, q], axis=0), k, (1, 1))
    system = jnp.where(row > column, pairs[:size] * between * beta, 0.0)
    solved = _solved(system, jnp.concatenate([v * beta, k * (beta * since)], axis=1))
    known = times(jnp.concatenate([solved[:, v.shape[1] :], q * since], axis=0), state)
    new = solved[:, : v.shape[1]] - known[:size]
    out = known[size:] + times(pairs[size:] * between, new)
    state = state * jnp.exp(end) + times(k * jnp.exp(end - total), new, (0, 0))
    if missing := width - out.shape[1]:
        out = jnp.concatenate([out, jnp.zeros((size, missing), jnp.float32)], axis=1)
    return out, state


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
    """Computes single tokens by the kernel, in place, and the others in chunks."""
    first = first_tokens(segments, v.shape[0])
    one = [x[first].astype(jnp.float32) for x in (q, k, v, g, beta)]
    if is_normed:
        one[:2] = unit(one[0]), unit(one[1])
    one[0] = one[0] * q.shape[2] ** -0.5
    singles, pool = _singles(*one, pool, segments)
    if g.ndim == 3 or state_chunks.unsupported_reason(pool, v.shape[0]) is not None:
        return chunked(q, k, v, g, beta, pool, segments, singles, is_normed=is_normed)
    size = min(state_chunks.CHUNK_LEN, round_up(v.shape[0], SUBLANES))
    arrays = [*prepared(q, k, v.shape[1], is_normed), v, jnp.stack([g, beta.astype(g.dtype)], axis=2)]
    tokens, lanes = state_chunks.side_by_side(arrays, size)
    compute = functools.partial(_chunk, lanes=lanes, width=round_up(v.shape[2], LANES))
    name = "gated_delta_rule_chunk"
    out, pool = state_chunks.run_chunks(name, compute, tokens, v.shape[2], pool, segments, singles, size)
    return out.astype(v.dtype), pool
