"""Depthwise causal convolutions over a packed row, of recurrent layers and of LFM2.

XLA's own grouped convolution takes twenty times as long on a CPU as a sum over the few taps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

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
    num_tokens, num_old = len(x), weight.shape[1] - 1
    inputs = _Inputs.of(x, num_old, pool, segments)

    def summed(taps: Iterable[jax.Array]) -> jax.Array:
        out = jnp.zeros((), jnp.float32)
        for back, tap in enumerate(taps):
            out = out + tap.astype(jnp.float32) * weight[:, -1 - back].astype(jnp.float32)
        return (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)

    is_used, pool = inputs.is_used[:, None], inputs.pool
    if num_tokens <= num_old * len(segments.read):
        return jnp.where(is_used, summed(inputs.taps(x)), 0), pool
    # A gather of all tokens for each tap takes several times as long as the sum. So the taps are the row itself, moved,
    # and the first tokens of each sequence, which would see those in front of it, are computed once more.
    row = jnp.pad(x, ((num_old, 0), (0, 0)))
    out = jnp.where(is_used, summed(row[num_old - back :][:num_tokens] for back in range(num_old + 1)), 0)
    first = inputs.begin[:, None] + jnp.arange(num_old)
    inside = jnp.minimum(first, num_tokens - 1)
    with_before = jnp.concatenate([inputs.before, x[inside]], axis=1)
    made = summed(with_before[:, num_old - back : 2 * num_old - back] for back in range(num_old + 1))
    has_begin = (segments.lens > 0)[:, None] & (inputs.begin[inputs.segment[inside]] == inputs.begin[:, None])
    place = jnp.where(has_begin & (first < segments.cu[-1]), first, num_tokens)
    return out.at[place].set(made, mode="drop"), pool


@with_last_row
def _windows(x: jax.Array, width: int, pool: jax.Array, segments: Segments) -> tuple[jax.Array, jax.Array]:
    inputs = _Inputs.of(x, width - 1, pool, segments)
    windows = jnp.stack(list(inputs.taps(x))[::-1], axis=1)
    return jnp.where(inputs.is_used[:, None, None], windows, 0), inputs.pool


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


class _Inputs(NamedTuple):
    """What the tokens of a row have in front of them.

    Attributes:
        segment: int32[T], of each token; any for padding.
        is_used: bool[T], whether it is no padding.
        begin: int32[R], first token of the sequence of each segment with tokens.
        before: ``[R, K - 1, D]``, what is in front of that.
        pool: The new one.
    """

    segment: jax.Array
    is_used: jax.Array
    begin: jax.Array
    before: jax.Array
    pool: jax.Array

    @classmethod
    def of(cls, x: jax.Array, num_old: int, pool: jax.Array, segments: Segments) -> _Inputs:
        """Returns those of ``x[T, D]``, `num_old` for each sequence."""
        num_tokens, num_segments = len(x), len(segments.read)
        of_token = segments.of_token(num_tokens)
        first = jnp.argmax(segments.is_same_sequence, axis=1)  # of those with tokens
        begin = segments.cu[first]
        before = read_states(pool, segments.read[first], segments.held[first])
        # [R, K - 1], the last inputs' places within the sequence
        places = (segments.cu[1:] - begin)[:, None] - num_old + jnp.arange(num_old)
        new = x[jnp.clip(begin[:, None] + places, 0, num_tokens - 1)]
        old = jnp.take_along_axis(before, jnp.clip(places + num_old, 0, num_old - 1)[..., None], axis=1)
        last = jnp.where((places >= 0)[..., None], new, old)
        pool = _written(pool, last_writes(segments, pool), last)
        return cls(jnp.minimum(of_token, num_segments - 1), of_token < num_segments, begin, before, pool)

    def taps(self, x: jax.Array) -> Iterator[jax.Array]:
        """Returns inputs ``[T, D]`` 0, 1, ... tokens back."""
        token, num_old = jnp.arange(len(x), dtype=jnp.int32), self.before.shape[1]
        place = token - self.begin[self.segment]
        for back in range(num_old + 1):
            old = self.before[self.segment, jnp.clip(num_old + place - back, 0, num_old - 1)]
            yield jnp.where((place >= back)[:, None], x[jnp.maximum(token - back, 0)], old)


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
