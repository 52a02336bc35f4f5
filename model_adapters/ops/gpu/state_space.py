"""Mamba-2's state space layer on GPUs.

Rows of a state ``[P, N]`` do not depend on each other: a program has some of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.ops import registry
from model_adapters.ops.gpu import chunk_states, token_steps
from model_adapters.ops.gpu.chunk_pairs import ChunkOperands
from model_adapters.ops.gpu.launch import NAME
from model_adapters.ops.gpu.token_steps import COLUMNS, ROWS, SCALAR, Operand
from model_adapters.ops.segments import Segments
from model_adapters.ops.state_space import OP, time_steps

MAX_STATES = 256
"""Most columns of a state that chunks are computed of."""


def _update(
    state: jax.Array, x: jax.Array, b: jax.Array, c: jax.Array, step: jax.Array, decay: jax.Array, skip: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns rows of a state behind a token, and what they give."""
    state = state * decay + (x * step)[:, None] * b[None]
    return state, jnp.sum(state * c[None], axis=1) + x * skip


def _unsupported_reason(*operands: Any, **options: Any) -> str | None:
    return "no tokens" if not operands[0].shape[0] else token_steps.unsupported_reason(operands[7], summed=1)


@registry.register(OP, NAME, ("gpu",), unsupported_reason=_unsupported_reason)
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
    """Computes few tokens of a sequence one by one and many in chunks, in place."""
    steps = time_steps(dt, dt_bias, dt_limit)
    logs = steps * a.astype(jnp.float32)
    skip = jnp.broadcast_to(0.0 if d is None else d.astype(jnp.float32), steps.shape)
    operands = [
        Operand(x, ROWS),
        Operand(b, COLUMNS),
        Operand(c, COLUMNS),
        *(Operand(each, SCALAR) for each in (steps, jnp.exp(logs), skip)),
    ]
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    is_long = chunk_states.long_sequences(segments, x.shape[0], pool.shape[3], most=MAX_STATES)
    made, pool = token_steps.run_tokens(OP, _update, operands, out, pool, segments, summed=1, without=is_long)
    if is_long is None:
        return made, pool
    given = ChunkOperands(c, b, x, logs, steps, skip)
    return chunk_states.run_chunks(OP, given, made, pool, segments, is_long, summed=1)
