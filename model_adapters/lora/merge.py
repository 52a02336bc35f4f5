"""Adds a LoRA adapter of peft to the weights of a loaded model (Hu et al., 2021).

The arithmetic is that of peft's ``merge_and_unload``: ``W + scale * B A``. It is done on the weights as they lie on the
device or mesh: layouts of `sharding_rules` copy, repeat and pad rows, so that the product is laid out as the weight.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
from transformers.pytorch_utils import Conv1D

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.loading.loaded_model import LoadedModel
from model_adapters.lora.adapter_files import AdapterFiles, read_adapter
from model_adapters.ops.compressed_weight import Stored

REMEDY = "merge it with peft's merge_and_unload, and serve the result"


def merge_adapter(loaded: LoadedModel, folder: str | os.PathLike[str]) -> None:
    """Adds the adapter in `folder` to the weights of `loaded`.

    Raises:
        InvalidArgumentError: no adapter, or one of another model.
        CheckpointError: its files are not readable.
        UnsupportedModelError: a kind of adapter that cannot be merged, or weights that are quantized.
    """
    adapter = read_adapter(folder, REMEDY)
    owners: dict[int, list[str]] = {}
    for name, held in loaded.weights.items():
        owners.setdefault(id(held), []).append(name)
    for module in sorted(adapter.factors):
        name = f"{module}.weight"
        weight: Any = loaded.weights.get(name)
        if weight is None:
            raise InvalidArgumentError(
                f"adapter: expected an adapter of {loaded.source.name}, got one with {module}, which it has not; "
                f"it was made for {adapter.base}"
            )
        if isinstance(weight, Stored):
            raise UnsupportedModelError(
                f'{name}: expected a dense weight to add an adapter to; choose quantization="none"'
            )
        if len(owners[id(weight)]) > 1:
            raise UnsupportedModelError(
                f"adapter: {name} is the same weight as {owners[id(weight)][-1]}, which the adapter would change, too; "
                "untie it, and merge with peft"
            )
        loaded.weights[name] = _merged(loaded, name, weight, module, adapter)


def _merged(loaded: LoadedModel, name: str, weight: jax.Array, module: str, adapter: AdapterFiles) -> jax.Array:
    a, b = adapter.matrices(module)
    placed = None if loaded.sharding is None else loaded.sharding.placed[name]
    shape = tuple(weight.shape) if placed is None else placed.shape
    delta = b @ a
    if isinstance(loaded.module.get_submodule(module), Conv1D):  # as peft, which corrects fan_in_fan_out
        delta = delta.T
    if delta.shape != shape:
        raise InvalidArgumentError(
            f"adapter: {name}: expected matrices for a weight of shape {shape}, got A {a.shape} and B {b.shape}"
        )
    sharding = loaded.sharding
    array = jax.device_put(delta, weight.sharding) if sharding is None else sharding.put(name, delta)
    return (weight.astype(jnp.float32) + array).astype(weight.dtype)
