"""Adapters of peft, from a text such as ``r=16,alpha=32,targets=q_proj+v_proj``."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from transformers import PreTrainedModel

from model_adapters.errors import InvalidArgumentError
from torchax_serve.validation.extras import require_package

KEYS = {"r": int, "alpha": float, "targets": str, "dropout": float, "rslora": str}
"""Keys of a text, with the types of their values."""


def import_peft() -> Any:
    """Returns the package peft.

    Raises:
        UnsupportedArgumentError: It is not installed.
    """
    require_package("peft", "lora", extra="train")
    return importlib.import_module("peft")


def parse_lora(text: str) -> dict[str, Any]:
    """Returns the arguments of peft's ``LoraConfig`` that a text means.

    Raises:
        InvalidArgumentError: an unknown key, or a value of another kind.
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (each.strip() for each in part.partition("="))
        if key not in KEYS or not equals:
            raise InvalidArgumentError(
                f"lora: expected KEY=VALUE with a key out of {', '.join(KEYS)}, got {part.strip()!r}"
            )
        try:
            found[key] = KEYS[key](value)
        except ValueError as error:
            raise InvalidArgumentError(f"lora: {key}: expected a number, got {value!r}; correct it") from error
    if found.get("rslora", "false") not in ("true", "false"):
        raise InvalidArgumentError(f"lora: rslora: expected true or false, got {found['rslora']!r}; correct it")
    rank = found.get("r", 8)
    if rank < 1:
        raise InvalidArgumentError(f"lora: r: expected a whole number >= 1, got {rank}; correct it")
    config: dict[str, Any] = {"r": rank, "lora_alpha": found.get("alpha", 2 * rank)}
    config |= {"lora_dropout": found.get("dropout", 0.0), "use_rslora": found.get("rslora") == "true"}
    if targets := found.get("targets"):
        config["target_modules"] = targets if targets == "all-linear" else targets.split("+")
    return config


def adapter_of(base: PreTrainedModel, lora: Any, seed: int) -> torch.nn.Module:
    """Returns `base` wrapped by peft with a new adapter, in float32.

    Args:
        base: The model.
        lora: A text (`parse_lora`), or a configuration of peft.
        seed: Seed of the adapter's first weights.

    Raises:
        InvalidArgumentError: an adapter that does not fit the model.
    """
    peft = import_peft()
    config = peft.LoraConfig(task_type="CAUSAL_LM", **parse_lora(lora)) if isinstance(lora, str) else lora
    if not isinstance(config, peft.LoraConfig):
        raise InvalidArgumentError(f"lora: expected a text or a LoraConfig of peft, got {type(lora).__name__}")
    if config.lora_dropout:
        raise InvalidArgumentError(_DROPOUT.format(config.lora_dropout))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft reads an attribute that transformers has renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        torch.manual_seed(seed)
        try:
            wrapped: torch.nn.Module = peft.get_peft_model(base, config)
        except (ValueError, TypeError) as error:
            names = sorted({n.rpartition(".")[2] for n, m in base.named_modules() if isinstance(m, torch.nn.Linear)})
            raise InvalidArgumentError(
                f"lora: expected targets among {', '.join(names)}, got {config.target_modules!r} "
                f"({' '.join(str(error).split())[:160]})"
            ) from error
    return wrapped


_DROPOUT = (
    "lora: lora_dropout: expected 0, got {}: random numbers would be constants of the compiled step; leave it out, or "
    "train with weight_decay"
)


def dropout_error(module: torch.nn.Module) -> str | None:
    """Returns an error if an adapter in `module` has dropout; None if it has none."""
    for config in getattr(module, "peft_config", {}).values():
        if dropout := getattr(config, "lora_dropout", 0.0):
            return _DROPOUT.format(dropout)
    return None
