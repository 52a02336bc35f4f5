"""The linear recurrence of channels on TPUs: a kernel that goes through the tokens once.

XLA's associative scan goes through all of them again for each power of two below their number. States are a thousandth
of that, and XLA reads and writes their rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from model_adapters.ops import registry
from model_adapters.ops.linear_recurrence import OP, begins_of
from model_adapters.ops.segments import Segments
from model_adapters.ops.state_pool import last_writes, read_states, write_states
from model_adapters.ops.tpu import state_scans
from model_adapters.ops.tpu.launch import NAME
from model_adapters.ops.tpu.page_buffers import SUBLANES
from model_adapters.ops.tpu.state_chunks import NO_ROW


def _tile(
    vectors: list[jax.Array],
    shared: list[jax.Array],
    column: state_scans.Columns,
    used: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes the tokens of a tile, eight at once; see `run_scan`."""
    gates, sums = jnp.where(used, vectors[0], 1.0), jnp.where(used, vectors[1], 0.0)
    row = lax.broadcasted_iota(jnp.int32, (SUBLANES, gates.shape[1]), 0)
    made = []
    for begin in range(0, len(gates), SUBLANES):
        gate, total = gates[begin : begin + SUBLANES], sums[begin : begin + SUBLANES]
        distance = 1
        while distance < SUBLANES:
            has_before = row >= distance
            total = jnp.where(has_before, total + gate * pltpu.roll(total, distance, 0), total)
            gate = jnp.where(has_before, gate * pltpu.roll(gate, distance, 0), gate)
            distance *= 2
        made.append(total + gate * state)
        state = made[-1][SUBLANES - 1 :]
    return jnp.concatenate(made), state


def _unsupported_reason(gates: jax.Array, x: jax.Array, pool: jax.Array, segments: Segments) -> str | None:
    return "no tokens" if not len(x) else state_scans.unsupported_reason(*x.shape)


@registry.register(OP, NAME, ("tpu",), unsupported_reason=_unsupported_reason)
def linear_recurrence(
    gates: jax.Array, x: jax.Array, pool: jax.Array, segments: Segments
) -> tuple[jax.Array, jax.Array]:
    """Computes all tokens by one kernel, on states that XLA gathers and scatters."""
    number, begins = jnp.arange(len(segments.read), dtype=jnp.int32), begins_of(segments)
    rows = jnp.where(begins, segments.read, len(pool) - 1)
    states = read_states(pool, rows, segments.held & begins)[:, None, None]
    out, states = state_scans.run_scan(
        "linear_recurrence_tokens",
        _tile,
        [gates, x],
        [],
        None,
        states,
        segments,
        jnp.where(begins, number, NO_ROW),
        number,
        segments.lens == 0,
        x.dtype,
    )
    return out, write_states(pool, last_writes(segments, pool), states[:, 0, 0])
