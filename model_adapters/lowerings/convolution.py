"""Lowering of convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from model_adapters.ops.linear import accumulator, precision

MAX_TAPS = 16  # of a convolution of each channel by itself that is computed as a sum of products


def _convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    """Computes ``torch.convolution``, summed in float32.

    Args:
        x: ``[batch, in, ...]``, or without the batch.
        weight: ``[out, in / groups, ...]``; transposed ``[in, out / groups, ...]``.
        bias: ``[out]`` or None.
        stride, padding, dilation, output_padding: By axis of space, or one for all.
        transposed: Whether `x` is dilated in place of being strided over.
        groups: Number of groups of channels.
    """
    num_axes = weight.ndim - 2
    batch = x.shape[: x.ndim - num_axes - 1]
    x = x.reshape(-1, *x.shape[len(batch) :])
    strides, pads, dilations, extra = (
        tuple(each) * num_axes if len(each) == 1 else tuple(each)
        for each in (stride, padding, dilation, output_padding)
    )
    sizes = weight.shape[2:]
    if transposed:
        weight = _turned(weight, groups)
        reach = [d * (size - 1) for d, size in zip(dilations, sizes, strict=True)]
        room = [(r - p, r - p + e) for r, p, e in zip(reach, pads, extra, strict=True)]
        window, spread = (1,) * num_axes, strides
    else:
        room, window, spread = [(p, p) for p in pads], strides, (1,) * num_axes
    if groups == weight.shape[0] == x.shape[1] and not transposed and math.prod(sizes) <= MAX_TAPS and num_axes == 1:
        sums = _by_channel(x, weight, window[0], room[0], dilations[0])
    else:
        sums = jax.lax.conv_general_dilated(
            x,
            weight,
            window,
            room,
            lhs_dilation=spread,
            rhs_dilation=dilations,
            feature_group_count=groups,
            precision=precision(x.dtype),
            preferred_element_type=accumulator(x.dtype),
        )
    if bias is not None:
        sums = sums + bias.astype(sums.dtype).reshape(-1, *(1,) * num_axes)
    return sums.astype(x.dtype).reshape(*batch, *sums.shape[1:])


def _turned(weight: jax.Array, groups: int) -> jax.Array:
    """Returns the weight ``[in, out / groups, ...]`` as that of a convolution forwards."""
    num_in, num_out, *sizes = weight.shape
    parts = jnp.swapaxes(weight.reshape(groups, num_in // groups, num_out, *sizes), 1, 2)
    return jnp.flip(parts.reshape(groups * num_out, num_in // groups, *sizes), range(2, weight.ndim))


def _by_channel(x: jax.Array, weight: jax.Array, stride: int, room: tuple[int, int], dilation: int) -> jax.Array:
    """Returns ``x[B, C, L]``, each channel convolved with its own ``weight[C, 1, taps]``.

    A sum of products over the taps: XLA's grouped convolution takes 20 to 30 times as long on a CPU.
    """
    wide = accumulator(x.dtype)
    x = jnp.pad(x, ((0, 0), (0, 0), room))
    num_taps = weight.shape[2]
    length = (x.shape[2] - dilation * (num_taps - 1) - 1) // stride + 1
    taps = [
        jax.lax.slice_in_dim(x, i * dilation, i * dilation + stride * (length - 1) + 1, stride, axis=2).astype(wide)
        * weight[:, :, i].astype(wide)
        for i in range(num_taps)
    ]
    return sum(taps[1:], taps[0])


def _conv2d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> jax.Array:
    """Computes ``torch.conv2d`` of ``x[batch, in, height, width]``."""
    return _convolution(x, weight, bias, stride, padding, dilation, False, (0,), groups)
