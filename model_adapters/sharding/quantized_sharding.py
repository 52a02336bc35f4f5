"""Quantized weights on a mesh: scales are divided like their rows and groups.

XLA's CPU backend has a byte for each number of 4 bits. On a mesh of CPU devices two of them lie in a byte of their own
making, and are taken apart inside of a product, where each device has an even number of columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.quantized_layout import to_pairs
from model_adapters.ops.quantized_weight import OF_4_BITS, QuantizedWeight, Scheme
from model_adapters.sharding.model_sharding import ModelSharding, part_of
from sharding_rules import TensorPlacement
from sharding_rules.layout import DimLayout


@dataclasses.dataclass(frozen=True)
class QuantizedDims:
    """Layout of a quantized weight on a mesh.

    Attributes:
        values: Of each dimension of the numbers, in the order of the weight's layout; of pairs, of both numbers.
        by_group: The same of scales and offsets.
        scheme: Static part of the weight on the mesh.
    """

    values: tuple[DimLayout, ...]
    by_group: tuple[DimLayout, ...]
    scheme: Scheme

    @classmethod
    def of(cls, placed: TensorPlacement, mesh: Mesh, scheme: Scheme, num_groups: int) -> QuantizedDims:
        """Returns the layout of a weight in the plain or input-major layout, or of its pairs.

        Numbers of 4 bits in the plain layout, which is that of CPUs, become pairs where no device would share one.
        Along the columns scales are divided where each device has full groups; else every device has all of them.

        Args:
            placed: Placement of the weight, in the axes' order of model code.
            mesh: The mesh.
            scheme: Static part of the weight without a mesh.
            num_groups: Groups of columns of the weight without a mesh.

        Raises:
            InvalidArgumentError: groups of columns that the mesh moves.
        """
        dims = list(placed.dims)
        if scheme.transposed:
            dims[-2:] = dims[:-3:-1]
        inner = dims[-1]
        if num_groups == 1:
            scheme = dataclasses.replace(scheme, group=inner.size)
        elif inner.index is not None:
            raise InvalidArgumentError(
                f"quantization: {placed.name}: expected one scale a row, since its columns are padded or repeated on "
                f"this mesh, got groups of {scheme.group}; leave tile_size out for it"
            )
        shards = 1 if inner.mesh_axis is None else mesh.shape[inner.mesh_axis]
        is_aligned = num_groups % shards == 0 and num_groups * scheme.group == inner.size  # not so for one group
        by_group = [*dims[:-1], DimLayout(num_groups, num_groups, inner.mesh_axis if is_aligned else None, None)]
        if len(dims) == 2:
            scheme = dataclasses.replace(scheme, axes=(inner.mesh_axis, dims[0].mesh_axis))
        if scheme.layout == "plain" and scheme.bits == 4 and inner.size // shards % 2 == 0:
            scheme = dataclasses.replace(scheme, layout="pairs")
        if scheme.layout == "input-major":
            dims[-2:], by_group[-2:] = dims[:-3:-1], by_group[:-3:-1]
        return cls(tuple(dims), tuple(by_group), scheme)


def put_quantized(sharding: ModelSharding, name: str, weight: QuantizedWeight) -> QuantizedWeight:
    """Gives each device its part of a quantized weight in the plain or input-major layout.

    Raises:
        InvalidArgumentError: groups of columns that the mesh moves.
    """
    groups = weight.scale.shape[-2 if weight.is_input_major else -1]
    dims = QuantizedDims.of(sharding.placed[name], sharding.mesh, weight.scheme, groups)
    values = np.asarray(weight.values)
    if dims.scheme.layout == "pairs":
        stored = _divided_pairs(sharding, values, dims)
    else:
        stored = sharding.divided(values, dims.values)
    scale = sharding.divided(np.asarray(weight.scale), dims.by_group)
    offset = None if weight.offset is None else sharding.divided(np.asarray(weight.offset), dims.by_group)
    return QuantizedWeight(stored, scale, offset, None, dims.scheme)


def _divided_pairs(sharding: ModelSharding, values: np.ndarray, dims: QuantizedDims) -> jax.Array:
    """Gives each device its numbers of 4 bits, two in a byte."""
    shape = _stored_shape(dims)

    def part(index: Any) -> np.ndarray:
        start, stop, _ = index[-1].indices(shape[-1])
        return to_pairs(part_of(values, dims.values, (*index[:-1], slice(2 * start, 2 * stop))), dims.scheme.zero)

    return jax.make_array_from_callback(shape, NamedSharding(sharding.mesh, _spec(dims.values)), part)


def _stored_shape(dims: QuantizedDims) -> tuple[int, ...]:
    """Returns the shape of the array that holds the numbers."""
    *lead, inner = (dim.size for dim in dims.values)
    return (*lead, inner // 2 if dims.scheme.layout == "pairs" else inner)


def abstract_quantized(
    sharding: ModelSharding, name: str, scheme: Scheme, values: Any, scale: Any, *, has_offset: bool
) -> QuantizedWeight:
    """Returns a quantized weight of shapes without values, with their shardings.

    Args:
        sharding: Layout of the model.
        name: Name of the weight.
        scheme: Static part of the weight without a mesh.
        values: Dtype of the stored numbers.
        scale: Dtype of scales and offsets.
        has_offset: Whether there are offsets.

    Raises:
        InvalidArgumentError: groups of columns that the mesh moves.
    """
    placed = sharding.placed[name]
    num_columns = placed.shape[-2 if scheme.transposed else -1]
    dims = QuantizedDims.of(placed, sharding.mesh, scheme, -(-num_columns // scheme.group))
    if dims.scheme.layout != "input-major" and jnp.dtype(values).name in OF_4_BITS:
        values = jnp.uint8 if dims.scheme.layout == "pairs" else jnp.int8
    by_group = _abstract(sharding.mesh, dims.by_group, tuple(dim.size for dim in dims.by_group), scale)
    offset: Any = by_group if has_offset else None
    stored: Any = _abstract(sharding.mesh, dims.values, _stored_shape(dims), values)
    return QuantizedWeight(stored, by_group, offset, None, dims.scheme)  # type: ignore[arg-type]


def _abstract(mesh: Mesh, dims: Sequence[DimLayout], shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, _spec(dims)))


def _spec(dims: Sequence[DimLayout]) -> PartitionSpec:
    return PartitionSpec(*(dim.mesh_axis for dim in dims))


def specs_of(placed: TensorPlacement, mesh: Mesh, weight: QuantizedWeight) -> QuantizedWeight | None:
    """Returns the divisions of the parts of `weight`, a weight on `mesh`, as a tree like it.

    None if columns are divided and their groups are not: a device cannot tell which groups its columns are of.
    """
    groups = weight.scale.shape[-2 if weight.is_input_major else -1]
    dims = QuantizedDims.of(placed, mesh, weight.scheme, groups)
    if groups > 1 and [dim.mesh_axis for dim in dims.values] != [dim.mesh_axis for dim in dims.by_group]:
        return None
    values, scale = _spec(dims.values), _spec(dims.by_group)
    offset = None if weight.offset is None else scale
    return QuantizedWeight(values, scale, offset, None, weight.scheme)  # type: ignore[arg-type]
