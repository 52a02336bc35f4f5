"""The gated delta rule (Yang et al., 2024) over a packed row: Qwen3-Next, OLMo hybrid.

With a decay for each column of keys it is Kimi Delta Attention (Kimi Team, 2025). A state is ``[K, V]`` for each head::

    state = exp(g) * state
    state = state + k (v - k state) * beta
    out = q state
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

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

OP = "gated_delta_rule"
CHUNK_LEN = 64
CHANNEL_CHUNK_LEN = 16
"""Of decays by column, whose differences are ``[C, C, K]``."""


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
    """Returns what queries read of the states, ``[T, H, V]`` in v's dtype, and the pool.

    Args:
        q: ``[T, Hk, K]``, scaled here by ``K ** -0.5``; head h of the values has head ``h // (H // Hk)``.
        k: ``[T, Hk, K]``.
        v: ``[T, H, V]``.
        g: Logarithm of the decay, ``[T, H]``, or ``[T, H, K]`` for one of each column of keys.
        beta: ``[T, H]``.
        pool: ``float32[rows, H, K, V]``; updated in place if donated.
        segments: Of the T tokens.
        is_normed: Divide queries and keys by their lengths.

    Raises:
        InvalidArgumentError: shapes that do not fit together.
    """
    num_tokens, heads, value_dim = v.shape
    key_heads, dim = k.shape[1:]
    expect(OP, "q of shape", (num_tokens, key_heads, dim), q.shape)
    expect(OP, "k of as many tokens as v,", num_tokens, k.shape[0])
    expect(OP, f"heads of v a multiple of those of k, {key_heads}, remainder", 0, heads % key_heads)
    expect(OP, "g of shape", (num_tokens, heads, dim)[: g.ndim], g.shape)
    expect(OP, "beta of shape", (num_tokens, heads), beta.shape)
    check_pool(OP, pool, (heads, dim, value_dim), segments)
    out: tuple[jax.Array, jax.Array] = registry.call(OP, q, k, v, g, beta, pool, segments, is_normed=is_normed)
    return out


def unit(x: jax.Array) -> jax.Array:
    """Returns vectors ``[..., K]`` divided by their lengths."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def prepared(q: jax.Array, k: jax.Array, heads: int, is_normed: bool) -> tuple[jax.Array, jax.Array]:
    """Returns queries, scaled, and keys of all heads, ``float32[..., H, K]``."""
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    if is_normed:
        q, k = unit(q), unit(k)
    repeats = heads // k.shape[-2]
    return jnp.repeat(q * q.shape[-1] ** -0.5, repeats, axis=-2), jnp.repeat(k, repeats, axis=-2)


def _step(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns results ``[R, H, V]`` and states ``[R, H, K, V]`` behind one token each."""
    state = state * jnp.exp(g.reshape(*g.shape, *(1,) * (4 - g.ndim)))
    known = jnp.einsum("shkv,shk->shv", state, k, precision=HIGHEST)
    state = state + k[..., None] * ((v - known) * beta[..., None])[..., None, :]
    return jnp.einsum("shkv,shk->shv", state, q, precision=HIGHEST), state


@registry.define(OP, "gated delta rule over packed sequences, states by row of a pool")
@with_last_row
def reference(
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
    """Computes single tokens in one batch, the others in chunks (Yang et al., section 3.3)."""
    first = first_tokens(segments, v.shape[0])
    arrays = [*prepared(q[first], k[first], v.shape[1], is_normed), *(x[first] for x in (v, g, beta))]
    read, write = single_rows(segments, pool)
    states = read_states(pool, read, segments.held)
    singles, states = _step(states, *(x.astype(jnp.float32) for x in arrays))
    pool = write_states(pool, write, states)
    return chunked(q, k, v, g, beta, pool, segments, singles, is_normed=is_normed)


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    segments: Segments,
    singles: jax.Array,
    *,
    is_normed: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns results ``[T, H, V]`` and the pool, with those of single tokens as they are given.

    `singles` are ``float32[R, H, V]``, by segment.
    """
    num_tokens, dtype = v.shape[0], v.dtype
    q, k = prepared(q, k, v.shape[1], is_normed)
    arrays = [q, k, *(x.astype(jnp.float32) for x in (v, g, beta))]
    size = min(CHUNK_LEN if g.ndim == 2 else CHANNEL_CHUNK_LEN, num_tokens)
    compute = _chunk([padded(x, size) for x in arrays], size)
    out, pool = walk(pool, segments, singles, num_tokens, size, compute)
    return out.astype(dtype), pool


def _chunk(arrays: Sequence[jax.Array], size: int) -> Compute:
    """Returns the computation of one chunk of q, k, v, g, beta."""
    strict = jnp.tril(jnp.ones((size, size), bool), -1)
    lower = jnp.tril(jnp.ones((size, size), bool))

    def products(q: jax.Array, k: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys and queries i times keys j as they have decayed until i, [H, C, C] each."""
        gap = jnp.where(
            lower.reshape(1, size, size, *(1,) * (total.ndim - 2)), total[:, :, None] - total[:, None], -jnp.inf
        )
        between = jnp.exp(gap)
        if total.ndim == 2:
            pairs = (jnp.einsum("hik,hjk->hij", x, k, precision=HIGHEST) * between for x in (k, q))
        else:
            decayed = k[:, None] * between
            pairs = (jnp.einsum("hik,hijk->hij", x, decayed, precision=HIGHEST) for x in (k, q))
        of_keys, of_queries = pairs
        return of_keys, of_queries

    def compute(state: jax.Array, begin: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = (jnp.moveaxis(cut_masked(x, begin, mask), 1, 0) for x in arrays)  # [H, C, ...]
        beta, total = beta[..., None], jnp.cumsum(g, axis=1)
        of_keys, of_queries = products(q, k, total)
        since = total if total.ndim == 3 else total[..., None]  # [H, C, K or 1]
        right = jnp.concatenate([v * beta, k * beta * jnp.exp(since)], axis=-1)
        system = jnp.where(strict, of_keys, 0) * beta + jnp.eye(size)
        solved = solve_triangular(system, right, lower=True, unit_diagonal=True)
        new, read = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
        new = new - jnp.einsum("hck,hkv->hcv", read, state, precision=HIGHEST)
        out = jnp.einsum("hck,hkv->hcv", q * jnp.exp(since), state, precision=HIGHEST)
        out = out + jnp.einsum("hij,hjv->hiv", of_queries, new, precision=HIGHEST)
        left = k * jnp.exp(since[:, -1:] - since)
        state = state * jnp.exp(since[:, -1])[..., None]
        return jnp.moveaxis(out, 0, 1), state + jnp.einsum("hck,hcv->hkv", left, new, precision=HIGHEST)

    return compute


def _kernel_unsupported_reason(*operands: Any, **options: Any) -> str | None:
    return recurrent.unsupported_reason(*operands[:5])


registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=_kernel_unsupported_reason)(recurrent.gated_delta_rule)
registry.register_module(OP, "tpu", "model_adapters.ops.tpu.gated_delta_rule")
registry.register_module(OP, "gpu", "model_adapters.ops.gpu")
spmd.leave_to_partitioner(OP, reference)
spmd.shard_states_by_heads(OP, (spmd.BY_AXIS_1,) * 6, grouped=(0, 1))
