"""Supports classes that override ``generate``, such as Whisper's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation import (
    GenerationConfig,
    GenerationMixin,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

OURS = "torchax_serve.generation.jax_model"


def overrides_generate(model: Any) -> bool:
    """Returns whether the model's original class overrides ``generate``."""
    classes = [cls for cls in type(model).__mro__ if "generate" in vars(cls) and cls.__module__ != OURS]
    return bool(classes) and classes[0] is not GenerationMixin


def without_model_options(model: Any, config: GenerationConfig) -> GenerationConfig:
    """Returns `config` without attributes that `GenerationConfig` does not define.

    The model's own ``generate`` has consumed them; no sampling loop reads them.
    """
    if not overrides_generate(model):
        return config
    declared = vars(GenerationConfig())
    left = copy.copy(config)
    for name in [name for name in vars(config) if name not in declared and not name.startswith("_")]:
        delattr(left, name)
    return left


def absorb_suppression(config: GenerationConfig, processors: Sequence[Any] | None, prompt_len: int) -> list[Any]:
    """Processors that `config` has words for become options of it; returns the others.

    Whisper's ``generate`` turns these options into processors, and transformers makes the same processors of them.
    """
    rest = []
    for processor in processors or ():
        name = _option_of(processor, config, prompt_len)
        if name is None or config.remove_invalid_values:  # which would come before it, and is behind it here
            rest.append(processor)
        else:
            ids: torch.Tensor = getattr(processor, name)
            setattr(config, name, ids.tolist())
    return rest


def _option_of(processor: Any, config: GenerationConfig, prompt_len: int) -> str | None:
    """Returns the option that `processor` implements, unless `config` sets another value of it."""
    if type(processor) is SuppressTokensLogitsProcessor:
        name = "suppress_tokens"
    elif type(processor) is SuppressTokensAtBeginLogitsProcessor:
        begin = prompt_len if prompt_len > 1 or config.forced_bos_token_id is None else prompt_len + 1
        if processor.begin_index != begin:
            return None
        name = "begin_suppress_tokens"
    else:
        return None
    return name if getattr(config, name) is None else None
