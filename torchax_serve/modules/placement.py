"""Weights of a module on a mesh of devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding

from model_adapters.bridge.views import named_tensors
from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from model_adapters.quantization.rules import QuantizationRules
from sharding_rules import HeadCounts, TensorPlacement, place
from sharding_rules.layout import take
from sharding_rules.shape_inference import infer_rules
from torchax_serve.modules.runtime import ModuleRuntime, arrays_of


def runtime_on_mesh(module: torch.nn.Module, mesh: Mesh, rules: QuantizationRules | None) -> ModuleRuntime:
    """Returns what runs a module on `mesh`.

    Matrices and convolutions are divided by their shapes over the axis ``model``, rows of calls over ``data``.

    Raises:
        UnsupportedArgumentError: the axis ``expert``, or quantized weights.
        InvalidArgumentError: no weight can be divided.
    """
    name, shape = type(module).__name__, {str(axis): size for axis, size in mesh.shape.items()}
    if shape.get("expert", 1) > 1:
        raise UnsupportedArgumentError(
            f"mesh: expected the axes data and model for {name}, got {shape}; leave expert out"
        )
    if rules is not None:
        raise UnsupportedArgumentError(f"quantization: expected none for {name} on a mesh, got rules; leave one out")
    placed = inferred_placements(module, shape)
    if shape.get("model", 1) > 1 and not any(any(each.spec) for each in placed.values()):
        raise InvalidArgumentError(
            f"mesh: expected a weight of {name} that {shape['model']} devices divide, got none; use fewer devices, or "
            "the axis data alone"
        )
    weights = {each: on_mesh(array, placed[each], mesh) for each, array in arrays_of(module).items()}
    return ModuleRuntime(module, weights, mesh=mesh, placed=placed, is_diffusers=False)


def inferred_placements(module: Any, mesh_shape: Mapping[str, int]) -> dict[str, TensorPlacement]:
    """Returns how each tensor of `module` lies on a mesh, by its shape.

    Every device has what does not divide.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(module).items()}
    table = infer_rules(shapes, None, type(module).__name__)
    return place(table, shapes, mesh_shape, HeadCounts(None, None, None))


def on_mesh(array: jax.Array, placed: TensorPlacement, mesh: Mesh) -> jax.Array:
    """Returns a tensor of a module as it lies on `mesh`."""
    host = np.asarray(array)
    for number, dim in enumerate(placed.dims):
        host = take(host, number, dim)
    return jax.device_put(host, NamedSharding(mesh, placed.spec))
