"""Sharding of a diffusion transformer's weights by the tables of `sharding_rules`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from model_adapters.bridge.views import named_tensors
from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from sharding_rules import DIFFUSION_TABLES, HeadCounts, ShardingRuleError, TensorPlacement, place


def placements(module: Any, mesh: Mesh) -> dict[str, TensorPlacement]:
    """Returns how each tensor of `module` lies on `mesh`.

    Raises:
        UnsupportedModelError: no table is known for the class.
        InvalidArgumentError: a table that does not fit the module.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(module).items()}
    return place_tensors(type(module).__name__, dict(module.config), shapes, dict(mesh.shape))


def place_tensors(
    class_name: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], mesh_shape: Mapping[str, int]
) -> dict[str, TensorPlacement]:
    """Returns the placement of tensors of `shapes`; errors as of `placements`."""
    table = DIFFUSION_TABLES.get(class_name)
    if table is None:
        raise UnsupportedModelError(
            f"mesh: expected one of {', '.join(DIFFUSION_TABLES)}, got {class_name}, for which no sharding rules are "
            "known; leave mesh out, or add a table to sharding_rules/tables"
        )
    heads, width = config.get("num_attention_heads"), config.get("attention_head_dim")
    mlp = next((shape[0] for name, shape in shapes.items() if name.endswith("proj_mlp.weight")), 0)
    units = HeadCounts(heads, heads, mlp // width if width else None)
    try:
        return place(table, shapes, {str(axis): size for axis, size in mesh_shape.items()}, units)
    except ShardingRuleError as error:
        raise InvalidArgumentError(str(error)) from error
