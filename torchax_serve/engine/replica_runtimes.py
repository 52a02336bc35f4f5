"""The replicas of a model on the axis ``data`` of its mesh."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
from transformers import PreTrainedModel

from model_adapters.device_arrays import part_on
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
                shared[id(array)] = jax.tree.map(functools.partial(part_on, mesh=replica.mesh), array)
        here = {name: shared[id(array)] for name, array in weights.items()}
        programs = ExecutableCache(mesh=replica.mesh, launcher=launcher)
        runtimes.append(ModelRuntime(module, here, programs, replica))
    return runtimes
