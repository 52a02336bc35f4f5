"""The gated delta rule on GPUs, also with Kimi Delta Attention's decays by column of keys.

Columns of a state ``[K, V]`` do not depend on each other: a program has some of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.ops import registry
from model_adapters.ops.gated_delta_rule import OP, unit
from model_adapters.ops.gpu import chunk_states, token_steps
from model_adapters.ops.gpu.chunk_pairs import ChunkOperands
from model_adapters.ops.gpu.launch import NAME
from model_adapters.ops.gpu.token_steps import COLUMNS, ROWS, SCALAR, Operand
from model_adapters.ops.segments import Segments

MAX_KEYS = 128
"""Most rows of a state that chunks are computed of."""


def _update(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns columns of a state behind a token, and what its query reads of them."""
    state = state * (decay[:, None] if decay.ndim else decay)
    delta = (v - jnp.sum(state * k[:, None], axis=0)) * beta
    state = state + k[:, None] * delta[None]
    return state, jnp.sum(state * q[:, None], axis=0)


def _unsupported_reason(*operands: Any, **options: Any) -> str | None:
    return "no tokens" if not operands[0].shape[0] else token_steps.unsupported_reason(operands[5], summed=0)


@registry.register(OP, NAME, ("gpu",), unsupported_reason=_unsupported_reason)
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
    """Computes few tokens of a sequence one by one and many in chunks, in place."""
    queries, keys, g = (x.astype(jnp.float32) for x in (q, k, g))
    if is_normed:
        queries, keys = unit(queries), unit(keys)
    queries = queries * q.shape[2] ** -0.5
    operands = [
        Operand(queries, ROWS),
        Operand(keys, ROWS),
        Operand(v, COLUMNS),
        Operand(jnp.exp(g), SCALAR if g.ndim == 2 else ROWS),
        Operand(beta, SCALAR),
    ]
    out = jax.ShapeDtypeStruct(v.shape, v.dtype)
    is_long = chunk_states.long_sequences(segments, v.shape[0], pool.shape[2], most=MAX_KEYS)
    made, pool = token_steps.run_tokens(OP, _update, operands, out, pool, segments, summed=0, without=is_long)
    if is_long is None:
        return made, pool
    given = ChunkOperands(queries, keys, v, g, beta, is_delta=True)
    return chunk_states.run_chunks(OP, given, made, pool, segments, is_long, summed=0)
