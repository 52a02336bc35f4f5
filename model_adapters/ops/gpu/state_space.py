"""Mamba-2's state space layer on GPUs.

Rows of a state ``[P, N]`` do not depend on each other: a program has some of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.ops import registry
from model_adapters.ops.gpu import token_steps
from model_adapters.ops.gpu.launch import NAME
from model_adapters.ops.gpu.token_steps import COLUMNS, ROWS, SCALAR, Operand
from model_adapters.ops.segments import Segments
from model_adapters.ops.state_space import OP, time_steps


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
    """Computes single tokens and prompts by one kernel, in place."""
    steps = time_steps(dt, dt_bias, dt_limit)
    decays = jnp.exp(steps * a.astype(jnp.float32))
    skip = jnp.broadcast_to(0.0 if d is None else d.astype(jnp.float32), steps.shape)
    operands = [
        Operand(x, ROWS),
        Operand(b, COLUMNS),
        Operand(c, COLUMNS),
        *(Operand(each, SCALAR) for each in (steps, decays, skip)),
    ]
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return token_steps.run_tokens("state_space", _update, operands, out, pool, segments, summed=1)
