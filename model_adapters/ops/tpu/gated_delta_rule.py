"""The gated delta rule on TPUs: single tokens by a kernel, chunks by the reference's walk.

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

from model_adapters.ops import registry
from model_adapters.ops.gated_delta_rule import OP, chunked, unit
from model_adapters.ops.segments import Segments
from model_adapters.ops.state_pool import first_tokens
from model_adapters.ops.tpu import state_steps
from model_adapters.ops.tpu.launch import NAME
from model_adapters.ops.tpu.page_buffers import SUBLANES
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
    return chunked(q, k, v, g, beta, pool, segments, singles, is_normed=is_normed)
