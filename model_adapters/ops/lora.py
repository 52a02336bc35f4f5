"""Products with low-rank adapters by token (LoRA, Hu et al. 2021; Punica, 2023).

On a CPU each row of a product reads the matrices of its own adapter. Elsewhere there are two dense products with the
matrices of all adapters, of which a row keeps its own: with few adapters of small rank that costs less than gathering.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.ops import registry, spmd
from model_adapters.ops.cpu import ffi
from model_adapters.ops.linear import accumulator, precision
from model_adapters.ops.lora_weight import OP


@registry.define(OP, "x[rows, in] times the low-rank matrices of each row's adapter, plus sums[rows, out]")
def reference(x: jax.Array, sums: jax.Array, ids: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes two dense products with all adapters, and masks those of other rows."""
    wide: Any = {"precision": precision(x.dtype), "preferred_element_type": accumulator(x.dtype)}
    hidden = jnp.einsum("ti,nri->tnr", x, a, **wide)
    own = ids[:, None] == jnp.arange(1, a.shape[0] + 1)
    hidden = jnp.where(own[:, :, None], hidden, 0)
    added = jnp.einsum("tnr,nro->to", hidden, b.astype(hidden.dtype), precision=jax.lax.Precision.HIGHEST)
    return jnp.where(ids[:, None] > 0, (sums.astype(added.dtype) + added).astype(sums.dtype), sums)


def _kernel_unsupported_reason(x: jax.Array, sums: jax.Array, ids: jax.Array, a: jax.Array, b: jax.Array) -> str | None:
    if not x.dtype == sums.dtype == a.dtype == b.dtype:
        return f"x is {x.dtype}, a product {sums.dtype}, and the matrices are {a.dtype}; the kernel has one dtype"
    return ffi.unsupported_reason(x)


@registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=_kernel_unsupported_reason)
def by_row(x: jax.Array, sums: jax.Array, ids: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes row by row with the C++ kernel, which reads the rows' adapters alone."""
    return ffi.lora(x, sums, ids, a, b)


spmd.leave_to_partitioner(OP, reference)
