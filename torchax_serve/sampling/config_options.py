"""Options of a generation config that sampling on the device honours, and their values.

Every attribute of a config is in one of five places: honoured by the sampler, left to the caller's loop, without effect
unless another option is set, without influence on tokens, or none of these. `unsupported_options` reports the last if
they are set, so that an attribute of a newer transformers is never ignored.
"""

from __future__ import annotations

import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchax_serve.sampling_params import (
    LIMITS,
    SAMPLING_ONLY,
    SamplingParams,
    ValueRange,
    bias_pairs,
    check_bad_words,
    check_number,
    check_token_ids,
    invalid,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig

PLAN_OPTIONS = frozenset(
    {
        *SAMPLING_ONLY,
        "do_sample",
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "eos_token_id",
        "pad_token_id",
        "sequence_bias",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "bad_words_ids",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "renormalize_logits",
    }
)
"""Honoured by `RowSamplingParams`."""

CALLER_OPTIONS = frozenset(
    {
        "bos_token_id",
        "decoder_start_token_id",
        "num_return_sequences",
        "output_logits",
        "output_scores",
        "return_dict_in_generate",
        "stop_strings",
    }
)
"""Outside of sampling proper: whoever drives the loop must honour these."""

DEPENDENT_OPTIONS: Mapping[str, str] = {
    "early_stopping": "num_beams",
    "length_penalty": "num_beams",
    "diversity_penalty": "num_beam_groups",
    "low_memory": "penalty_alpha",
    "max_cache_len": "cache_implementation",
    "cache_config": "cache_implementation",
    "max_matching_ngram_size": "prompt_lookup_num_tokens",
    "num_assistant_tokens": "assistant_model",
    "num_assistant_tokens_schedule": "assistant_model",
    "assistant_confidence_threshold": "is_assistant",
    "assistant_lookbehind": "assistant_model",
    "target_lookbehind": "assistant_model",
}
"""No effect in transformers unless the option (or ``generate`` argument) next to it is set; that one is reported."""

INERT_OPTIONS = frozenset({"transformers_version", "compile_config", "disable_compile"})
"""Never change a token: bookkeeping, and how torch compiles its own forward."""

NEUTRAL_VALUES: Mapping[str, Any] = {"guidance_scale": 1.0}
"""Values that mean "off" where transformers has no default: there, None and False mean it too."""


def unsupported_options(config: GenerationConfig, caller_honours: Collection[str] = CALLER_OPTIONS) -> list[str]:
    """Returns the sorted names of options set in `config` that the sampler does not honour.

    Args:
        config: Config as ``generate`` prepares it, or any other.
        caller_honours: Options outside of `PLAN_OPTIONS` that the caller's loop honours itself.
    """
    # The table of defaults is what transformers' own generate fills unset options with.
    neutral = {**config._get_default_generation_params(), **NEUTRAL_VALUES}
    unsupported = []
    for name, value in vars(config).items():
        if name in PLAN_OPTIONS or name in caller_honours or name in DEPENDENT_OPTIONS or name in INERT_OPTIONS:
            continue
        if name.startswith("_") or value is None:  # private names: hashes, tensors of token ids
            continue
        default = neutral.get(name)
        if not (value is False if default is None else value == default):
            unsupported.append(name)
    return sorted(unsupported)


def validate_options(options: GenerationConfig | SamplingParams) -> None:
    """Checks every option that the sampler honours, before anything is compiled.

    Raises:
        InvalidArgumentError: (a ValueError) names the option, the values it takes, the one it got, and a remedy.
    """
    if isinstance(options, SamplingParams):
        return  # checked when it was made, and frozen since
    for name in LIMITS:
        value = getattr(options, name, None)
        # transformers lets greedy configs carry switched-off sampling options, zero being a common way to write that.
        if not (name in SAMPLING_ONLY and not options.do_sample and _is_zero(value)):
            check_number(name, value)
    for name in ("do_sample", "remove_invalid_values", "renormalize_logits"):
        if getattr(options, name) not in (None, True, False):
            raise invalid(name, "True or False", getattr(options, name))
    if options.bad_words_ids is not None:
        check_bad_words(options.bad_words_ids)
    if options.sequence_bias is not None:
        bias_pairs(options.sequence_bias)
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        if getattr(options, name) is not None:
            check_token_ids(name, getattr(options, name), may_be_empty=True)
    if options.forced_eos_token_id is not None:
        check_token_ids("forced_eos_token_id", id_list(options.forced_eos_token_id))
    if options.exponential_decay_length_penalty is not None:
        _check_decay(options.exponential_decay_length_penalty)


def id_list(ids: Any) -> list[int]:
    """Returns token ids, given as a number, a sequence, an array or None, as a list."""
    if ids is None:
        return []
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    return list(ids) if isinstance(ids, Sequence) else [ids]


def _is_zero(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and value == 0


def _check_decay(value: Any) -> None:
    is_pair = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2
    if not is_pair or value[0] not in ValueRange(0, is_integer=True) or value[1] not in ValueRange(0, low_open=True):
        raise invalid("exponential_decay_length_penalty", "(start index >= 0, decay factor > 0)", value)
