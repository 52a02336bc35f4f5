"""Mamba-2's state space layer (Dao and Gu, 2024) over a packed row: Falcon-H1, Granite 4.

A state is ``[P, N]`` for each head::

    dt = clip(softplus(dt + dt_bias))
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
    Compute,
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

OP = "state_space"
CHUNK_LEN = 64


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
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[jax.Array, jax.Array]:
    """Returns what the states give, ``[T, H, P]`` in x's dtype, and the pool.

    Args:
        x: ``[T, H, P]``.
        dt: ``[T, H]``, steps before softplus.
        a: ``[H]``, negative.
        b: ``[T, G, N]``; head h of x has group ``h // (H // G)``.
        c: ``[T, G, N]``.
        d: ``[H]`` or None.
        dt_bias: ``[H]`` or None.
        pool: ``float32[rows, H, P, N]``; updated in place if donated.
        segments: Of the T tokens.
        dt_limit: Smallest and largest step.

    Raises:
        InvalidArgumentError: shapes that do not fit together.
    """
    num_tokens, heads, dim = x.shape
    expect(OP, "dt of shape", (num_tokens, heads), dt.shape)
    expect(OP, "b and c of one shape", b.shape, c.shape)
    expect(OP, "b of as many tokens as x,", num_tokens, b.shape[0])
    expect(OP, f"heads of x a multiple of the groups of b, {b.shape[1]}, remainder", 0, heads % b.shape[1])
    for name, array in (("a", a), ("d", d), ("dt_bias", dt_bias)):
        if array is not None:
            expect(OP, f"{name} of shape", (heads,), array.shape)
    check_pool(OP, pool, (heads, dim, b.shape[2]), segments)
    out: tuple[jax.Array, jax.Array] = registry.call(
        OP, x, dt, a, b, c, d, dt_bias, pool, segments, dt_limit=tuple(dt_limit)
    )
    return out


def by_head(x: jax.Array, heads: int) -> jax.Array:
    """Returns ``[..., G, N]`` of groups as ``float32[..., H, N]``."""
    return jnp.repeat(x.astype(jnp.float32), heads // x.shape[-2], axis=-2)


@registry.define(OP, "state space layer (Mamba-2) over packed sequences, states by row of a pool")
@with_last_row
def reference(
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
    """Computes single tokens in one batch, the others in chunks (Dao and Gu, section 6)."""
    heads, first = x.shape[1], first_tokens(segments, x.shape[0])
    steps = time_steps(dt, dt_bias, dt_limit)
    dts, xs = steps[first], x[first].astype(jnp.float32)
    read, write = single_rows(segments, pool)
    states = read_states(pool, read, segments.held) * jnp.exp(dts * a.astype(jnp.float32))[..., None, None]
    states = states + (dts[..., None] * xs)[..., None] * by_head(b[first], heads)[:, :, None]
    singles = jnp.einsum("shpn,shn->shp", states, by_head(c[first], heads), precision=HIGHEST)
    singles = singles if d is None else singles + xs * d.astype(jnp.float32)[:, None]
    pool = write_states(pool, write, states)
    return chunked(x, steps, a, b, c, d, pool, segments, singles)


def time_steps(dt: jax.Array, dt_bias: jax.Array | None, dt_limit: tuple[float, float]) -> jax.Array:
    """Returns the steps ``float32[T, H]`` of ``dt[T, H]``."""
    dt = dt.astype(jnp.float32) + (0 if dt_bias is None else dt_bias.astype(jnp.float32))
    return jnp.clip(jax.nn.softplus(dt), *dt_limit)


def chunked(
    x: jax.Array,
    steps: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array | None,
    pool: jax.Array,
    segments: Segments,
    singles: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns results ``[T, H, P]`` and the pool, with those of single tokens as they are given.

    `singles` are ``float32[R, H, P]``, by segment; `steps` those of :func:`time_steps`.
    """
    num_tokens, heads = x.shape[:2]
    size = min(CHUNK_LEN, num_tokens)
    skip = jnp.zeros(heads) if d is None else d.astype(jnp.float32)
    compute = _chunk(a.astype(jnp.float32), skip, *(padded(each, size) for each in (x, steps, b, c)))
    out, pool = walk(pool, segments, singles, num_tokens, size, compute)
    return out.astype(x.dtype), pool


def _chunk(a: jax.Array, skip: jax.Array, xs: jax.Array, dts: jax.Array, bs: jax.Array, cs: jax.Array) -> Compute:
    """Returns the computation of one chunk."""
    groups = bs.shape[1]

    def compute(state: jax.Array, begin: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, dt, b, c = (cut_masked(each, begin, mask) for each in (xs, dts, bs, cs))
        size, heads, dim = x.shape
        total = jnp.cumsum(dt.T * a[:, None], axis=1)  # [H, C]
        lower = jnp.tril(jnp.ones((size, size), bool))
        between = jnp.exp(jnp.where(lower, total[:, :, None] - total[:, None], -jnp.inf))
        scores = jnp.repeat(jnp.einsum("ign,jgn->gij", c, b, precision=HIGHEST), heads // groups, axis=0)
        steps = x * dt[..., None]
        out = jnp.einsum("hij,jhp->ihp", scores * between, steps, precision=HIGHEST)
        by_group = state.reshape(groups, -1, *state.shape[1:])  # [G, H / G, P, N]
        read = jnp.einsum("ign,gmpn->igmp", c, by_group, precision=HIGHEST).reshape(size, heads, dim)
        out = out + read * jnp.exp(total).T[..., None] + x * skip[:, None]
        left = (steps * jnp.exp(total[:, -1:] - total).T[..., None]).reshape(size, groups, -1, dim)
        added = jnp.einsum("igmp,ign->gmpn", left, b, precision=HIGHEST).reshape(state.shape)
        return out, state * jnp.exp(total[:, -1])[:, None, None] + added

    return compute


def _kernel_unsupported_reason(*operands: Any, **options: Any) -> str | None:
    return recurrent.unsupported_reason(*operands[:5])


registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=_kernel_unsupported_reason)(recurrent.state_space)
registry.register_module(OP, "tpu", "model_adapters.ops.tpu.state_space")
registry.register_module(OP, "gpu", "model_adapters.ops.gpu")
spmd.leave_to_partitioner(OP, reference)
spmd.shard_states_by_heads(
    OP,
    (
        *(spmd.BY_AXIS_1,) * 2,  # x, dt
        spmd.BY_AXIS_0,  # a
        *(spmd.BY_AXIS_1,) * 2,  # b, c
        *(spmd.BY_AXIS_0,) * 2,  # d, dt_bias
        spmd.BY_AXIS_1,
    ),
    grouped=(3, 4),
)
