"""Quantized weights on a mesh: scales are divided like their rows and groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.quantized_weight import QuantizedWeight, Scheme
from model_adapters.sharding.model_sharding import ModelSharding
from sharding_rules import TensorPlacement
from sharding_rules.layout import DimLayout


@dataclasses.dataclass(frozen=True)
class QuantizedDims:
    """Layout of a quantized weight on a mesh.

    Attributes:
        values: Of each dimension of the stored numbers, in the order of the weight's layout.
        by_group: The same of scales and offsets.
        scheme: Static part of the weight on the mesh.
    """

    values: tuple[DimLayout, ...]
    by_group: tuple[DimLayout, ...]
    scheme: Scheme

    @classmethod
    def of(cls, placed: TensorPlacement, mesh: Mesh, scheme: Scheme, num_groups: int) -> QuantizedDims:
        """Returns the layout of a weight in the plain or input-major layout.

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
    values = sharding.divided(np.asarray(weight.values), dims.values)
    scale = sharding.divided(np.asarray(weight.scale), dims.by_group)
    offset = None if weight.offset is None else sharding.divided(np.asarray(weight.offset), dims.by_group)
    return QuantizedWeight(values, scale, offset, None, dims.scheme)


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
    by_group = _abstract(sharding.mesh, dims.by_group, scale)
    offset: Any = by_group if has_offset else None
    stored: Any = _abstract(sharding.mesh, dims.values, values)
    return QuantizedWeight(stored, by_group, offset, None, dims.scheme)  # type: ignore[arg-type]


def _abstract(mesh: Mesh, dims: Sequence[DimLayout], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(dim.size for dim in dims), dtype, sharding=NamedSharding(mesh, _spec(dims)))


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
