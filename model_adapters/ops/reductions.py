"""Sums over the last dimension, and what is made of them: means, layer norms, softmax.

XLA on a CPU adds a row up in an order that depends on how many rows there are, so that a token's norm, and in the end
the token chosen, would depend on what else is in the batch. The C++ sum has one order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from model_adapters.ops import registry, spmd
from model_adapters.ops.cpu import ffi
from model_adapters.ops.linear import accumulator

OP = "row_sum"


def row_sum(x: jax.Array) -> jax.Array:
    """Sums of ``x[..., n]`` over the last dimension, shape ``[...]``, in float32 where x has fewer bits."""
    out: jax.Array = registry.call(OP, x)
    return out


def layer_norm(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``torch.nn.functional.layer_norm`` over the last dimension, with means and reciprocal deviations [..., 1]."""
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
    """``torch.softmax`` over the last dimension, in x's dtype."""
    wide = x.astype(accumulator(x.dtype))
    powers = jnp.exp(wide - jax.lax.stop_gradient(jnp.max(wide, -1, keepdims=True)))
    return (powers / row_sum(powers)[..., None]).astype(x.dtype)


@registry.define(OP, "sums over the last dimension")
def reference(x: jax.Array) -> jax.Array:
    """XLA's own sum. Dimensions before the last stay apart: one of them may be divided among devices."""
    return jnp.sum(x.astype(accumulator(x.dtype)), -1)


@registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=ffi.unsupported_reason)
def fixed_order(x: jax.Array) -> jax.Array:
    """The C++ sum, in one order."""
    out: jax.Array = _differentiable(x.reshape(-1, x.shape[-1]))
    return out.reshape(x.shape[:-1])


_differentiable = ffi.differentiable(ffi.row_sum, reference)


spmd.leave_to_partitioner(OP, reference)
