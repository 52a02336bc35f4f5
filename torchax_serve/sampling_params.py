"""`SamplingParams`: the options of one request, and the range of every number in them.

This module imports neither jax nor torch: front ends and the scheduler build requests without either.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.validation.argument_checks import (
    MAX_INT,
    TOKEN_ID,
    ValueRange,
    bias_pairs,
    check_bad_words,
    check_logit_bias,
    check_text,
    check_token_ids,
    invalid,
    is_list,
    python_number,
    short_repr,
)
from torchax_serve.validation.argument_hints import hint
from torchax_serve.validation.sampling_hints import hint_for

if TYPE_CHECKING:
    from transformers import GenerationConfig

__all__ = [
    "ENGINE_LIMITS",
    "ENGINE_ONLY",
    "LIMITS",
    "MAX_SEED",
    "NEVER_A_TOKEN",
    "NO_PARAMS",
    "REMEDIES",
    "SAMPLING_ONLY",
    "TIME_TOKENS",
    "SamplingParams",
    "TimeTokens",
    "ValueRange",
    "bias_pairs",
    "check_bad_words",
    "check_logit_bias",
    "check_number",
    "check_token_ids",
    "invalid",
]

MAX_SEED = 2**64 - 1  # largest seed of torch.Generator.manual_seed
MAX_ANSWERS = 16384  # to one prompt, as in vLLM
SEEDS, _NUM_ANSWERS = ValueRange(0, MAX_SEED, is_integer=True), ValueRange(1, MAX_ANSWERS, is_integer=True)
MAX_STOPS = 64  # stop strings, and ids of end-of-sequence and stop tokens each
NEVER_A_TOKEN = -1
"""End-of-sequence id that no token has; for a config without one, transformers would use the model's."""

TIME_TOKENS = "_torchax_serve_time_tokens"
"""Attribute of a generation config with its `TimeTokens`; no config of transformers has a word for them."""

LIMITS: Mapping[str, ValueRange] = {
    "max_new_tokens": ValueRange(1, MAX_INT, is_integer=True),
    "min_new_tokens": ValueRange(0, MAX_INT, is_integer=True),
    "max_length": ValueRange(1, is_integer=True),
    "min_length": ValueRange(0, MAX_INT, is_integer=True),
    "num_return_sequences": ValueRange(1, is_integer=True),
    "temperature": ValueRange(0, low_open=True),
    "top_k": ValueRange(0, MAX_INT, is_integer=True),
    "top_p": ValueRange(0, 1, low_open=True),
    "min_p": ValueRange(0, 1),
    "top_h": ValueRange(0, 1, low_open=True),
    "typical_p": ValueRange(0, 1, low_open=True),
    "epsilon_cutoff": ValueRange(0, 1, high_open=True),
    "eta_cutoff": ValueRange(0, 1, high_open=True),
    "repetition_penalty": ValueRange(0, low_open=True),
    "no_repeat_ngram_size": ValueRange(0, MAX_INT, is_integer=True),
    "num_beams": ValueRange(1, MAX_INT, is_integer=True),
    "forced_bos_token_id": ValueRange(0, MAX_INT, is_integer=True),
}
"""Ranges of the options that are one number, by transformers' name: all values for which they are defined."""

MAX_LOGPROBS = 20
"""Most of the likeliest tokens whose log-probabilities a request may ask for, unless an engine has another limit."""

ENGINE_LIMITS: Mapping[str, ValueRange] = {
    "presence_penalty": ValueRange(-2, 2),
    "frequency_penalty": ValueRange(-2, 2),
    "logprobs": ValueRange(-1, MAX_INT, is_integer=True),
    "prompt_logprobs": ValueRange(-1, MAX_INT, is_integer=True),
    "priority": ValueRange(-MAX_INT - 1, MAX_INT, is_integer=True),
    "timeout_s": ValueRange(0, low_open=True),
    "queue_timeout_s": ValueRange(0, low_open=True),
}
"""Ranges of the options that are one number and that transformers does not have; those of log-probabilities and
penalties are OpenAI's, but that an engine's `max_logprobs` bounds the first."""

ENGINE_ONLY: Mapping[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "allowed_token_ids": None,
    "logprobs": None,
    "prompt_logprobs": None,
    "priority": 0,
    "timeout_s": None,
    "queue_timeout_s": None,
    "cache_salt": "",
    "adapter": None,
    "speculate": True,
}
"""Options that a generation config does not have, with the value that means no effect."""

SAMPLING_ONLY: Mapping[str, float | None] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
"""Options that only have an effect when tokens are sampled, with the value that switches them off."""

REMEDIES: Mapping[str, str] = {
    "temperature": "for greedy decoding set do_sample=False (in SamplingParams: temperature=0)",
    "top_k": "0 switches it off",
    "top_p": "1.0 switches it off",
    "typical_p": "1.0 switches it off",
    "epsilon_cutoff": "0 switches it off",
    "eta_cutoff": "0 switches it off",
    "repetition_penalty": "1.0 switches it off",
    "no_repeat_ngram_size": "0 switches it off",
    "num_beams": "1 switches beam search off",
    "presence_penalty": "0 switches it off",
    "frequency_penalty": "0 switches it off",
    "logprobs": "0 gives that of the sampled token only, -1 all, None none",
    "prompt_logprobs": "0 gives those of the prompt's tokens only, -1 all, None none",
    "priority": "0 is usual, lower runs first",
}


def check_number(name: str, value: object) -> None:
    """Raises `InvalidArgumentError` if `value` is outside the option's range.

    None (unset) passes.
    """
    limits = LIMITS[name] if name in LIMITS else ENGINE_LIMITS[name]
    if value is not None and value not in limits:
        raise invalid(name, limits.against(value), value, REMEDIES.get(name))


@dataclasses.dataclass(frozen=True)
class TimeTokens:
    """Time tokens of a request, whose rules are in `torchax_serve.sampling.time_tokens`.

    Attributes:
        begin: Id of the first one; all ids from there on are times, and the one before says that there are none.
        eos_id: End-of-sequence token, below which are the tokens of text.
        max_first: Most that the first token may be, counted from `begin`; None: any time.
        by_sum: Whether a time is sampled where all times together are likelier than any other token.
    """

    begin: int
    eos_id: int
    max_first: int | None = None
    by_sum: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request. None follows the model's ``generation_config``.

    A temperature above zero, or any other option that only has an effect on sampling, turns sampling on; a temperature
    of zero is greedy decoding.

    The last group of fields is honoured by requests on the engine, and refused by name for others.

    Raises:
        InvalidArgumentError: a value outside its range, or an unknown name (near matches are listed).
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_h: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    num_beams: int | None = None  # 1 switches off a checkpoint's beam search
    bad_words_ids: Sequence[Sequence[int]] | None = None
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Sequence[Any]] | None = None
    suppress_tokens: Sequence[int] | None = None
    stop: str | Sequence[str] | None = None  # strings that end the answer; not part of its text
    eos_token_id: int | Sequence[int] | None = None
    stop_token_ids: Sequence[int] | None = None  # further ids that end the answer; not part of its text
    ignore_eos: bool | None = None  # continue after an end-of-sequence token; stop_token_ids still end the answer
    n: int | None = None  # number of answers to one prompt
    seed: int | None = None  # same seed and request: same tokens, whatever else runs

    presence_penalty: float | None = None  # subtracted from the logits of tokens in the answer, -2 to 2
    frequency_penalty: float | None = None  # the same, times their number of occurrences, -2 to 2
    logit_bias: Mapping[int, float] | None = None  # added to the logits of token ids, -100 to 100
    allowed_token_ids: Sequence[int] | None = None  # the only ids that may be sampled
    logprobs: int | None = None  # log-probabilities of each new token and of this many likeliest ones; -1: all
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    priority: int | None = None  # lower runs first
    timeout_s: float | None = None  # seconds from submission after which the request ends
    queue_timeout_s: float | None = None  # seconds from submission after which it ends if it has not begun to run
    cache_salt: str | None = None  # cached prefixes are shared between requests of equal salt only
    adapter: str | None = None  # name of a loaded LoRA adapter; None: the model itself
    speculate: bool | None = None  # False: no drafts for this request, on an engine that speculates

    def __new__(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        """Raises InvalidArgumentError for an unknown field, with near matches."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in kwargs:
            if name not in names:
                near = " or ".join(difflib.get_close_matches(name, names) or names)
                remedy = hint_for(name) or hint(name, names) or f"did you mean {near}?"
                raise InvalidArgumentError(f"SamplingParams has no {short_repr(name)}; {remedy}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("do_sample", "ignore_eos", "speculate"):
            if getattr(self, name) is not None and type(getattr(self, name)) is not bool:
                raise invalid(name, "True or False", getattr(self, name))
        if self.bad_words_ids is not None:
            check_bad_words(self.bad_words_ids)
        if self.sequence_bias is not None:
            bias_pairs(self.sequence_bias)
        if self.suppress_tokens is not None:
            check_token_ids("suppress_tokens", self.suppress_tokens, may_be_empty=True)
        if self.eos_token_id is not None and self.eos_token_id not in TOKEN_ID:
            check_token_ids("eos_token_id", self.eos_token_id, most=MAX_STOPS)
        if self.stop_token_ids is not None:
            check_token_ids("stop_token_ids", self.stop_token_ids, may_be_empty=True, most=MAX_STOPS)
        self._check_stop_strings()
        if self.logit_bias is not None:
            check_logit_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            check_token_ids("allowed_token_ids", self.allowed_token_ids)
        if self.cache_salt is not None:
            if not isinstance(self.cache_salt, str):
                raise invalid("cache_salt", "a string", self.cache_salt, "None shares with all requests that have none")
            check_text("cache_salt", self.cache_salt)
        if self.adapter is not None and (not isinstance(self.adapter, str) or not self.adapter):
            raise invalid("adapter", "the name of a loaded adapter", self.adapter, "None is the model itself")
        self._check_together()

    def _check_numbers(self) -> None:
        fields = {field.name for field in dataclasses.fields(self)}
        names = [name for name in (*LIMITS, *ENGINE_LIMITS) if name in fields]
        for name in (*names, "n", "seed"):
            object.__setattr__(self, name, python_number(getattr(self, name)))
        for name in names:
            if not (name == "temperature" and self.is_greedy):
                check_number(name, getattr(self, name))
        if self.n is not None and self.n not in _NUM_ANSWERS:
            raise invalid("n", _NUM_ANSWERS, self.n)
        if self.seed is not None and self.seed not in SEEDS:
            raise invalid("seed", f"a whole number from 0 to {MAX_SEED}", self.seed, "None draws a fresh one")

    def _check_stop_strings(self) -> None:
        if self.stop is None:
            return
        texts = [self.stop] if isinstance(self.stop, str) else self.stop
        if not is_list(texts) or not all(isinstance(text, str) and text for text in texts[: MAX_STOPS + 1]):
            raise invalid("stop", "a non-empty string, or a list of them", self.stop)
        if len(texts) > MAX_STOPS:
            raise InvalidArgumentError(
                f"stop: expected at most {MAX_STOPS} strings, got {len(texts)}; shorten the list"
            )
        for text in texts:
            check_text("stop", text)

    def _check_together(self) -> None:
        if None not in (self.min_new_tokens, self.max_new_tokens) and self.min_new_tokens > self.max_new_tokens:  # type: ignore[operator]
            raise invalid("min_new_tokens", f"at most max_new_tokens={self.max_new_tokens}", self.min_new_tokens)
        if self.do_sample and self.is_greedy:
            raise invalid("temperature", "> 0 with do_sample=True", self.temperature, REMEDIES["temperature"])
        if self.do_sample is False and not self.is_greedy and self._sampling_options:
            name, value = next(iter(self._sampling_options.items()))
            raise invalid(name, "None with do_sample=False", value, "greedy decoding would ignore it")

    @property
    def is_greedy(self) -> bool:
        """Whether the temperature is zero, which means greedy decoding."""
        return self.temperature is not None and not isinstance(self.temperature, bool) and self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty for None."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def _sampling_options(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in SAMPLING_ONLY}
        return {name: value for name, value in given.items() if value is not None and value != SAMPLING_ONLY[name]}

    def engine_only(self) -> dict[str, Any]:
        """Returns the options set here, by name, that only the engine honours."""
        given = {name: getattr(self, name) for name in ENGINE_ONLY}
        return {name: value for name, value in given.items() if value is not None and value != ENGINE_ONLY[name]}

    def merged_into(self, base: GenerationConfig) -> GenerationConfig:
        """Returns a copy of `base` with these options, except `seed`.

        Those that `engine_only` names are left to the engine.

        Raises:
            InvalidArgumentError: several answers (`n`) with greedy decoding, which would be equal.
        """
        return self.applied_to(copy.deepcopy(base))

    def applied_to(self, config: Any) -> Any:
        """Sets these options in a config, as `merged_into`, and returns it."""
        for name, value in vars(self).items():
            value = self.stop_strings if name == "stop" else value
            if name in _NOT_IN_CONFIGS or name in ENGINE_ONLY or value is None or value == ():
                continue
            setattr(config, _RENAMED.get(name, name), _as_transformers_takes_it(name, value))
        self._set_ends(config)
        if self.max_new_tokens is not None:
            config.max_length = None
        if self.is_greedy:
            config.do_sample, config.temperature = False, None
            if self.num_beams is None and (config.num_beams or 1) > 1:
                config.num_beams = 1
        elif self.do_sample is None and (self.temperature is not None or self._sampling_options):
            config.do_sample = True
        if (config.num_return_sequences or 1) > 1 and not config.do_sample:
            remedy = "greedy answers are all the same: give a temperature, or n=1"
            raise invalid("n", "1 with greedy decoding", config.num_return_sequences, remedy)
        return config

    def to_generation_config(self, base: GenerationConfig) -> GenerationConfig:
        """Returns a copy of `base` with the options set here, except `seed`.

        A generation config does not have a seed.

        Raises:
            UnsupportedArgumentError: an option that only the engine honours is set (`engine_only`).
            InvalidArgumentError: several answers (`n`) with greedy decoding, which would be equal.
        """
        if engine_only := self.engine_only():
            raise UnsupportedArgumentError(
                f"{', '.join(engine_only)}: expected options that a generation config has, "
                f"got {engine_only}; leave them out, or send the request to the engine"
            )
        return self.merged_into(base)

    def _set_ends(self, config: GenerationConfig) -> None:
        """Applies `ignore_eos` and `stop_token_ids` to the end-of-sequence tokens of `config`."""
        if not (self.ignore_eos or self.stop_token_ids):
            return
        own = config.eos_token_id
        own = own.tolist() if hasattr(own, "tolist") else own
        ids = [] if own is None or self.ignore_eos else [own] if isinstance(own, int) else list(own)
        ids = list(dict.fromkeys([*ids, *(int(token_id) for token_id in self.stop_token_ids or ())]))
        config.eos_token_id = ids or [NEVER_A_TOKEN]


NO_PARAMS = SamplingParams()
"""Parameters without any option."""
_NOT_IN_CONFIGS = frozenset({"seed", "stop_token_ids", "ignore_eos"})
_RENAMED: Mapping[str, str] = {"n": "num_return_sequences", "stop": "stop_strings"}


def _as_transformers_takes_it(name: str, value: Any) -> Any:
    if name == "bad_words_ids":
        return [list(word) for word in value]
    if name == "sequence_bias":
        return [[list(ids), bias] for ids, bias in bias_pairs(value)]
    if name in LIMITS and not LIMITS[name].is_integer:
        return float(value)  # transformers refuses a temperature or penalty of type int
    return list(value) if name in ("suppress_tokens", "stop") or isinstance(value, tuple) else value
