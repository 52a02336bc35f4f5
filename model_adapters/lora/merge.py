"""Adds a LoRA adapter of peft to the weights of a loaded model (Hu et al., 2021).

The arithmetic is that of peft's ``merge_and_unload``: ``W + scale * B A``. It is done on the weights as they lie on the
device or mesh: layouts of `sharding_rules` copy, repeat and pad rows, so that the product is laid out as the weight.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from model_adapters.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from model_adapters.loading.loaded_model import LoadedModel
from model_adapters.ops.compressed_weight import Stored

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
READ = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "fan_in_fan_out", "target_modules", "base_model_name_or_path"}
)
"""Fields of the configuration that are honoured."""
WITHOUT_EFFECT = frozenset(
    [
        "task_type",
        "inference_mode",
        "auto_mapping",
        "revision",
        "peft_version",
        "lora_dropout",
        "init_lora_weights",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "loftq_config",
        "eva_config",
        "corda_config",
        "runtime_config",
        "ensure_weight_tying",
        "rank_pattern",
        "megatron_core",
        "qalora_group_size",
        "lora_ga_config",
    ]
)
"""Fields that say how an adapter was made or trained; ranks and modules are those of its tensors."""
NEUTRAL: tuple[Any, ...] = (None, False, "none", [], {}, 0)
PREFIX = "base_model.model."


def merge_adapter(loaded: LoadedModel, folder: str | os.PathLike[str]) -> None:
    """Adds the adapter in `folder` to the weights of `loaded`.

    Raises:
        InvalidArgumentError: no adapter, or one of another model.
        CheckpointError: its files are not readable.
        UnsupportedModelError: a kind of adapter that cannot be merged, or weights that are quantized.
    """
    path = Path(folder)
    config = _config(path)
    factors = _factors(path)
    owners: dict[int, list[str]] = {}
    for name, held in loaded.weights.items():
        owners.setdefault(id(held), []).append(name)
    for module, parts in sorted(factors.items()):
        name = f"{module}.weight"
        weight: Any = loaded.weights.get(name)
        if weight is None or set(parts) != {"A", "B"}:
            raise InvalidArgumentError(
                f"adapter: expected an adapter of {loaded.source.name}, got one with {module}, which it has not; "
                "it was "
                f"made for {config.get('base_model_name_or_path') or 'another model'}"
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
        loaded.weights[name] = _merged(loaded, name, weight, parts, config)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"adapter: expected a folder with {CONFIG} as peft writes it, got {path} ({error})"
        ) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise UnsupportedModelError(
            f"adapter: expected peft_type LORA, got {kind}; merge it with peft, and serve the result"
        )
    for name, value in config.items():
        if name not in READ | WITHOUT_EFFECT and value not in NEUTRAL:
            raise UnsupportedModelError(
                f"adapter: {name}={value!r} is not supported here; merge it with peft's merge_and_unload, and "
                "serve the "
                "result"
            )
    return config


def _factors(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Returns the matrices A and B by module."""
    try:
        tensors = load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"adapter: expected {WEIGHTS} in {path}, got none that is readable ({error})") from error
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        module, dot, part = name.removesuffix(".weight").rpartition(".lora_")
        if not (name.startswith(PREFIX) and dot and part in ("A", "B")):
            raise UnsupportedModelError(f"adapter: expected matrices lora_A and lora_B of linear layers, got {name}")
        found.setdefault(module.removeprefix(PREFIX), {})[part] = tensor
    if not found:
        raise CheckpointError(f"adapter: expected matrices in {path / WEIGHTS}, got none")
    return found


def _merged(
    loaded: LoadedModel, name: str, weight: jax.Array, parts: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> jax.Array:
    a, b = (parts[part].astype(np.float32) for part in ("A", "B"))
    rank = a.shape[0]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    placed = None if loaded.sharding is None else loaded.sharding.placed[name]
    shape = tuple(weight.shape) if placed is None else placed.shape
    delta = scale * (b @ a) if b.shape[-1:] == a.shape[:1] else np.zeros(0, np.float32)
    if config.get("fan_in_fan_out"):
        delta = delta.T
    if delta.shape != shape:
        raise InvalidArgumentError(
            f"adapter: {name}: expected matrices for a weight of shape {shape}, got A {a.shape} and B {b.shape}"
        )
    sharding = loaded.sharding
    array = jax.device_put(delta, weight.sharding) if sharding is None else sharding.put(name, delta)
    return (weight.astype(jnp.float32) + array).astype(weight.dtype)
