"""Products of rows with the matrices that they name: tokens and their experts.

No order of the rows is asked for, so that nothing is sorted, and rows of a `jax.vmap` are rows of one call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry, spmd
from model_adapters.ops.compressed_weight import compressed_of
from model_adapters.ops.cpu import ffi
from model_adapters.ops.cpu.batching import with_rows_folded

OP = "routed_matmul"
Layout = Literal["ekn", "enk"]
"""Axes of stacked weights: experts, inputs, outputs; or experts, outputs, inputs, as `torch.nn.Linear` has them."""
LAYOUTS = ("ekn", "enk")


def routed_matmul(
    x: jax.Array, weight: jax.Array, ids: jax.Array, bias: jax.Array | None = None, *, layout: Layout = "enk"
) -> jax.Array:
    """Returns each token times each of the matrices that it chose.

    Args:
        x: ``[T, K]``, or ``[T, choices, K]`` with a row for each choice.
        weight: ``[E, N, K]``, or ``[E, K, N]`` with ``layout="ekn"``.
        ids: ``int[T, choices]``; rows whose id is no matrix are zero.
        bias: ``[E, N]``, added to the products.
        layout: Order of the axes of `weight`.

    Returns:
        ``[T, choices, N]`` in x's dtype, sums in float32.

    Raises:
        InvalidArgumentError: shapes or dtypes that do not fit together.
    """
    if layout not in LAYOUTS:
        raise InvalidArgumentError(f"routed_matmul: expected layout 'ekn' or 'enk', got {layout!r}")
    fits = weight.ndim == 3 and ids.ndim == 2 and x.shape[:-1] in (ids.shape[:1], ids.shape) and x.dtype == weight.dtype
    if not fits or x.shape[-1] != weight.shape[layout.index("k")]:
        raise InvalidArgumentError(
            f"routed_matmul: expected x[T, K] or x[T, choices, K], weight[{', '.join(layout.upper())}] of x's dtype, "
            f"ids[T, choices], got {x.dtype}{list(x.shape)}, {weight.dtype}{list(weight.shape)} and {list(ids.shape)}"
        )
    out: jax.Array = registry.call(OP, x, weight, ids.astype(jnp.int32), bias, layout=layout)
    return out


@registry.define(OP, "rows times the weight matrices that they name (experts)")
def reference(x: jax.Array, weight: jax.Array, ids: jax.Array, bias: jax.Array | None, *, layout: Layout) -> jax.Array:
    """Computes `grouped_matmul` of the rows sorted by matrix."""
    num_matrices, num_choices = weight.shape[0], ids.shape[1]
    flat = jnp.where((ids < 0) | (ids > num_matrices), num_matrices, ids).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    rows = x[order // num_choices] if x.ndim == 2 else x.reshape(-1, x.shape[-1])[order]
    sizes = jnp.sum(flat[None] == jnp.arange(num_matrices, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    sums = registry.call("grouped_matmul", rows, weight, sizes, layout=layout)[jnp.argsort(order)]
    if bias is not None:
        sums = sums + jnp.where((flat < num_matrices)[:, None], bias[jnp.minimum(flat, num_matrices - 1)], 0)
    return sums.reshape(*ids.shape, -1).astype(x.dtype)


def routed_kernel(layout: Layout) -> Callable[..., jax.Array]:
    """Returns the C++ kernel for weights in this order: of x, ids, weight and bias."""
    return with_rows_folded(partial(ffi.routed_linear, is_input_major=layout == "ekn"), 2)


def _kernel_unsupported_reason(
    x: jax.Array, weight: jax.Array, ids: jax.Array, bias: jax.Array | None, *, layout: Layout
) -> str | None:
    return ffi.unsupported_reason(x) if x.shape[0] else "no rows"


@registry.register(OP, "cpu-ffi", ("cpu",), unsupported_reason=_kernel_unsupported_reason)
def streamed(x: jax.Array, weight: jax.Array, ids: jax.Array, bias: jax.Array | None, *, layout: Layout) -> jax.Array:
    """Computes with the C++ kernel, which reads only the matrices that some row names."""

    def of_ids(x: jax.Array, ids: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        return reference(x, weight, ids, bias, layout=layout)

    return ffi.differentiable(routed_kernel(layout), of_ids)(x, ids, weight, bias)


def _packed_unsupported_reason(
    x: jax.Array, weight: jax.Array, ids: jax.Array, bias: jax.Array | None, *, layout: Layout
) -> str | None:
    if layout != "enk" or compressed_of(weight) is None:
        return "the weights are not packed"
    return None if x.shape[0] else "no rows"


@registry.register(OP, "cpu-packed", ("cpu",), unsupported_reason=_packed_unsupported_reason, takes_precedence=True)
def packed(x: jax.Array, weight: jax.Array, ids: jax.Array, bias: jax.Array | None, *, layout: Layout) -> jax.Array:
    """Computes with a compressed stack, bit-equal to the batch-invariant product."""
    compressed = compressed_of(weight)
    assert compressed is not None
    return with_rows_folded(ffi.packed_routed_linear, 2)(x, ids, compressed.groups, compressed.index, bias)


spmd.leave_to_partitioner(OP, reference)
