"""Sums over the last axis, and layer norm and softmax that use them.

XLA on a CPU sums a row in an order that depends on the number of rows, so that a token's norm, and at last the sampled
token, would depend on what else is in the batch. The C++ sum has one order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model_adapters.ops import registry, spmd
from model_adapters.ops.cpu import ffi
from model_adapters.ops.linear import accumulator

OP = "row_sum"


def row_sum(x: jax.Array) -> jax.Array:
    """Returns sums of ``x[..., n]`` over the last axis, shape ``[...]``, at least in float32."""
    out: jax.Array = registry.call(OP, x)
    return out


def layer_norm(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the layer norm of ``x[..., n]`` over the last axis, as torch has it.

    Args:
        x: float[..., n].
        weight: float[n] or None.
        bias: float[n] or None.
        eps: Added to the variance.

    Returns:
        The output [..., n] in x's dtype, means [..., 1] and reciprocal standard deviations [..., 1].
    """
    wide = x.astype(accumulator(x.dtype))
    mean = row_sum(wide)[..., None] / x.shape[-1]
    centred = wide - mean
    scale = jax.lax.rsqrt(row_sum(centred * centred)[..., None] / x.shape[-1] + eps)
    out = centred * scale
    if weight is not None:
        out = out * weight.astype(out.dtype)
    if bias is not None:
        out = out + bias.astype(out.dtype)
    return out.astype(x.dtype), mean, scale


def softmax(x: jax.Array) -> jax.Array:
    """Returns ``torch.softmax`` of ``x[..., n]`` over the last axis, in x's dtype."""
    wide = x.astype(accumulator(x.dtype))
    powers = jnp.exp(wide - jax.lax.stop_gradient(jnp.max(wide, -1, keepdims=True)))
    return (powers / row_sum(powers)[..., None]).astype(x.dtype)


@registry.define(OP, "sums over the last dimension")
def reference(x: jax.Array) -> jax.Array:
    """Computes XLA's own sum. No axes are merged: one of them may be divided among devices."""
    return jnp.sum(x.astype(accumulator(x.dtype)), -1)


@registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=ffi.unsupported_reason)
def fixed_order(x: jax.Array) -> jax.Array:
    """Computes the C++ sum, in one order."""
    out: jax.Array = _differentiable(x.reshape(-1, x.shape[-1]))
    return out.reshape(x.shape[:-1])


_differentiable = ffi.differentiable(ffi.row_sum, reference)


spmd.leave_to_partitioner(OP, reference)
