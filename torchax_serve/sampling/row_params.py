"""`RowSamplingParams`: sampling parameters of one request, merged with the model's defaults and checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.sampling import CALLER_OPTIONS, GenerationSampling, unsupported_options, validate_options
from torchax_serve.sampling.config_options import id_list
from torchax_serve.sampling.history import COLDEST
from torchax_serve.sampling.types import FLOAT_COLUMNS, Level
from torchax_serve.sampling_params import MAX_SEED, NEVER_A_TOKEN, SamplingParams, ValueRange, bias_pairs, invalid

if TYPE_CHECKING:
    from transformers import GenerationConfig

ENGINE_OPTIONS = CALLER_OPTIONS | {"use_cache", "cache_implementation"}
"""Options of a generation config outside of sampling that mean nothing to an engine, or that it honours elsewhere."""

NEUTRAL: Mapping[str, float] = {**dict.fromkeys(FLOAT_COLUMNS, 0.0), "typical_p": 1.0, "repetition_penalty": 1.0}
"""Each column's value that asks for nothing. A temperature of 0 is greedy decoding."""

_HISTORY_SWITCHES = ("no_repeat_ngram_size", "remove_invalid_values", "renormalize_logits")
_HISTORY_VALUES = ("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")


@dataclasses.dataclass(frozen=True, eq=False)
class TokenBias:
    """What is added to the logits of some tokens; a request that waits does not hold a row of the vocabulary.

    Attributes:
        ids: int32[n], tokens, perhaps one several times.
        added: float32[n], to the logits of `ids`.
        banned: int32[m], tokens never to be chosen.
        allowed: int32[k], the only tokens to be chosen; None: all.
    """

    ids: np.ndarray
    added: np.ndarray
    banned: np.ndarray
    allowed: np.ndarray | None

    def dense(self, vocab_size: int) -> np.ndarray:
        """float32[vocab_size]."""
        bias = np.zeros(vocab_size, np.float32)
        np.add.at(bias, self.ids, self.added)
        if self.allowed is not None:
            is_allowed = np.zeros(vocab_size, bool)
            is_allowed[self.allowed] = True
            bias[~is_allowed] = -math.inf
        bias[self.banned] = -math.inf
        return bias


@dataclasses.dataclass(frozen=True, eq=False)
class RowSamplingParams:
    """The sampling options of one request, with every default filled in.

    Attributes:
        vocab_size: Number of columns of the logits.
        floats: Options by the names of `FLOAT_COLUMNS`.
        top_k: Number of likeliest tokens to sample from; 0: all.
        seed: Seed of this request's random draws.
        min_new_tokens: Number of new tokens before one of `stop_ids` may be sampled.
        min_len: The same as tokens of prompt and answer together.
        stop_ids: Tokens that end the request.
        forbidden_first: Tokens that may not be the first new one.
        token_bias: Additive bias of logits; None: no bias. With `history_config` it has only what that does not know.
        logprobs: Number of top log-probabilities to return besides the sampled token's; None: no log-probabilities.
        history_config: Config of a row that `HistorySampler` samples, because an option depends on the complete token
            history, such as n-gram bans; None for all other rows.
    """

    vocab_size: int
    floats: Mapping[str, float]
    top_k: int
    seed: int
    min_new_tokens: int
    min_len: int
    stop_ids: tuple[int, ...]
    forbidden_first: tuple[int, ...]
    token_bias: TokenBias | None
    logprobs: int | None
    history_config: GenerationConfig | None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        config: GenerationConfig,
        *,
        vocab_size: int,
        seed: int,
        stop_ids: Collection[int] | None = None,
        honoured: Collection[str] = ENGINE_OPTIONS,
    ) -> RowSamplingParams:
        """Checks the options of a request and brings them into the form of a row.

        Args:
            params: Options that only the engine honours, such as `logit_bias` (`SamplingParams.only_engine_options`).
            config: Everything else: the model's generation config with the caller's options merged into it
                (`SamplingParams.merged_into`).
            vocab_size: columns of the logits.
            seed: ``params.seed``, or one drawn for this request.
            stop_ids: tokens that end the request; None takes the config's ``eos_token_id``.
            honoured: options outside of sampling that the caller takes care of.

        Raises:
            InvalidArgumentError: a value out of its range, a token outside the vocabulary.
            UnsupportedArgumentError: an option is set that the engine does not support.
        """
        assert params == params.only_engine_options(), f"merge {params} into the config first"
        validate_options(config)
        if unsupported := unsupported_options(config, honoured):
            raise UnsupportedArgumentError(
                f"{', '.join(unsupported)}: expected options that requests of a batch can have each for itself, got "
                f"{ {name: getattr(config, name) for name in unsupported} }; leave them out, or call generate()"
            )
        if seed not in ValueRange(0, MAX_SEED, is_integer=True):
            raise invalid("seed", f"a whole number from 0 to {MAX_SEED}", seed, "draw one with secrets.randbits(63)")
        eos = [token_id for token_id in id_list(config.eos_token_id) if token_id != NEVER_A_TOKEN]
        stops = tuple(sorted(eos if stop_ids is None else stop_ids))
        history_config = config if _needs_history(config) else None
        if history_config:  # what is wrong with its options is said here and not when its turn comes
            GenerationSampling.build(history_config, prompt_len=1, vocab_size=vocab_size, eos_token_ids=list(stops))
        return cls(
            vocab_size=vocab_size,
            floats=_floats(params, config),
            top_k=min(int(config.top_k or 0), vocab_size) if config.do_sample else 0,
            seed=int(seed),
            min_new_tokens=int(config.min_new_tokens or 0),
            min_len=int(config.min_length or 0),
            stop_ids=stops,
            forbidden_first=() if history_config else tuple(id_list(config.begin_suppress_tokens)),
            token_bias=_bias(
                params, _NO_BIAS if history_config else _ConfigBias.of(config, eos, vocab_size), vocab_size
            ),
            logprobs=params.logprobs,
            history_config=history_config,
        )

    @classmethod
    def neutral(cls, vocab_size: int) -> RowSamplingParams:
        """Returns greedy decoding without options, for a row that is not read."""
        return cls(vocab_size, NEUTRAL, 0, 0, 0, 0, (), (), None, None, None)

    @property
    def bias(self) -> np.ndarray | None:
        """float32[vocab], added to the logits, -inf at tokens never to be chosen; None: nothing is."""
        return None if self.token_bias is None else self.token_bias.dense(self.vocab_size)

    @property
    def level(self) -> Level:
        """The lowest level that covers the request once it may end."""
        given = {name for name in FLOAT_COLUMNS if self.floats[name] != NEUTRAL[name]}
        if self.token_bias is not None or given - {"temperature", "top_p_tail", "min_p"}:
            return "full"
        return "sampled" if self.floats["temperature"] > 0 else "greedy"

    def needs_tables(self, prompt_len: int) -> bool:
        """Whether rows of `SamplerTables` have to be written for it."""
        return self.history_config is None and (self.level == "full" or self.num_full_level_tokens(prompt_len) > 0)

    def num_full_level_tokens(self, prompt_len: int) -> int:
        """Outputs that need the level "full", whatever comes after them."""
        return max(self.num_forced_tokens(prompt_len), 1 if self.forbidden_first else 0)

    def num_forced_tokens(self, prompt_len: int) -> int:
        """Outputs before the request may end."""
        return max(self.min_new_tokens, self.min_len - prompt_len) if self.stop_ids else 0


def _floats(params: SamplingParams, config: GenerationConfig) -> dict[str, float]:
    floats = dict(NEUTRAL)
    if config.repetition_penalty is not None:
        floats["repetition_penalty"] = float(config.repetition_penalty)
    for name in ("presence_penalty", "frequency_penalty"):
        floats[name] = float(getattr(params, name) or 0)
    if not config.do_sample:
        return floats
    floats["temperature"] = 1.0
    for name in ("temperature", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
        if getattr(config, name) is not None:
            floats[name] = float(getattr(config, name))
    if floats["temperature"] < COLDEST:
        floats["temperature"] = 0.0
    if config.top_p is not None:
        floats["top_p_tail"] = 1 - float(config.top_p)
    return floats


class _ConfigBias(NamedTuple):
    """What a config adds to a logit whatever came before."""

    added: list[tuple[int, float]]
    banned: list[int]

    @classmethod
    def of(cls, config: GenerationConfig, eos: list[int], vocab_size: int) -> _ConfigBias:
        pairs = [] if config.sequence_bias is None else bias_pairs(config.sequence_bias)
        # The end-of-sequence token is never a bad word.
        words = [word[0] for word in config.bad_words_ids or () if word[0] not in eos]
        _check_inside("sequence_bias", [ids[0] for ids, _ in pairs], vocab_size)
        _check_inside("bad_words_ids", words, vocab_size)
        # Tokens to suppress that the vocabulary has not are none to transformers either.
        suppressed = [token for token in config.suppress_tokens or () if token < vocab_size]
        return cls([(ids[0], value) for ids, value in pairs], words + suppressed)


_NO_BIAS = _ConfigBias([], [])


def _bias(params: SamplingParams, given: _ConfigBias, vocab_size: int) -> TokenBias | None:
    """None if it would be zero throughout.

    Raises:
        InvalidArgumentError: a token outside the vocabulary, or none is left that may be chosen.
    """
    _check_inside("logit_bias", params.logit_bias or {}, vocab_size)
    _check_inside("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    pairs = [*given.added, *(params.logit_bias or {}).items()]
    token_bias = TokenBias(
        np.array([token for token, _ in pairs], np.int32),
        np.array([value for _, value in pairs], np.float32),
        np.array(given.banned, np.int32),
        None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int32),
    )
    bias = token_bias.dense(vocab_size)
    if (bias == -math.inf).all():
        raise InvalidArgumentError(
            f"expected at least one token of {vocab_size} that may be chosen, got options that forbid all; look at "
            "allowed_token_ids, suppress_tokens, bad_words_ids and sequence_bias"
        )
    return token_bias if bias.any() else None


def _check_inside(name: str, ids: Collection[int], vocab_size: int) -> None:
    beyond = [token for token in ids if token >= vocab_size]
    if beyond:
        remedy = "take ids from the model's own tokenizer"
        raise invalid(name, f"token ids below the vocabulary size {vocab_size}", beyond, remedy)


def _needs_history(config: GenerationConfig) -> bool:
    """Whether an option depends on more of the token history than the counts of its tokens."""
    if any(getattr(config, name) for name in _HISTORY_SWITCHES):
        return True
    if any(getattr(config, name) is not None for name in _HISTORY_VALUES):
        return True
    sequences = [] if config.sequence_bias is None else [ids for ids, _ in bias_pairs(config.sequence_bias)]
    sequences += config.bad_words_ids or []
    return any(len(ids) > 1 for ids in sequences) or bool(config.do_sample and config.top_h is not None)
