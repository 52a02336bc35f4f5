"""Reads LoRA adapters of peft: configuration and matrices A and B (Hu et al., 2021)."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from model_adapters.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
READ = frozenset(
    [
        "peft_type",
        "r",
        "rank_pattern",
        "lora_alpha",
        "alpha_pattern",
        "use_rslora",
        "init_lora_weights",
        "base_model_name_or_path",
    ]
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
        "fan_in_fan_out",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "loftq_config",
        "eva_config",
        "corda_config",
        "runtime_config",
        "ensure_weight_tying",
        "megatron_core",
        "qalora_group_size",
        "lora_ga_config",
    ]
)
"""Fields that say how an adapter was made or trained; its modules are those of its tensors, and a module's class says
whether its weight is transposed, as in peft."""
INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of ``init_lora_weights`` that leave the weights of the base as they are."""
NEUTRAL: tuple[Any, ...] = (None, False, "none", [], {}, 0)
PREFIX = "base_model.model."
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class AdapterFiles:
    """The files of an adapter.

    Attributes:
        path: Their folder.
        config: The configuration.
        factors: Matrices by module: ``A`` float[rank, in] and ``B`` float[out, rank].
    """

    path: Path
    config: Mapping[str, Any]
    factors: Mapping[str, Mapping[str, np.ndarray]]

    @property
    def base(self) -> str:
        """Name of the model that it was made for, as the configuration has it."""
        return str(self.config.get("base_model_name_or_path") or "another model")

    def matrices(self, module: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns A float32[rank, in] and the scale times B, float32[out, rank], of a module."""
        a, b = (self.factors[module][part].astype(np.float32) for part in ("A", "B"))
        rank, alpha = a.shape[0], self.stated("alpha_pattern", "lora_alpha", module)
        return a, b * np.float32(alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))

    def stated(self, patterns: str, default: str, module: str) -> Any:
        """Returns what the configuration says of a module, by peft's rule.

        That is the value of the first pattern that matches the module's name or ends it behind a dot, else the default.

        Args:
            patterns: Field with values by pattern, "rank_pattern" or "alpha_pattern".
            default: Field with the value of all other modules.
            module: Name of the module.
        """
        for pattern, value in (self.config.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return self.config.get(default)


def read_adapter(path: str | os.PathLike[str], remedy: str) -> AdapterFiles:
    """Reads the adapter in a folder.

    Args:
        path: The folder.
        remedy: What to do with an adapter of another kind, for errors.

    Raises:
        InvalidArgumentError: no path, or no adapter there.
        CheckpointError: its files are not readable.
        UnsupportedModelError: an adapter of a kind that is not supported.
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgumentError(f"adapter: expected the path of a folder, got {path!r}")
    folder = Path(path)
    adapter = AdapterFiles(folder, _config(folder, remedy), _factors(folder))
    _check_ranks(adapter)
    return adapter


def _config(path: Path, remedy: str) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"adapter: expected a folder with {CONFIG} as peft writes it, got {path} ({error})"
        ) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise UnsupportedModelError(f"adapter: expected peft_type LORA, got {kind}; {remedy}")
    for name, value in config.items():
        if name not in READ | WITHOUT_EFFECT and value not in NEUTRAL:
            raise UnsupportedModelError(f"adapter: {name}={value!r} is not supported here; {remedy}")
    init = config.get("init_lora_weights")
    if init not in INITS:  # PiSSA and others: the adapter belongs to a base from which they have taken a part
        raise UnsupportedModelError(
            f"adapter: init_lora_weights={init!r} changes the weights of its base, which is not done here; {remedy}"
        )
    for patterns in ("rank_pattern", "alpha_pattern"):
        _check_patterns(path / CONFIG, patterns, config.get(patterns))
    alphas = [config.get("lora_alpha"), *(config.get("alpha_pattern") or {}).values()]
    for alpha in alphas:
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise InvalidArgumentError(
                f"adapter: expected numbers lora_alpha and alpha_pattern in {path / CONFIG}, got {alpha!r}"
            )
    if not isinstance(scaled := config.get("use_rslora"), bool | None):
        raise InvalidArgumentError(f"adapter: expected true or false for use_rslora in {path / CONFIG}, got {scaled!r}")
    return config


def _check_patterns(file: Path, field: str, patterns: Any) -> None:
    """Raises InvalidArgumentError unless `patterns` are values by regular expression, or none."""
    if patterns is not None and not isinstance(patterns, dict):
        raise InvalidArgumentError(f"adapter: expected {field} by names of modules in {file}, got {patterns!r}")
    for pattern in patterns or {}:
        try:
            re.compile(pattern)
        except re.error as error:
            raise InvalidArgumentError(
                f"adapter: expected regular expressions in {field} of {file}, got {pattern!r} ({error})"
            ) from error


def _factors(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Returns the matrices A and B by module."""
    try:
        tensors = load_file(path / WEIGHTS)
    except AttributeError as error:  # safetensors has the type, NumPy lacks it, such as float8_e4m3fn
        raise UnsupportedModelError(
            f"adapter: expected matrices in {', '.join(DTYPES)} in {path / WEIGHTS}, got another type ({error})"
        ) from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"adapter: expected {WEIGHTS} in {path}, got none that is readable ({error})") from error
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        module, dot, part = name.removesuffix(".weight").rpartition(".lora_")
        if not (name.startswith(PREFIX) and dot and part in ("A", "B")):
            raise UnsupportedModelError(f"adapter: expected matrices lora_A and lora_B of linear layers, got {name}")
        if str(tensor.dtype) not in DTYPES or tensor.ndim != 2:
            raise UnsupportedModelError(
                f"adapter: {name}: expected a matrix in {', '.join(DTYPES)}, got {tensor.dtype}{list(tensor.shape)}"
            )
        found.setdefault(module.removeprefix(PREFIX), {})[part] = tensor
        if not np.isfinite(tensor.astype(np.float32)).all():
            raise CheckpointError(f"adapter: {name}: expected finite numbers, got NaN or infinity; get the file again")
    if not found:
        raise CheckpointError(f"adapter: expected matrices in {path / WEIGHTS}, got none")
    for module, parts in found.items():
        if set(parts) != {"A", "B"}:
            raise CheckpointError(f"adapter: {module}: expected lora_A and lora_B, got lora_{next(iter(parts))} alone")
        if parts["B"].shape[1] != parts["A"].shape[0]:
            shapes = f"A {parts['A'].shape} and B {parts['B'].shape}"
            raise CheckpointError(f"adapter: {module}: expected matrices of one rank, got {shapes}")
    return found


def _check_ranks(adapter: AdapterFiles) -> None:
    """Raises CheckpointError for a rank other than the configuration's, which scales mean."""
    for module, parts in adapter.factors.items():
        rank, stated = parts["A"].shape[0], adapter.stated("rank_pattern", "r", module)
        if rank != stated:
            raise CheckpointError(
                f"adapter: {module}: expected a rank of {stated} as {CONFIG} has it (r, rank_pattern), got matrices of "
                f"rank {rank}; get both files again"
            )
