"""`TrainableModel`: a module as a pure function, with its trained weights apart."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from model_adapters.bridge.extract import functional_call
from model_adapters.bridge.views import JaxFunction, named_tensors, to_jax_array, to_torch_tensor
from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.loading.model_source import ModelSource, resolve
from torchax_serve.training.lora import adapter_of, dropout_error
from torchax_serve.training.options import TrainingOptions
from torchax_serve.training.remat import layer_transform

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class TrainableModel:
    """A model of transformers, perhaps with an adapter of peft, and its weights as JAX arrays.

    Attributes:
        name: Name of the model, for people.
        module: The module as given, or wrapped by peft; its tensors are those of the start until `write_back`.
        base: The module of transformers in it.
        tokenizer: Its tokenizer; None if it has none.
        forward: Pure function ``forward(weights, args, kwargs)``.
        trained: Float32 copies of the weights that are trained, one for each weight whatever its names.
        frozen: The other weights and buffers, by name.
        names: For each trained weight all names under which the forward reads it.
    """

    name: str
    module: torch.nn.Module
    base: PreTrainedModel
    tokenizer: Any
    forward: JaxFunction
    trained: Arrays
    frozen: Arrays
    names: Mapping[str, tuple[str, ...]]

    def weights(self, trained: Arrays, frozen: Arrays) -> Arrays:
        """Returns the weights of a forward, under all of their names.

        Trained ones have the dtypes of the module.
        """
        tensors = dict(self.module.named_parameters(remove_duplicate=False))
        found = dict(frozen)
        for owner, array in trained.items():
            dtype = str(tensors[owner].dtype).removeprefix("torch.")
            found.update(dict.fromkeys(self.names[owner], array.astype(dtype)))
        return found

    def write_back(self, trained: Arrays) -> None:
        """Writes trained weights into the tensors of the module."""
        tensors = named_tensors(self.module)
        with torch.no_grad():
            for owner, array in trained.items():
                tensors[owner].copy_(to_torch_tensor(jnp.asarray(np.asarray(array))))


def trainable_model(model: Any, lora: Any, options: TrainingOptions, **loading: Any) -> TrainableModel:
    """Returns a model that can be trained.

    Args:
        model: A name as `torchax_serve.serve` takes it, or a model of transformers or peft in main memory.
        lora: As of `torchax_serve.training.lora.adapter_of`; None trains all parameters, or those of a peft model.
        options: Options of the run.
        **loading: Arguments of `resolve` for a name.

    Raises:
        UnsupportedModelError: a quantized model, or one that does not generate text.
        InvalidArgumentError: an adapter that does not fit, or dropout in it.
    """
    module, tokenizer, name = _loaded(model, options, loading)
    base: Any = module.get_base_model() if hasattr(module, "get_base_model") else module
    if not isinstance(base, PreTrainedModel) or not base.can_generate():
        raise UnsupportedModelError(
            f"{name}: expected a causal language model of transformers, got {type(base).__name__}"
        )
    if getattr(base, "is_quantized", False):
        raise UnsupportedModelError(f"{name}: expected dense weights to train, got quantized ones; load it unquantized")
    if lora is not None:
        if module is not base:
            raise InvalidArgumentError(
                "lora: expected None for a model that has an adapter of peft already; leave it out"
            )
        module = adapter_of(base, lora, options.seed)
    if (error := dropout_error(module)) is not None:
        raise InvalidArgumentError(error)
    module.eval()  # dropout is a constant in a compiled program
    return _extracted(name, module, base, tokenizer, options)


def _loaded(model: Any, options: TrainingOptions, loading: dict[str, Any]) -> tuple[Any, Any, str]:
    """Returns the module on the host, its tokenizer, and its name."""
    if not (model is None or isinstance(model, str | os.PathLike)):
        folder = getattr(getattr(model, "config", None), "name_or_path", "") or ""
        tokenizer = AutoTokenizer.from_pretrained(folder) if Path(folder, "tokenizer_config.json").exists() else None
        return model, tokenizer, type(model).__name__
    source: ModelSource = resolve(model, **loading)
    if source.folder is None:
        raise UnsupportedModelError(
            f"{source.name}: expected a folder or hub id of safetensors to train, got another form"
        )
    dtype: Any = "auto" if options.dtype == "auto" else getattr(torch, options.dtype)
    module = AutoModelForCausalLM.from_pretrained(
        source.folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return module, AutoTokenizer.from_pretrained(source.folder, local_files_only=True), source.name


def _extracted(
    name: str, module: torch.nn.Module, base: PreTrainedModel, tokenizer: Any, options: TrainingOptions
) -> TrainableModel:
    wanted = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    if not wanted:
        raise InvalidArgumentError(
            f"{name}: expected a parameter with requires_grad, got none; give lora=, or unfreeze some"
        )
    arrays: dict[int, jax.Array] = {}
    trained: Arrays = {}
    frozen: Arrays = {}
    names: dict[int, list[str]] = {}
    for each, tensor in named_tensors(module).items():
        if tensor.is_meta:
            raise InvalidArgumentError(
                f"{each}: expected a tensor with values, got one on the meta device; load it first"
            )
        names.setdefault(id(tensor), []).append(each)
        if id(tensor) not in arrays:
            array = to_jax_array(tensor)
            # A copy: the optimizer donates it, and the frozen ones share memory with torch.
            arrays[id(tensor)] = jnp.array(array, jnp.float32, copy=True) if id(tensor) in wanted else array
        if id(tensor) not in wanted:
            frozen[each] = arrays[id(tensor)]
        elif names[id(tensor)][0] == each:
            trained[each] = arrays[id(tensor)]
    by_owner = {found[0]: tuple(found) for found in names.values() if found[0] in trained}
    forward = functional_call(module, transform=layer_transform(options.remat))
    return TrainableModel(name, module, base, tokenizer, forward, trained, frozen, by_owner)


def accepts(base: PreTrainedModel, argument: str) -> bool:
    """Returns whether the forward of `base` has an argument of this name."""
    return argument in inspect.signature(base.forward).parameters
