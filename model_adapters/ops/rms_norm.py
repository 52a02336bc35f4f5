"""RMSNorm (Zhang and Sennrich, 2019) over the last axis.

Model code writes a norm as six operations. XLA on a CPU makes three loops of them, which for the few rows of a decode
step take several times as long as the C++ loop.
"""

from __future__ import annotations

from functools import partial

import jax

from model_adapters.ops import registry, spmd
from model_adapters.ops.cpu import ffi
from model_adapters.ops.linear import accumulator
from model_adapters.ops.reductions import row_sum

OP = "rms_norm"


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, *, rounds_first: bool) -> jax.Array:
    """Returns ``x / sqrt(mean(x**2) + eps) * weight`` in x's dtype, summed in float32.

    Args:
        x: float[..., n].
        weight: [n], of x's dtype or float32.
        eps: Added to the mean of squares.
        rounds_first: Round the quotient to x's dtype before the multiplication, as Llama does; else after it.
    """
    out: jax.Array = registry.call(OP, x, weight, eps=eps, rounds_first=rounds_first)
    return out


@registry.define(OP, "root-mean-square norm over the last dimension")
def reference(x: jax.Array, weight: jax.Array, *, eps: float, rounds_first: bool) -> jax.Array:
    """Computes with XLA's own operations."""
    wide = x.astype(accumulator(x.dtype))
    normed = wide * jax.lax.rsqrt(row_sum(wide * wide)[..., None] / x.shape[-1] + eps)
    if rounds_first:
        normed = normed.astype(x.dtype)
    return (normed.astype(wide.dtype) * weight.astype(wide.dtype)).astype(x.dtype)


def _kernel_unsupported_reason(x: jax.Array, weight: jax.Array, *, eps: float, rounds_first: bool) -> str | None:
    if weight.dtype not in (x.dtype, "float32"):
        return f"weight is {weight.dtype}; the kernel has float32 and x's dtype, {x.dtype}"
    return ffi.unsupported_reason(x)


@registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=_kernel_unsupported_reason)
def fused(x: jax.Array, weight: jax.Array, *, eps: float, rounds_first: bool) -> jax.Array:
    """Computes with the C++ loop."""
    run = ffi.differentiable(
        partial(ffi.rms_norm, eps=eps, rounds_first=rounds_first),
        partial(reference, eps=eps, rounds_first=rounds_first),
    )
    return run(x.reshape(-1, x.shape[-1]), weight).reshape(x.shape)


spmd.leave_to_partitioner(OP, reference)
