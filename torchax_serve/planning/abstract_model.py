"""Abstract models: weights without values, sharded on a mesh without devices."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from model_adapters.bridge.views import named_tensors
from model_adapters.errors import UnsupportedModelError
from model_adapters.loading.file_names import CONFIG
from model_adapters.loading.loaded_model import numpy_dtype
from model_adapters.loading.model_class import find_class, load_config, module_of, require_causal_module, torch_dtype_of
from model_adapters.loading.model_source import resolve
from model_adapters.sharding.model_sharding import ModelSharding

_NARROWED = {"int64": "int32", "float64": "float32", "uint64": "uint32"}  # JAX without 64-bit types


@dataclasses.dataclass(frozen=True)
class AbstractModel:
    """Module on the meta device, with its tensors as abstract JAX arrays.

    Attributes:
        module: Module on the meta device.
        sharding: Sharding of the module on the mesh.
        weights: Abstract arrays by name; tied names share one object.
    """

    module: PreTrainedModel
    sharding: ModelSharding
    weights: Mapping[str, jax.ShapeDtypeStruct]

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Number of devices by mesh axis."""
        return {str(axis): size for axis, size in self.sharding.mesh.shape.items()}

    def bytes_per_device(self, name: str) -> int:
        """Returns the bytes of the tensor `name` on one device."""
        placed = self.sharding.placed[name]
        return placed.bytes_per_device(self.mesh_shape, self.weights[name].dtype.itemsize)

    def unique_names(self) -> list[str]:
        """Returns one name for each array."""
        first: dict[int, str] = {}
        for name, array in self.weights.items():
            first.setdefault(id(array), name)
        return list(first.values())

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the weights."""
        return self.module.dtype.itemsize

    @property
    def weights_bytes_per_device(self) -> int:
        """Bytes of all arrays on one device, tied ones once."""
        return sum(self.bytes_per_device(name) for name in self.unique_names())

    @property
    def weights_bytes(self) -> int:
        """Bytes of all arrays of the unsharded model."""
        return sum(
            math.prod(self.sharding.placed[name].shape) * self.weights[name].dtype.itemsize
            for name in self.unique_names()
        )


def empty_module(
    model: str | os.PathLike[str] | None, *, dtype: str = "auto", trust_remote_code: bool = False, **where: Any
) -> PreTrainedModel:
    """Builds the module of `model` (as `serve` takes it, or a config file) on the meta device.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError, InvalidArgumentError: in one line.
    """
    wanted = torch_dtype_of(dtype)
    source = resolve(model, with_weights=False, with_code=trust_remote_code, **where)
    assert source.path is not None
    file = source.path if source.kind == "config" else source.path / CONFIG
    config = load_config(file, trust_remote_code=trust_remote_code)
    model_class, config = find_class(config, folder=source.folder, trust_remote_code=trust_remote_code)
    said: Any = config.dtype
    module = module_of(model_class, config, wanted or said or torch.bfloat16)
    require_causal_module(module, source.name)
    return module


def module_of_type(model_type: str) -> PreTrainedModel:
    """Builds the causal language model of a type on the meta device.

    Its sizes are the defaults of its configuration.

    Raises:
        CheckpointError, UnsupportedModelError: the type has no such configuration.
    """
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception as error:  # some configurations have no defaults, each for a reason of its own
        said = " ".join(str(error).split()) or type(error).__name__
        raise UnsupportedModelError(
            f"{model_type}: expected a configuration that has defaults, got one that has not ({said}); plan a "
            "config.json of the type: torchax-serve plan FILE --sharding"
        ) from error
    model_class, config = find_class(config, folder=None, trust_remote_code=False)
    return module_of(model_class, config, torch.bfloat16)


def abstract_model(module: PreTrainedModel, mesh: Mesh, *, refuse_uneven: bool = False) -> AbstractModel:
    """Shards `module` on `mesh`.

    Raises:
        InvalidArgumentError: The sharding rules do not fit the mesh.
    """
    sharding = ModelSharding.of(module, mesh, refuse_uneven=refuse_uneven)
    arrays: dict[int, jax.ShapeDtypeStruct] = {}
    weights = {}
    for name, tensor in named_tensors(module).items():
        if id(tensor) not in arrays:
            kind = numpy_dtype(tensor.dtype)
            arrays[id(tensor)] = sharding.abstract(name, jnp.dtype(_NARROWED.get(str(kind), kind)))
        weights[name] = arrays[id(tensor)]
    return AbstractModel(module, sharding, weights)
