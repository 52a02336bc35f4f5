"""Depthwise causal convolutions over a packed row, of recurrent layers and of LFM2.

XLA's own grouped convolution takes twenty times as long on a CPU as a sum over the few taps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.ops import registry, spmd
from model_adapters.ops.cpu import recurrent
from model_adapters.ops.kv_pool import expect
from model_adapters.ops.segments import Segments
from model_adapters.ops.state_pool import check_pool, last_writes, read_states, with_last_row, write_states

OP = "causal_convolution"


def causal_convolution(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, pool: jax.Array, segments: Segments
) -> tuple[jax.Array, jax.Array]:
    """Returns the convolution of each channel, ``[T, D]`` in x's dtype, and the pool.

    Sums are in float32; no activation is applied.

    Args:
        x: ``[T, D]``.
        weight: ``[D, K]``, its last column that of the newest input; K at least 2.
        bias: ``[D]`` or None.
        pool: ``[rows, K - 1, D]`` of x's dtype, the last inputs of each sequence; updated in place if donated.
        segments: Of the T tokens.

    Raises:
        InvalidArgumentError: shapes or dtypes that do not fit together.
    """
    channels, width = weight.shape
    expect(OP, "x of shape", (x.shape[0], channels), x.shape)
    expect(OP, "more than one column of weight,", True, width > 1)
    if bias is not None:
        expect(OP, "bias of shape", (channels,), bias.shape)
    check_pool(OP, pool, (width - 1, channels), segments, x.dtype)
    out: tuple[jax.Array, jax.Array] = registry.call(OP, x, weight, bias, pool, segments)
    return out


@registry.define(OP, "depthwise causal convolution over packed sequences, last inputs by row of a pool")
@with_last_row
def reference(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, pool: jax.Array, segments: Segments
) -> tuple[jax.Array, jax.Array]:
    """Sums the taps: tokens of the row, and in front of them what the first segment reads."""
    taps, pool, is_used = _taps(x, weight.shape[1], pool, segments)
    out = jnp.zeros(x.shape, jnp.float32)
    for back, tap in enumerate(taps):
        out = out + tap.astype(jnp.float32) * weight[:, -1 - back].astype(jnp.float32)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return jnp.where(is_used[:, None], out, 0).astype(x.dtype), pool


@with_last_row
def _windows(x: jax.Array, width: int, pool: jax.Array, segments: Segments) -> tuple[jax.Array, jax.Array]:
    taps, pool, is_used = _taps(x, width, pool, segments)
    return jnp.where(is_used[:, None, None], jnp.stack(list(taps)[::-1], axis=1), 0), pool


def causal_windows(x: jax.Array, width: int, pool: jax.Array, segments: Segments) -> tuple[jax.Array, jax.Array]:
    """Returns the last `width` inputs of each token, ``[T, width, D]``, and the pool.

    The last of them is its own; zeros stand in front of a sequence. It is JAX's own operations on every platform, for
    convolutions whose weights each token has by itself. `width` is at least 2; for the others see `causal_convolution`.

    Raises:
        InvalidArgumentError: shapes or dtypes that do not fit together.
    """
    expect("causal_windows", "a width above one,", True, width > 1)
    check_pool("causal_windows", pool, (width - 1, x.shape[1]), segments, x.dtype)
    return _windows(x, width, pool, segments)


def _taps(
    x: jax.Array, width: int, pool: jax.Array, segments: Segments
) -> tuple[Iterator[jax.Array], jax.Array, jax.Array]:
    """Returns inputs ``[T, D]`` 0, 1, ... tokens back, the new pool, and used tokens bool[T]."""
    num_tokens, num_old, num_segments = len(x), width - 1, len(segments.read)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    of_token = segments.of_token(num_tokens)
    segment = jnp.minimum(of_token, num_segments - 1)
    first = jnp.argmax(segments.is_same_sequence, axis=1)  # of those with tokens
    begin = segments.cu[first]
    before = read_states(pool, segments.read[first], segments.held[first])  # [R, K - 1, D]
    place = token - begin[segment]

    def tap(back: int) -> jax.Array:
        old = before[segment, jnp.clip(num_old + place - back, 0, num_old - 1)]
        return jnp.where((place >= back)[:, None], x[jnp.maximum(token - back, 0)], old)

    places = (segments.cu[1:] - begin)[:, None] - num_old + jnp.arange(num_old)  # [R, K - 1], within the sequence
    new = x[jnp.clip(begin[:, None] + places, 0, num_tokens - 1)]
    old = jnp.take_along_axis(before, jnp.clip(places + num_old, 0, num_old - 1)[..., None], axis=1)
    last = jnp.where((places >= 0)[..., None], new, old)
    return map(tap, range(width)), _written(pool, last_writes(segments, pool), last), of_token < num_segments


def _written(pool: jax.Array, rows: jax.Array, last: jax.Array) -> jax.Array:
    """Returns the pool with ``last[R, K - 1, D]`` as its rows.

    XLA's CPU backend scatters narrow floats in float32, converting all of the pool and back; as integers it does not.
    """
    dtype = pool.dtype
    if registry.platform() != "cpu" or dtype == jnp.float32:
        return write_states(pool, rows, last)
    bits = (jax.lax.bitcast_convert_type(each, jnp.uint16) for each in (pool, last))
    pool, last = bits
    return jax.lax.bitcast_convert_type(write_states(pool, rows, last), dtype)


def _kernel_unsupported_reason(*operands: Any, **options: Any) -> str | None:
    return recurrent.unsupported_reason(*operands[:2])


registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=_kernel_unsupported_reason)(recurrent.causal_convolution)
spmd.leave_to_partitioner(OP, reference)
