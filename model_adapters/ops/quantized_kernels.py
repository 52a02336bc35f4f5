"""Shared parts of quantized kernels on accelerators: accepted weights, meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from model_adapters.ops import registry, spmd
from model_adapters.ops.linear import OP
from model_adapters.ops.quantized_weight import QuantizedWeight

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""From rows bfloat16[rows, in], numbers ``[in, out]`` and scales [groups, out] to float32[rows, out]."""


def not_for_kernels(x: jax.Array, weight: QuantizedWeight | None, dtypes: Sequence[str]) -> str | None:
    """Returns why a kernel for `dtypes` cannot multiply ``x[rows, in]`` with `weight`, or None."""
    if weight is None or weight.scheme.transposed or not weight.is_input_major or weight.ndim != 2:
        return "the weight is not quantized input-major"
    scheme, columns, mesh = weight.scheme, weight.num_columns, spmd.mesh_in_use()
    if str(weight.values.dtype) not in dtypes or scheme.act_dtype != "none":
        return f"values are {weight.values.dtype}, activations {scheme.act_dtype}; the kernel has {', '.join(dtypes)}"
    if x.dtype != jnp.bfloat16 or not x.shape[0]:
        return f"x is {x.dtype}{list(x.shape)}; the kernel has rows of bfloat16"
    groups = weight.scale.shape[0]
    if groups > 1 and groups * scheme.group != columns:
        return "the last group is shorter"
    if mesh is None:
        return None
    if scheme.axes is None:
        return "the weight's place on the mesh is not known"
    shards = 1 if scheme.axes[0] is None else mesh.shape[scheme.axes[0]]
    return None if groups == 1 or groups % shards == 0 else f"{groups} groups, which {shards} devices do not divide"


def local_sizes(weight: QuantizedWeight) -> tuple[int, int, int]:
    """Returns rows, columns and groups of a weight on one device."""
    mesh, (rows, columns) = spmd.mesh_in_use(), weight.stored_shape
    groups = weight.scale.shape[0]
    if mesh is None:
        return rows, columns, groups
    assert weight.scheme.axes is not None
    by_columns, by_rows = (1 if axis is None else mesh.shape[axis] for axis in weight.scheme.axes)
    return rows // by_rows, columns // by_columns, groups if groups == 1 else groups // by_columns


def by_device(x: jax.Array, weight: QuantizedWeight, product: Product) -> jax.Array:
    """Returns ``x[rows, in]`` times a weight, as float32.

    On a mesh it is in x's dtype if devices' sums are added.

    Args:
        x: Rows of activations.
        weight: Input-major; `not_for_kernels` has nothing against it.
        product: The kernel, for one device.
    """
    if weight.columns is not None:
        x = x[:, weight.columns]
    parts = (x, weight.values, weight.scale, weight.offset)
    if spmd.mesh_in_use() is None:
        return _with_offset(product, *parts)
    assert weight.scheme.axes is not None
    inner, outer = weight.scheme.axes
    by_group = PartitionSpec(None if weight.scale.shape[0] == 1 else inner, outer)

    def one_device(x: jax.Array, values: jax.Array, scale: jax.Array, offset: jax.Array | None) -> jax.Array:
        out = _with_offset(product, x, values, scale, offset)
        return out if inner is None else jax.lax.psum(out.astype(x.dtype), inner)

    specs = (PartitionSpec(None, inner), PartitionSpec(inner, outer), by_group, by_group)
    return spmd.per_shard(one_device, parts, specs, PartitionSpec(None, outer))


def _with_offset(
    product: Product, x: jax.Array, values: jax.Array, scale: jax.Array, offset: jax.Array | None
) -> jax.Array:
    out = product(x, values, scale.astype(jnp.float32))
    if offset is None:
        return out
    groups = offset.shape[0]
    sums = jnp.sum(x.astype(jnp.float32).reshape(len(x), groups, -1), axis=2)
    return out + jnp.matmul(sums, offset.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


registry.register_module(OP, "tpu", "model_adapters.ops.tpu.quantized_linear")
registry.register_module(OP, "gpu", "model_adapters.ops.gpu.quantized_linear")
