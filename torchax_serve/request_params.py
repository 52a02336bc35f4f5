"""`RequestParams`: all options of one request, resolved once, as plain values.

Every attribute of a generation config is in one of five places: honoured by the sampler, left to the caller's loop,
without effect unless another option is set, without influence on tokens, or none of these. `unsupported_options`
reports the last if they are set, so that an attribute of a newer transformers is never ignored.

This module imports neither jax nor torch.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.sampling_params import (
    LIMITS,
    MAX_SEED,
    NEVER_A_TOKEN,
    NO_PARAMS,
    SAMPLING_ONLY,
    SEEDS,
    TIME_TOKENS,
    SamplingParams,
    TimeTokens,
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
"""Honoured by `RequestParams`."""

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

PROMPT_OPTIONS = frozenset({"encoder_no_repeat_ngram_size"})
"""Options that `RequestParams.with_encoder_ids` honours: for requests whose prompt is known when they are made."""

ENGINE_OPTIONS = CALLER_OPTIONS | {"use_cache", "cache_implementation"}
"""Options of a generation config outside of sampling that mean nothing to an engine, or that it honours elsewhere."""

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
    size, sizes = options.encoder_no_repeat_ngram_size, LIMITS["no_repeat_ngram_size"]
    if size is not None and size not in sizes:
        raise invalid("encoder_no_repeat_ngram_size", sizes.against(size), size, "0 switches it off")
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


Level = Literal["greedy", "sampled", "penalties", "history"]
"""Sampling programs; see `torchax_serve.sampling.types.LEVELS`."""

NEUTRAL: Mapping[str, float] = {
    "temperature": 0.0,
    "top_h": 0.0,
    "top_p_tail": 0.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Options that are one number of a row, with the value that asks for nothing. A temperature of 0 is greedy decoding."""

SMALLEST_TEMPERATURE = 1e-30  # scores divided by less overflow float32
COLDEST = 1e-5
"""Temperature below which requests of the engine are greedy, as in vLLM: equal scores do not make them random."""
MAX_NGRAM_SIZE = 2**30  # longer ones than any row; twice as many are still an int32


@dataclasses.dataclass(frozen=True, eq=False)
class TokenBias:
    """Biases of logits by token; sparse, so that waiting requests take little memory.

    Attributes:
        ids: int32[n], tokens; one may occur several times.
        added: float32[n], added to the logits of `ids`.
        banned: int32[m], tokens that may never be sampled.
        allowed: int32[k], the only tokens that may be sampled; None: all.
    """

    ids: np.ndarray
    added: np.ndarray
    banned: np.ndarray
    allowed: np.ndarray | None

    def dense(self, vocab_size: int) -> np.ndarray:
        """Returns float32[vocab_size]: what is added to each logit, -inf at banned tokens."""
        bias = np.zeros(vocab_size, np.float32)
        np.add.at(bias, self.ids, self.added)
        if self.allowed is not None:
            is_allowed = np.zeros(vocab_size, bool)
            is_allowed[self.allowed] = True
            bias[~is_allowed] = -math.inf
        bias[self.banned] = -math.inf
        return bias

    @property
    def is_zero(self) -> bool:
        """Whether it changes no logit."""
        ids, place = np.unique(self.ids, return_inverse=True)
        sums = np.zeros(len(ids), np.float32)
        np.add.at(sums, place, self.added)
        return self.allowed is None and not len(self.banned) and not sums.any()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RequestParams:
    """The options of one request, with every default filled in.

    Attributes:
        given: Options of the caller, for the loops of ``generate``.
        config: Generation config with them, which ``generate`` takes.
        unsupported: Names of the options in it that no engine honours; then only those of the first group are set.
        invalid: Error of an option that is out of its range, for the engine; None: all are in theirs.
        num_answers: Number of answers to the prompt.
        max_new_tokens: Maximum number of new tokens.
        max_len: Maximum number of tokens of prompt and answer, in place of `max_new_tokens`; None: that counts.
        stop_ids: Tokens that end the request.
        stop_strings: Texts that end it; the text layer looks for them.
        seed: Seed of the random draws, which depend on nothing else than it and the tokens; None: a random one.
        temperature, top_h, top_p_tail, min_p, typical_p, epsilon_cutoff, eta_cutoff: As in `NEUTRAL`.
        repetition_penalty, presence_penalty, frequency_penalty: As in `NEUTRAL`.
        top_k: Number of likeliest tokens to sample from; 0: all.
        min_new_tokens: Number of new tokens before one of `stop_ids` may be sampled.
        min_len: The same as tokens of prompt and answer together.
        forbidden_first: Tokens that may not be the first new one.
        suppressed: Tokens that may never be sampled.
        token_bias: Additive bias of logits; None: no bias.
        logprobs: Number of top log-probabilities to return besides the sampled token's; None: no log-probabilities.
        prompt_logprobs: The same of the prompt's tokens.
        ngram_size: Size of n-grams that may not repeat; 0: any may.
        sequences: Token ids and the bias of the last one behind the others; -inf for bad words. At least two tokens.
        encoder_ngram_size: Size of n-grams of the encoder's input, or of the prompt, that may not occur; 0: any may.
        num_encoder_ngrams: How many of `sequences`, the first ones, are such n-grams; of one token, too.
        forced_first: Token that the first new one must be if the prompt is one token; None: any.
        forced_last: Tokens of which the last one before the maximum length must be one; empty: any.
        decay: Number of new tokens from which scores of end-of-sequence tokens rise, and the factor; None: never.
        remove_invalid_values: Whether nan and infinities are replaced.
        renormalize_logits: Whether scores are normalized to log-probabilities.
        time_tokens: Time tokens, whose rules are kept; None: there are none.
        scores_logprobs: Whether log-probabilities are those of the processed scores, at temperature 1.
    """

    given: SamplingParams = NO_PARAMS
    config: Any = dataclasses.field(default=None, repr=False)
    unsupported: tuple[str, ...] = ()
    invalid: InvalidArgumentError | None = None
    num_answers: int = 1
    max_new_tokens: int = 1
    max_len: int | None = None
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = 0

    temperature: float = 0.0
    top_h: float = 0.0
    top_p_tail: float = 0.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_k: int = 0
    min_new_tokens: int = 0
    min_len: int = 0
    forbidden_first: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    token_bias: TokenBias | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    ngram_size: int = 0
    sequences: tuple[tuple[tuple[int, ...], float], ...] = ()
    encoder_ngram_size: int = 0
    num_encoder_ngrams: int = 0
    forced_first: int | None = None
    forced_last: tuple[int, ...] = ()
    decay: tuple[int, float] | None = None
    remove_invalid_values: bool = False
    renormalize_logits: bool = False
    time_tokens: TimeTokens | None = None
    scores_logprobs: bool = False

    @classmethod
    def resolve(
        cls, given: SamplingParams, defaults: Any, *, max_new_tokens: int | None = None, seed: int | None = None
    ) -> Self:
        """Returns the options of a caller, with those of a generation config for what is None.

        Options that the engine cannot honour are named in the result, or are its `invalid`: another loop may take them.

        Args:
            given: Options of the caller.
            defaults: Generation config of the model, which stays as it is.
            max_new_tokens: Most new tokens where neither limits them.
            seed: In place of that of the caller.

        Raises:
            InvalidArgumentError: several answers with greedy decoding, which would be equal.
        """
        config = given.applied_to(copy.copy(defaults))
        stops, config.stop_strings = config.stop_strings or (), None
        if config.max_new_tokens is None and config.max_length is None:
            config.max_new_tokens = max_new_tokens
        seed = given.seed if seed is None else seed
        more: dict[str, Any] = {"stop_strings": (stops,) if isinstance(stops, str) else tuple(stops)}
        if unsupported := unsupported_options(config, ENGINE_OPTIONS | PROMPT_OPTIONS):
            return cls(**more, **_ends(config), seed=seed, unsupported=tuple(unsupported), given=given, config=config)
        try:
            validate_options(config)
            return cls(**more, **_engine_values(config, given, seed))
        except InvalidArgumentError as error:
            num_answers = config.num_return_sequences or 1
            return cls(**more, num_answers=num_answers, seed=seed, invalid=error, given=given, config=config)

    @classmethod
    def of_generation_config(
        cls, config: GenerationConfig, given: SamplingParams = NO_PARAMS, *, seed: int | None = None
    ) -> Self:
        """Returns the options of a generation config, for a request to the engine.

        Args:
            config: All options that it has a place for, the caller's merged into the model's.
            given: Options that only the engine honours, such as `logit_bias`; the others are not read.
            seed: As the attribute.

        Raises:
            InvalidArgumentError: a value is out of its range.
            UnsupportedArgumentError: an option is set that the engine does not support.
        """
        validate_options(config)
        if unsupported := unsupported_options(config, ENGINE_OPTIONS | PROMPT_OPTIONS):
            raise UnsupportedArgumentError(
                f"{', '.join(unsupported)}: expected options that requests of a batch can have each for itself, got "
                f"{ {name: getattr(config, name) for name in unsupported} }; leave them out, or call generate()"
            )
        return cls(**_engine_values(config, given, seed))

    @classmethod
    def of_checked(cls, config: GenerationConfig, *, seed: int = 0) -> Self:
        """Returns the options of a checked config (`validate_options`), for ``generate``."""
        return cls(**_values(config, NO_PARAMS, seed))

    def check_tokens(self, vocab_size: int) -> None:
        """Checks the options against the columns of the logits.

        Raises:
            InvalidArgumentError: a value is out of its range, a token outside the vocabulary, or none may be sampled.
        """
        if self.invalid is not None:
            raise self.invalid
        self.check_ids(vocab_size)
        if self.forbids_all(vocab_size):
            raise InvalidArgumentError(
                f"expected at least one token of {vocab_size} that may be chosen, got options that forbid all; look at "
                "allowed_token_ids, suppress_tokens, bad_words_ids and sequence_bias"
            )

    def check_ids(self, vocab_size: int) -> None:
        """Raises InvalidArgumentError for a token outside the vocabulary."""
        config, given = self.config, self.given
        if config.sequence_bias is not None:
            tokens = [token for ids, _ in bias_pairs(config.sequence_bias) for token in ids]
            _check_below("sequence_bias", tokens, vocab_size)
        _check_below("bad_words_ids", [token for word in config.bad_words_ids or () for token in word], vocab_size)
        _check_below("logit_bias", given.logit_bias or (), vocab_size)
        _check_below("allowed_token_ids", given.allowed_token_ids or (), vocab_size)
        _check_inside("forced_bos_token_id", () if self.forced_first is None else [self.forced_first], vocab_size)
        _check_inside("forced_eos_token_id", list(self.forced_last), vocab_size)
        if self.decay is not None:
            _check_inside("eos_token_id", list(self.stop_ids), vocab_size)

    def with_num_top(self, max_logprobs: int, vocab_size: int) -> Self:
        """Returns the options with the numbers of log-probabilities that -1 stands for.

        Args:
            max_logprobs: Most that a request may ask for; -1: the whole vocabulary.
            vocab_size: Number of columns of the logits.

        Raises:
            InvalidArgumentError: it asks for more.
        """
        asked = {"logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
        most = vocab_size if max_logprobs == -1 else max_logprobs
        for name, number in asked.items():
            if number is not None and (vocab_size if number == -1 else number) > most:
                shown = "-1, those of the whole vocabulary" if number == -1 else number
                raise InvalidArgumentError(
                    f"{name}: expected at most {most}, got {shown}; EngineOptions(max_logprobs=...) allows more"
                )
        if -1 not in asked.values():
            return self
        logprobs, prompt = (vocab_size if number == -1 else number for number in asked.values())
        return dataclasses.replace(self, logprobs=logprobs, prompt_logprobs=prompt)

    def with_encoder_ids(self, ids: Sequence[int]) -> Self:
        """Returns the options with n-grams of the encoder's input, or the prompt, as bad words."""
        if not (size := self.encoder_ngram_size) or self.num_encoder_ngrams:
            return self
        ngrams = dict.fromkeys(zip(*(ids[at:] for at in range(size)), strict=False))
        sequences = (*((ngram, -np.inf) for ngram in ngrams), *self.sequences)
        return dataclasses.replace(self, sequences=sequences, num_encoder_ngrams=len(ngrams))

    def forbids_all(self, vocab_size: int) -> bool:
        """Returns whether no token may ever be sampled."""
        if self.token_bias is None and not self.suppressed:
            return False
        bias = np.zeros(vocab_size, np.float32) if self.token_bias is None else self.token_bias.dense(vocab_size)
        bias[[token for token in self.suppressed if token < vocab_size]] = -math.inf
        return bool((bias == -math.inf).all())

    @property
    def depends_on_order(self) -> bool:
        """Whether an option depends on more of the tokens so far than their counts."""
        return bool(
            self.ngram_size
            or self.sequences
            or self.encoder_ngram_size
            or self.forced_first is not None
            or self.forced_last
            or self.decay is not None
            or self.remove_invalid_values
            or self.renormalize_logits
            or self.time_tokens is not None
            or self.scores_logprobs
        )

    @property
    def level(self) -> Level:
        """The lowest level that covers the request once it may end."""
        if self.depends_on_order or self.top_h > 0:
            return "history"
        given = {name for name, neutral in NEUTRAL.items() if getattr(self, name) != neutral}
        if self.token_bias is not None or self.suppressed or given - {"temperature", "top_p_tail", "min_p"}:
            return "penalties"
        return "sampled" if self.temperature > 0 else "greedy"

    def most_new_tokens(self, prompt_len: int) -> int:
        """Returns the maximum number of new tokens behind a prompt."""
        return self.max_new_tokens if self.max_len is None else max(1, self.max_len - prompt_len)

    def needs_tables(self, prompt_len: int) -> bool:
        """Returns whether the request has rows in `SamplerTables`."""
        return self.level in ("penalties", "history") or self.num_tokens_with_tables(prompt_len) > 0

    def num_tokens_with_tables(self, prompt_len: int) -> int:
        """Returns the number of first new tokens that need the level "penalties" in any case."""
        return max(self.num_forced_tokens(prompt_len), 1 if self.forbidden_first else 0)

    def num_forced_tokens(self, prompt_len: int) -> int:
        """Returns the number of new tokens before the request may end."""
        return max(self.min_new_tokens, self.min_len - prompt_len, 0) if self.stop_ids else 0

    def num_unspeculated(self, prompt_len: int) -> float:
        """Returns the number of new tokens that need more than the logits of the token before."""
        return self.num_tokens_with_tables(prompt_len) if self.level in ("greedy", "sampled") else math.inf


GREEDY = RequestParams()
"""Greedy decoding without options."""


def _ends(config: GenerationConfig) -> dict[str, Any]:
    """Returns the options that say how many answers there are, and where they end."""
    eos = [token_id for token_id in id_list(config.eos_token_id) if token_id != NEVER_A_TOKEN]
    return {
        "num_answers": config.num_return_sequences or 1,
        "max_new_tokens": max(1, int(config.max_new_tokens or config.max_length or 1)),
        "max_len": int(config.max_length or 0) if config.max_new_tokens is None else None,
        "stop_ids": tuple(sorted(eos)),
    }


def _engine_values(config: GenerationConfig, given: SamplingParams, seed: int | None) -> dict[str, Any]:
    values = _values(config, given, seed)
    if values["temperature"] < COLDEST:
        values["temperature"] = 0.0
    return values


def _values(config: GenerationConfig, given: SamplingParams, seed: int | None) -> dict[str, Any]:
    if seed is not None and seed not in SEEDS:
        raise invalid("seed", f"a whole number from 0 to {MAX_SEED}", seed, "draw one with secrets.randbits(63)")
    ends = _ends(config)
    decay = config.exponential_decay_length_penalty
    if decay is not None and not ends["stop_ids"]:
        raise invalid("exponential_decay_length_penalty", "an eos_token_id beside it", decay, "set eos_token_id")
    sequences = [] if config.sequence_bias is None else bias_pairs(config.sequence_bias)
    words = [(tuple(word), -np.inf) for word in dict.fromkeys(map(tuple, config.bad_words_ids or ()))]
    return {
        **ends,
        **_numbers(config, given),
        "given": given,
        "config": config,
        "seed": None if seed is None else int(seed),
        "top_k": int(config.top_k or 0) if config.do_sample else 0,
        "min_new_tokens": int(config.min_new_tokens or 0),
        "min_len": int(config.min_length or 0),
        "forbidden_first": tuple(id_list(config.begin_suppress_tokens)),
        "suppressed": tuple(id_list(config.suppress_tokens)),
        "token_bias": _bias(config, given, ends["stop_ids"]),
        "logprobs": given.logprobs,
        "prompt_logprobs": given.prompt_logprobs,
        "ngram_size": min(int(config.no_repeat_ngram_size or 0), MAX_NGRAM_SIZE),
        "encoder_ngram_size": int(config.encoder_no_repeat_ngram_size or 0),
        "sequences": tuple((tuple(ids), float(bias)) for ids, bias in [*sequences, *words] if len(ids) > 1),
        "forced_first": config.forced_bos_token_id,
        "forced_last": tuple(id_list(config.forced_eos_token_id)),
        "decay": None if decay is None else (int(decay[0]), float(decay[1])),
        "remove_invalid_values": config.remove_invalid_values is True,
        "renormalize_logits": config.renormalize_logits is True,
        "time_tokens": getattr(config, TIME_TOKENS, None),
    }


def _numbers(config: GenerationConfig, given: SamplingParams) -> dict[str, float]:
    """Returns the options of `NEUTRAL`."""
    found = dict(NEUTRAL)
    if config.repetition_penalty is not None:
        found["repetition_penalty"] = float(config.repetition_penalty)
    found["presence_penalty"] = float(given.presence_penalty or 0)
    found["frequency_penalty"] = float(given.frequency_penalty or 0)
    if not config.do_sample:
        return found
    found["temperature"] = 1.0
    for name in ("temperature", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
        if getattr(config, name) is not None:
            found[name] = float(getattr(config, name))
    found["temperature"] = max(found["temperature"], SMALLEST_TEMPERATURE)
    if config.top_p is not None:
        found["top_p_tail"] = 1 - float(config.top_p)
    return found


def _bias(config: GenerationConfig, given: SamplingParams, eos: Sequence[int]) -> TokenBias | None:
    """Returns the biases that do not depend on earlier tokens; None if all are zero."""
    sequences = [] if config.sequence_bias is None else bias_pairs(config.sequence_bias)
    pairs = [(ids[0], bias) for ids, bias in sequences if len(ids) == 1]
    pairs += (given.logit_bias or {}).items()
    # The end-of-sequence token is never a bad word.
    banned = [word[0] for word in config.bad_words_ids or () if len(word) == 1 and word[0] not in eos]
    if not pairs and not banned and given.allowed_token_ids is None:
        return None
    found = TokenBias(
        np.array([token for token, _ in pairs], np.int32),
        np.array([value for _, value in pairs], np.float32),
        np.array(banned, np.int32),
        None if given.allowed_token_ids is None else np.array(given.allowed_token_ids, np.int32),
    )
    return None if found.is_zero else found


def _check_below(name: str, ids: Collection[int], vocab_size: int) -> None:
    beyond = [token for token in ids if token >= vocab_size]
    if beyond:
        remedy = "take ids from the model's own tokenizer"
        raise invalid(name, f"token ids below the vocabulary size {vocab_size}", beyond, remedy)


def _check_inside(name: str, ids: Sequence[int], vocab_size: int) -> None:
    if any(not 0 <= token < vocab_size for token in ids):
        raise invalid(name, f"token ids from 0 to {vocab_size - 1}", list(ids))
