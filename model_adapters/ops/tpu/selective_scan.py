"""Mamba's selective scan on TPUs: a kernel of single tokens, and one of the others.

The method is the recurrence of Gu and Dao (2023), section 3.2, token by token: decays differ for each number of a
state, so that no product of matrices has them. A state ``[D, N]`` is taken as ``[N, D]``, which is how XLA lays out few
columns: inputs and steps multiply it as rows, B and C as columns, and results are sums over rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.ops import registry
from model_adapters.ops.segments import Segments
from model_adapters.ops.selective_scan import OP
from model_adapters.ops.state_pool import first_tokens
from model_adapters.ops.tpu import state_scans, state_steps
from model_adapters.ops.tpu.launch import LOG2_E, NAME
from model_adapters.ops.tpu.page_buffers import SUBLANES
from model_adapters.ops.tpu.state_chunks import NEW, NO_ROW
from model_adapters.ops.tpu.state_scans import Channels
from model_adapters.ops.tpu.state_steps import Columns, spread


def _update(j: Any, operands: Sequence[Any], out: Any, block: Any, *, channels: Channels, groups: int) -> None:
    """Computes a state; see `run_steps`."""
    columns, vectors, a = operands[0][0, j], *operands[1:]
    spreads = [spread(columns, number, channels.part) for number in range(2 * groups)]
    for begin in range(0, channels.num, channels.part):
        at, group = slice(begin, begin + channels.part), begin // channels.group
        dt, step = vectors[0, 0:1, at], vectors[0, 1:2, at]
        state = jnp.exp2(a[:, at] * dt) * block[0, :, at] + step * spreads[group]
        block[0, :, at] = state
        out[0, :, at] = jnp.sum(state * spreads[groups + group], axis=0, keepdims=True)


def _tile(
    vectors: list[jax.Array],
    shared: list[jax.Array],
    column: state_scans.Columns,
    used: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes the tokens of a tile; see `run_scan`."""
    (x, dt), (a, skip) = vectors, shared
    step, dt = jnp.where(used, dt * x, 0.0), jnp.where(used, dt, 0.0)
    made, sums = [], []
    for token in range(len(x)):
        state = jnp.exp2(a * dt[token : token + 1]) * state + step[token : token + 1] * column(0, token)
        made.append(state * column(1, token))
        if len(made) == SUBLANES:
            sums.append(state_scans.sums_over_rows(made))
            made = []
    return jnp.concatenate(sums) + x * skip, state


def _unsupported_reason(*operands: Any) -> str | None:
    (num_tokens, num_channels), groups, (pool, segments) = operands[0].shape, operands[3].shape[1], operands[6:8]
    if not num_tokens:
        return "no tokens"
    if reason := state_scans.unsupported_reason(num_tokens, num_channels, groups):
        return reason
    num_rows, _, states = pool.shape
    laid_out: Any = jax.ShapeDtypeStruct((num_rows, 1, states, num_channels), pool.dtype)
    return state_steps.unsupported_reason(laid_out, segments)


@registry.register(OP, NAME, ("tpu",), unsupported_reason=_unsupported_reason)
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
    """Computes single tokens by one kernel and the other ones by another, in place."""
    num_tokens, groups, num_rows = x.shape[0], b.shape[1], len(pool)
    first, channels = first_tokens(segments, num_tokens), Channels.of(x.shape[1], groups)
    assert channels is not None
    a = a.astype(jnp.float32).T * LOG2_E
    skip = jnp.zeros(x.shape[1]) if d is None else d.astype(jnp.float32)
    columns = jnp.stack([b, c], axis=1).astype(jnp.float32)  # [T, 2, G, N]
    states = jnp.swapaxes(pool, 1, 2)[:, None]
    x_first, dt_first = x[first].astype(jnp.float32), dt[first].astype(jnp.float32)
    by_segment = columns[first].reshape(len(first), 1, 2 * groups, -1)
    operands = [Columns(2 * groups, 1).laid_out(by_segment), jnp.stack([dt_first, dt_first * x_first], axis=1)]
    update = functools.partial(_update, channels=channels, groups=groups)
    shape = (1, x.shape[1])
    singles, states = state_steps.run_steps(
        "selective_scan_step", update, operands, shape, states, segments, 1, shared=[a]
    )
    singles = singles[:, 0] + x_first * skip
    kept = segments.write < num_rows - segments.drops_last
    out, states = state_scans.run_scan(
        "selective_scan_tokens",
        _tile,
        [x, dt],
        [a, skip[None]],
        columns,
        states,
        segments,
        jnp.where(segments.held, segments.read, NEW),
        jnp.where(kept, segments.write, NO_ROW),
        segments.is_single,
        x.dtype,
    )
    place = jnp.where(segments.is_single, segments.cu[:-1], num_tokens)
    return out.at[place].set(singles.astype(x.dtype), mode="drop"), jnp.swapaxes(states[:, 0], 1, 2)
