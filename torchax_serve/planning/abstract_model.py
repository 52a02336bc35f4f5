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
from model_adapters.loading.formats.declared import declared_forms
from model_adapters.loading.formats.settings import QuantizationSettings
from model_adapters.loading.loaded_model import numpy_dtype
from model_adapters.loading.model_class import find_class, module_of, require_causal_module, torch_dtype_of
from model_adapters.loading.model_files import ModelFiles
from model_adapters.loading.model_source import resolve
from model_adapters.ops import on_platform
from model_adapters.ops.quantized_weight import QuantizedWeight, num_bytes
from model_adapters.quantization.rules import QuantizationRules, parse_rules
from model_adapters.quantization.selection import Selection
from model_adapters.quantization.stored_form import StoredForm
from model_adapters.sharding.model_sharding import ModelSharding
from torchax_serve.kv_cache.pools import PagedLayerSpec
from torchax_serve.planning.chips import Chip

Quantization = str | QuantizationRules | QuantizationSettings | None
"""Preset, rules, or what a configuration states."""

_NARROWED = {"int64": "int32", "float64": "float32", "uint64": "uint32"}  # JAX without 64-bit types


AbstractWeight = jax.ShapeDtypeStruct | QuantizedWeight
"""A weight of shapes without values."""


@dataclasses.dataclass(frozen=True)
class AbstractModel:
    """Module on the meta device, with its tensors as abstract JAX arrays.

    Attributes:
        module: Module on the meta device.
        sharding: Sharding of the module on the mesh.
        weights: Abstract arrays by name, or quantized weights of them; tied names share one object.
        forms: Forms of the quantized weights, by name.
    """

    module: PreTrainedModel
    sharding: ModelSharding
    weights: Mapping[str, AbstractWeight]
    forms: Mapping[str, StoredForm] = dataclasses.field(default_factory=dict)

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Number of devices by mesh axis."""
        return {str(axis): size for axis, size in self.sharding.mesh.shape.items()}

    def bytes_per_device(self, name: str) -> int:
        """Returns the bytes of the tensor `name` on one device."""
        placed, weight = self.sharding.placed[name], self.weights[name]
        if not isinstance(weight, QuantizedWeight):
            return placed.bytes_per_device(self.mesh_shape, weight.dtype.itemsize)
        return sum(
            num_bytes(jax.ShapeDtypeStruct(part.sharding.shard_shape(part.shape), part.dtype))
            for part in jax.tree.leaves(weight)
        )

    def page_bytes(self, shape: PagedLayerSpec, page_size: int) -> int:
        """Returns the bytes of a page of one layer on one device."""
        spec = self.sharding.pool_sharding(shape.num_heads).spec
        return shape.page_bytes(page_size) // (self.sharding.mesh.shape["model"] if "model" in spec else 1)

    def elements_per_device(self, name: str) -> int:
        """Returns the number of elements of the tensor `name` on one device."""
        return self.sharding.placed[name].bytes_per_device(self.mesh_shape, 1)

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
        return sum(map(self._bytes_of, self.unique_names()))

    @property
    def num_elements(self) -> int:
        """Number of elements of all arrays of the unsharded model."""
        return sum(math.prod(self.sharding.placed[name].shape) for name in self.unique_names())

    def _bytes_of(self, name: str) -> int:
        weight, form = self.weights[name], self.forms.get(name)
        shape = self.sharding.placed[name].shape
        return math.prod(shape) * weight.dtype.itemsize if form is None else form.num_bytes(shape)


def empty_module(
    model: str | os.PathLike[str] | None,
    *,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    any_task: bool = False,
    **where: Any,
) -> tuple[PreTrainedModel, QuantizationSettings | None]:
    """Builds the module of `model` (as `serve` takes it, or a config file) on the meta device.

    One that does not generate text is refused unless `any_task`.

    Returns:
        The module, and the quantization that its configuration states.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError, InvalidArgumentError: in one line.
    """
    wanted = torch_dtype_of(dtype)
    source = resolve(model, with_weights=False, with_code=trust_remote_code, **where)
    assert source.path is not None
    if source.gguf is not None:
        raise UnsupportedModelError(
            f"plan: expected a model with a config.json, got {source.gguf.name}, a GGUF file; plan the model that it "
            "was made of, with --quantization int4 or int8"
        )
    files = ModelFiles.of(source, trust_remote_code=trust_remote_code)
    model_class, config = find_class(files.config, folder=source.folder, trust_remote_code=trust_remote_code)
    module = module_of(model_class, config, wanted or files.dtype or torch.bfloat16)
    if not any_task:
        require_causal_module(module, source.name)
    return module, files.settings


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


def stored_forms(
    module: PreTrainedModel, quantization: Quantization, chip: Chip, sharding: ModelSharding | None = None
) -> dict[str, StoredForm]:
    """Returns the forms of the weights of `module` that are quantized, by name.

    Args:
        module: Module on the meta device.
        quantization: Preset, rules, or what a configuration states; None: nothing is quantized.
        chip: Kind of device that multiplies with them.
        sharding: Layout on a mesh, which may leave presets no groups of columns.

    Raises:
        InvalidArgumentError: Rules that do not fit the module.
        UnsupportedModelError: The configuration does not say how its weights are quantized.
    """
    if isinstance(quantization, QuantizationSettings):
        found = declared_forms(module, quantization)
    else:
        with on_platform(chip.platform):
            rules = parse_rules(quantization)
        chosen = None if rules is None else Selection.of(module, rules)
        found = {} if chosen is None else _forms_of_rules(module, chosen, sharding)
    tensors = named_tensors(module)
    return {
        name: form.on_platform(
            chip.platform, tensors[name].shape[-2 if form.scheme.transposed else -1], multiplies_fp8=chip.multiplies_fp8
        )
        for name, form in found.items()
    }


def _forms_of_rules(
    module: PreTrainedModel, selection: Selection, sharding: ModelSharding | None
) -> dict[str, StoredForm]:
    source, tensors = selection.rules.name, named_tensors(module)
    return {
        name: StoredForm.of_rule(*selection.on_mesh(name, sharding), numpy_dtype(tensors[name].dtype), source)
        for name in selection.chosen
    }


def abstract_model(
    module: PreTrainedModel,
    mesh: Mesh,
    *,
    refuse_uneven: bool = False,
    quantization: Quantization = None,
    chip: Chip | None = None,
) -> AbstractModel:
    """Shards `module` on `mesh`.

    Args:
        module: Module on the meta device.
        mesh: The mesh.
        refuse_uneven: Whether sizes that would be padded are an error.
        quantization: What `stored_forms` takes.
        chip: Kind of the mesh's devices; needed with `quantization` only.

    Raises:
        InvalidArgumentError: The sharding rules do not fit the mesh, or the quantization does not fit the module.
    """
    sharding = ModelSharding.of(module, mesh, refuse_uneven=refuse_uneven)
    forms = {} if chip is None else stored_forms(module, quantization, chip, sharding)
    arrays: dict[int, AbstractWeight] = {}
    weights = {}
    for name, tensor in named_tensors(module).items():
        if id(tensor) not in arrays:
            kind = numpy_dtype(tensor.dtype)
            dense = sharding.abstract(name, jnp.dtype(_NARROWED.get(str(kind), kind)))
            arrays[id(tensor)] = forms[name].abstract(sharding, name) if name in forms else dense
        weights[name] = arrays[id(tensor)]
    return AbstractModel(module, sharding, weights, forms)
