"""Linear recurrence of each channel over a packed row: RecurrentGemma.

It is that of the RG-LRU (De et al., 2024, arXiv 2402.19427). A state is ``[D]``::

    state = gate * state + x
    out = state
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.ops import registry, spmd
from model_adapters.ops.cpu import recurrent
from model_adapters.ops.kv_pool import expect
from model_adapters.ops.segments import Segments
from model_adapters.ops.state_pool import check_pool, last_writes, read_states, with_last_row, write_states

OP = "linear_recurrence"


def linear_recurrence(
    gates: jax.Array, x: jax.Array, pool: jax.Array, segments: Segments
) -> tuple[jax.Array, jax.Array]:
    """Returns the states behind each token, ``[T, D]`` in x's dtype, and the pool.

    Args:
        gates: ``[T, D]``.
        x: ``[T, D]``.
        pool: ``float32[rows, D]``; updated in place if donated.
        segments: Of the T tokens.

    Raises:
        InvalidArgumentError: shapes that do not fit together.
    """
    expect(OP, "gates of shape", x.shape, gates.shape)
    check_pool(OP, pool, x.shape[1:], segments)
    out: tuple[jax.Array, jax.Array] = registry.call(OP, gates, x, pool, segments)
    return out


def begins_of(segments: Segments) -> jax.Array:
    """Returns which segments are the first of their sequence that has tokens, bool[R]."""
    number = jnp.arange(len(segments.read))
    return (jnp.argmax(segments.is_same_sequence, axis=1) == number) & (segments.lens > 0)


@registry.define(OP, "linear recurrence of channels over packed sequences, states by row of a pool")
@with_last_row
def reference(gates: jax.Array, x: jax.Array, pool: jax.Array, segments: Segments) -> tuple[jax.Array, jax.Array]:
    """Combines tokens by an associative scan over the row, which begins anew at each sequence."""
    num_tokens, num_segments = x.shape[0], len(segments.read)
    is_padding = (segments.of_token(num_tokens) == num_segments)[:, None]
    decays, sums = (jnp.where(is_padding, 0, each.astype(jnp.float32)) for each in (gates, x))
    begins = begins_of(segments)
    first = jnp.where(begins, segments.cu[:-1], num_tokens)
    rows = jnp.where(begins, segments.read, pool.shape[0] - 1)
    before = read_states(pool, rows, segments.held & begins)
    inside = jnp.minimum(first, num_tokens - 1)
    sums = sums.at[first].set(sums[inside] + decays[inside] * before, mode="drop")
    is_first = jnp.zeros((num_tokens, 1), bool).at[first].set(True, mode="drop") | is_padding

    def combine(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # What is in front of a sequence is not multiplied by zero: it may be NaN.
        was_reset, decay, total = left
        is_reset, next_decay, next_total = right
        total = jnp.where(is_reset, next_total, next_decay * total + next_total)
        return was_reset | is_reset, jnp.where(is_reset, next_decay, decay * next_decay), total

    _, _, out = jax.lax.associative_scan(combine, (is_first, decays, sums))
    last = out[jnp.clip(segments.cu[1:] - 1, 0, num_tokens - 1)]
    return out.astype(x.dtype), write_states(pool, last_writes(segments, pool), last)


def _kernel_unsupported_reason(*operands: Any, **options: Any) -> str | None:
    return recurrent.unsupported_reason(*operands[:2])


registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=_kernel_unsupported_reason)(recurrent.linear_recurrence)
registry.register_module(OP, "tpu", "model_adapters.ops.tpu.linear_recurrence")
spmd.leave_to_partitioner(OP, reference)
spmd.shard_states_by_heads(OP, (spmd.BY_AXIS_1,) * 3, grouped=())
