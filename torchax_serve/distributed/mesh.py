"""Checks and builds the device mesh of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from model_adapters.errors import InvalidArgumentError
from sharding_rules import MESH_AXES


def mesh_of(devices: Any, shape: Mapping[str, int]) -> Mesh:
    """Builds the mesh of `devices` in the order of `MESH_AXES`."""
    sizes = [shape.get(axis, 1) for axis in MESH_AXES]
    return Mesh(np.asarray(devices, dtype=object).reshape(sizes), MESH_AXES)


def mesh_across_slices(devices: Sequence[Any], shape: Mapping[str, int]) -> Mesh:
    """Builds the mesh of `devices` with the axis ``data`` across their slices.

    Devices of one slice, and those that know of no slices, are in the given order.

    Raises:
        InvalidArgumentError: Slices take unequal parts, or replicas do not divide evenly among them.
    """
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    num_replicas = shape.get("data", 1)
    if len({len(each) for each in slices.values()}) > 1 or num_replicas % len(slices):
        parts = " + ".join(str(len(each)) for each in slices.values())
        raise InvalidArgumentError(
            f"mesh: expected data to be a multiple of the {len(slices)} slices and as many devices of each, got data "
            f"{num_replicas} on {parts} devices; only data goes across slices"
        )
    return mesh_of([device for index in sorted(slices) for device in slices[index]], shape)


def mesh_for(mesh: Mesh | Mapping[str, int] | None, tensor_parallel: int | None) -> Mesh | None:
    """Returns the mesh for the arguments of `torchax_serve.serve`, with all of `MESH_AXES`.

    None for one device.

    Raises:
        InvalidArgumentError: An axis is unknown, or there are fewer devices.
    """
    if tensor_parallel is not None:
        if mesh is not None:
            raise InvalidArgumentError("mesh and tensor_parallel: expected one of them, got both; leave one out")
        if type(tensor_parallel) is not int or tensor_parallel < 1:
            raise InvalidArgumentError(
                f"tensor_parallel: expected a whole number >= 1, got {tensor_parallel!r}; give a number of devices"
            )
        mesh = {"model": tensor_parallel}
    if mesh is None:
        return None
    shape = {str(axis): size for axis, size in (mesh.shape if isinstance(mesh, Mesh) else mesh).items()}
    _check(shape)
    if isinstance(mesh, Mesh):
        order = [axis for axis in MESH_AXES if axis in shape]
        devices = np.moveaxis(mesh.devices, [list(mesh.axis_names).index(a) for a in order], range(len(order)))
        return mesh_of(devices.reshape(-1), shape)
    number = math.prod(shape.values())
    if number > len(jax.devices()):
        axes = " x ".join(f"{axis} {size}" for axis, size in shape.items())
        name, given = ("mesh", f"{axes} = {number}") if tensor_parallel is None else ("tensor_parallel", str(number))
        raise InvalidArgumentError(
            f"{name}: expected at most the {len(jax.devices())} devices there are, got {given}; lower it"
        )
    return None if number == 1 else mesh_across_slices(jax.devices()[:number], shape)


def _check(shape: Mapping[str, Any]) -> None:
    for axis, size in shape.items():
        if axis not in MESH_AXES:
            raise InvalidArgumentError(
                f"mesh: expected axes out of {', '.join(MESH_AXES)}, got {axis!r}; rename it or leave it out"
            )
        if type(size) is not int or size < 1:
            raise InvalidArgumentError(f"mesh: expected a whole number >= 1 on axis {axis!r}, got {size!r}; correct it")
