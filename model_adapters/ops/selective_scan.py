"""Mamba's selective scan (Gu and Dao, 2023) over a packed row: Mamba, Jamba, Zamba.

A state is ``[D, N]``, each number of which decays by itself::

    state = exp(dt * a) * state + dt * x b
    out = state c + d * x
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.ops import registry, spmd
from model_adapters.ops.cpu import recurrent
from model_adapters.ops.kv_pool import expect
from model_adapters.ops.segments import Segments
from model_adapters.ops.state_pool import (
    HIGHEST,
    check_pool,
    cut_masked,
    first_tokens,
    padded,
    read_states,
    single_rows,
    walk,
    with_last_row,
    write_states,
)

OP = "selective_scan"
CHUNK_LEN = 32


def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array | None,
    pool: jax.Array,
    segments: Segments,
) -> tuple[jax.Array, jax.Array]:
    """Returns what the states give, ``[T, D]`` in x's dtype, and the pool.

    Args:
        x: ``[T, D]``.
        dt: ``[T, D]``, positive steps.
        a: ``[D, N]``, negative.
        b: ``[T, N]``, or ``[T, G, N]``: channel i has group ``i // (D // G)``.
        c: As b.
        d: ``[D]`` or None.
        pool: ``float32[rows, D, N]``; updated in place if donated.
        segments: Of the T tokens.

    Raises:
        InvalidArgumentError: shapes that do not fit together.
    """
    (num_tokens, dim), states = x.shape, a.shape[1]
    expect(OP, "dt of shape", (num_tokens, dim), dt.shape)
    expect(OP, "a of shape", (dim, states), a.shape)
    b, c = (each[:, None] if each.ndim == 2 else each for each in (b, c))
    expect(OP, "b and c of one shape", b.shape, c.shape)
    expect(OP, "b of shape", (num_tokens, b.shape[1], states), b.shape)
    expect(OP, f"channels of x a multiple of the groups of b, {b.shape[1]}, remainder", 0, dim % b.shape[1])
    if d is not None:
        expect(OP, "d of shape", (dim,), d.shape)
    check_pool(OP, pool, (dim, states), segments)
    out: tuple[jax.Array, jax.Array] = registry.call(OP, x, dt, a, b, c, d, pool, segments)
    return out


@registry.define(OP, "selective scan (Mamba) over packed sequences, states by row of a pool")
@with_last_row
def reference(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array | None,
    pool: jax.Array,
    segments: Segments,
) -> tuple[jax.Array, jax.Array]:
    """Computes single tokens in one batch, the others one after the other."""
    num_tokens, groups, dtype = x.shape[0], b.shape[1], x.dtype
    a, skip = a.astype(jnp.float32), jnp.zeros(x.shape[1]) if d is None else d.astype(jnp.float32)
    arrays = [each.astype(jnp.float32) for each in (x, dt, b, c)]

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """Returns states ``[..., D, N]`` and results ``[..., D]``."""
        x, dt, b, c = token
        steps = (dt * x).reshape(*x.shape[:-1], groups, -1, 1)
        state = jnp.exp(a * dt[..., None]) * state + (steps * b[..., None, :]).reshape(state.shape)
        by_group = state.reshape(*steps.shape[:-1], -1)
        read = jnp.einsum("...gdn,...gn->...gd", by_group, c, precision=HIGHEST)
        return state, read.reshape(x.shape) + skip * x

    first = first_tokens(segments, num_tokens)
    read, write = single_rows(segments, pool)
    states, singles = step(read_states(pool, read, segments.held), tuple(each[first] for each in arrays))
    pool = write_states(pool, write, states)
    size = min(CHUNK_LEN, num_tokens)
    long = [padded(each, size) for each in arrays]

    def compute(state: jax.Array, begin: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Tokens of other segments are steps of length zero.
        state, out = jax.lax.scan(step, state, tuple(cut_masked(each, begin, mask) for each in long))
        return out, state

    out, pool = walk(pool, segments, singles, num_tokens, size, compute)
    return out.astype(dtype), pool


def _kernel_unsupported_reason(*operands: Any, **options: Any) -> str | None:
    return recurrent.unsupported_reason(*operands[:5])


registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=_kernel_unsupported_reason)(recurrent.selective_scan)
registry.register_module(OP, "tpu", "model_adapters.ops.tpu.selective_scan")
spmd.leave_to_partitioner(OP, reference)
spmd.shard_states_by_heads(
    OP,
    (
        *(spmd.BY_AXIS_1,) * 2,  # x, dt
        spmd.BY_AXIS_0,  # a
        *(spmd.BY_AXIS_1,) * 2,  # b, c
        spmd.BY_AXIS_0,  # d
        spmd.BY_AXIS_1,
    ),
    grouped=(3, 4),
    are_channels=True,
)
