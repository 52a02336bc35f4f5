"""The mesh of a bundle's programs, and how its weights and cache are divided on it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_adapters.errors import UnsupportedModelError
from model_adapters.ops.spmd import pool_spec, recurrent_spec, state_spec
from torchax_serve.distributed.mesh import mesh_of


def described_mesh(tensors: Mapping[str, jax.Array]) -> dict[str, Any] | None:
    """Returns the mesh and the axes of each tensor as JSON; None for one device."""
    shardings = {name: array.sharding for name, array in tensors.items()}
    on_mesh = {name: each for name, each in shardings.items() if isinstance(each, NamedSharding)}
    if not on_mesh:
        return None
    mesh = next(iter(on_mesh.values())).mesh
    return {
        "axes": {str(axis): int(size) for axis, size in mesh.shape.items()},
        "tensors": {name: list(each.spec) for name, each in on_mesh.items() if any(each.spec)},
    }


@dataclasses.dataclass(frozen=True)
class BundleSharding:
    """Placement of a bundle on this process's devices; stands for a `ModelSharding`.

    Attributes:
        mesh: The devices.
        specs: Mesh axes of the dimensions of each tensor that is divided, by name.
    """

    mesh: Mesh
    specs: Mapping[str, tuple[str | None, ...]]

    @classmethod
    def of(cls, description: Mapping[str, Any] | None, replica: int = 0) -> BundleSharding:
        """Returns the sharding that `described_mesh` has described.

        Args:
            description: Mesh and divided tensors; None: one device.
            replica: Number of the replica, each of which has devices of its own.

        Raises:
            UnsupportedModelError: there are fewer devices.
        """
        found: Mapping[str, Any] = {"axes": {"model": 1}, "tensors": {}} if description is None else description
        axes, devices = found["axes"], jax.local_devices()
        number = math.prod(axes.values())
        needed = number * (replica + 1)
        if len(devices) < needed:
            of = "" if replica == 0 else f" in {replica + 1} replicas"
            raise UnsupportedModelError(
                f"expected {needed} devices, for which the bundle's programs were exported{of}, got {len(devices)}; "
                "export the model for them"
            )
        specs = {name: tuple(spec) for name, spec in found["tensors"].items()}
        return cls(mesh_of(devices[needed - number : needed], axes), specs)

    def replicated(self) -> NamedSharding:
        """Returns the sharding of replicated arrays."""
        return NamedSharding(self.mesh, PartitionSpec())

    def pool_sharding(self, kv_heads: int) -> NamedSharding:
        """Returns the sharding of a pool of pages with `kv_heads` heads."""
        return NamedSharding(self.mesh, pool_spec(kv_heads, self.mesh))

    def state_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of states ``[slots, 1, channels or heads, ...]``."""
        return NamedSharding(self.mesh, state_spec(shape, self.mesh))

    def recurrent_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of recurrent states ``[rows, channels or heads, ...]``."""
        return NamedSharding(self.mesh, recurrent_spec(shape, self.mesh))

    def of_tensor(self, name: str) -> NamedSharding:
        """Returns the sharding of a tensor of the weights."""
        return NamedSharding(self.mesh, PartitionSpec(*self.specs.get(name, ())))
