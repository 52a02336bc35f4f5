"""The gated delta rule on GPUs, also with Kimi Delta Attention's decays by column of keys.

Columns of a state ``[K, V]`` do not depend on each other: a program has some of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.ops import registry
from model_adapters.ops.gated_delta_rule import OP, unit
from model_adapters.ops.gpu import token_steps
from model_adapters.ops.gpu.launch import NAME
from model_adapters.ops.gpu.token_steps import COLUMNS, ROWS, SCALAR, Operand
from model_adapters.ops.segments import Segments


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
    """Computes single tokens and prompts by one kernel, in place."""
    queries, keys = q.astype(jnp.float32), k.astype(jnp.float32)
    if is_normed:
        queries, keys = unit(queries), unit(keys)
    operands = [
        Operand(queries * q.shape[2] ** -0.5, ROWS),
        Operand(keys, ROWS),
        Operand(v, COLUMNS),
        Operand(jnp.exp(g.astype(jnp.float32)), SCALAR if g.ndim == 2 else ROWS),
        Operand(beta, SCALAR),
    ]
    out = jax.ShapeDtypeStruct(v.shape, v.dtype)
    return token_steps.run_tokens("gated_delta_rule", _update, operands, out, pool, segments, summed=0)
