"""The replicas of a model on the axis ``data`` of its mesh."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh, NamedSharding
from transformers import PreTrainedModel

from model_adapters.ops.compressed_weight import Weight
from model_adapters.sharding.model_sharding import ModelSharding
from torchax_serve.compilation.executable_cache import ExecutableCache
from torchax_serve.runtime.model_runtime import ModelRuntime

if TYPE_CHECKING:
    from torchax_serve.compilation.launchers import Launcher


def split_runtimes(
    module: PreTrainedModel, weights: dict[str, Weight], sharding: ModelSharding, launcher: Launcher | None = None
) -> list[ModelRuntime]:
    """Returns a runtime for each index of the axis ``data``, over the existing arrays.

    Nothing is copied.

    Args:
        module: of the model.
        weights: by name.
        sharding: of the weights.
        launcher: where devices are other hosts'; there is one place then.
    """
    runtimes = []
    for replica in sharding.replicas():
        shared: dict[int, Weight] = {}
        for array in weights.values():
            if id(array) not in shared:
                shared[id(array)] = jax.tree.map(functools.partial(_part, mesh=replica.mesh), array)
        here = {name: shared[id(array)] for name, array in weights.items()}
        programs = ExecutableCache(mesh=replica.mesh, launcher=launcher)
        runtimes.append(ModelRuntime(module, here, programs, replica))
    return runtimes


def _part(array: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns the part of `array` on the devices of `mesh`; this host holds its own shards."""
    assert isinstance(array.sharding, NamedSharding)
    sharding = NamedSharding(mesh, array.sharding.spec)
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    there = [shards[device] for device in sharding.mesh.devices.flat if device in shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, there)
