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
    WhisperTimeStampLogitsProcessor,
)
from transformers.generation.logits_process import WhisperNoSpeechDetection

from torchax_serve.sampling_params import TIME_TOKENS, TimeTokens

OURS = "torchax_serve.generation.jax_model"

_CHANGE_SCORES = (
    "sequence_bias",
    "bad_words_ids",
    "no_repeat_ngram_size",
    "min_length",
    "min_new_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
)
"""Options whose processors come before those that Whisper's ``generate`` makes."""


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


def absorb_processors(
    config: GenerationConfig, processors: Sequence[Any] | None, prompt_len: int
) -> tuple[list[Any], list[Any]]:
    """Processors that samplers have words for become options of `config`; returns the others.

    Whisper's ``generate`` turns options into processors of suppressed tokens, and transformers makes the same
    processors of these options. The rules of time tokens become the attribute `TIME_TOKENS`, which transformers' own
    loop does not read: their processor stays for it.

    Returns:
        The processors that transformers' loop needs, and those of them that samplers have no words for.
    """
    kept: list[Any] = []
    custom: list[Any] = []
    for processor in processors or ():
        name = _option_of(processor, config, prompt_len)
        times = _time_tokens_of(processor, prompt_len)
        if config.remove_invalid_values:  # which would come before it, and is behind it here
            name = times = None
        if times is not None:
            setattr(config, TIME_TOKENS, times)
        if times is not None or _is_computed(processor, config):
            kept.append(processor)
        elif name is None:
            kept.append(processor)
            custom.append(processor)
        else:
            ids: torch.Tensor = getattr(processor, name)
            setattr(config, name, ids.tolist())
    return kept, custom


def _is_computed(processor: Any, config: GenerationConfig) -> bool:
    """Returns whether `processor` finds silence, and changes no score.

    `torchax_serve.generation.whisper_fallback` has computed its probability. Of a prompt of one token the processor
    reads the scores that the loop gives it, which are those of the model if nothing has changed them before.
    """
    if type(processor) is not WhisperNoSpeechDetection:
        return False
    is_changed = any(getattr(config, name) for name in _CHANGE_SCORES) or config.repetition_penalty not in (None, 1.0)
    return processor.start_of_trans_offset > 1 or not is_changed


def _time_tokens_of(processor: Any, prompt_len: int) -> TimeTokens | None:
    """Returns the rules that `processor` enforces; None for others and another first token."""
    if type(processor) is not WhisperTimeStampLogitsProcessor or processor.begin_index != prompt_len:
        return None
    if not isinstance(processor.eos_token_id, int):
        return None
    return TimeTokens(
        begin=processor.timestamp_begin,
        eos_id=processor.eos_token_id,
        max_first=processor.max_initial_timestamp_index,
        by_sum=bool(processor._detect_timestamp_from_logprob),
    )


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
