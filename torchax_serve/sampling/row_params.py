"""`RowSamplingParams`: checked sampling options of one request, with the model's defaults."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.sampling.config_options import CALLER_OPTIONS, id_list, unsupported_options, validate_options
from torchax_serve.sampling.history import HistoryOptions
from torchax_serve.sampling.types import FLOAT_COLUMNS, Level
from torchax_serve.sampling_params import MAX_SEED, NEVER_A_TOKEN, SamplingParams, ValueRange, bias_pairs, invalid

if TYPE_CHECKING:
    from transformers import GenerationConfig

ENGINE_OPTIONS = CALLER_OPTIONS | {"use_cache", "cache_implementation"}
"""Options of a generation config outside of sampling that mean nothing to an engine, or that it honours elsewhere."""

NEUTRAL: Mapping[str, float] = {**dict.fromkeys(FLOAT_COLUMNS, 0.0), "typical_p": 1.0, "repetition_penalty": 1.0}
"""Each column's value that asks for nothing. A temperature of 0 is greedy decoding."""

_SEEDS = ValueRange(0, MAX_SEED, is_integer=True)
SMALLEST_TEMPERATURE = 1e-30  # scores divided by less overflow float32
COLDEST = 1e-5
"""Temperature below which requests of the engine are greedy, as in vLLM: equal scores do not make them random."""


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
        max_new_tokens: Maximum number of new tokens.
        stop_ids: Tokens that end the request.
        forbidden_first: Tokens that may not be the first new one.
        suppressed: Tokens that may never be sampled.
        token_bias: Additive bias of logits; None: no bias.
        logprobs: Number of top log-probabilities to return besides the sampled token's; None: no log-probabilities.
        history: Options that depend on the order of the tokens so far; None: none of them.
    """

    vocab_size: int
    floats: Mapping[str, float]
    top_k: int = 0
    seed: int = 0
    min_new_tokens: int = 0
    min_len: int = 0
    max_new_tokens: int = 1
    stop_ids: tuple[int, ...] = ()
    forbidden_first: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    token_bias: TokenBias | None = None
    logprobs: int | None = None
    history: HistoryOptions | None = None

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
        """Checks the options of a request for the engine and brings them into the form of a row.

        Args:
            params: Options that only the engine honours, such as `logit_bias` (`SamplingParams.only_engine_options`).
            config: Everything else: the model's generation config with the caller's options merged into it
                (`SamplingParams.merged_into`).
            vocab_size: Number of columns of the logits.
            seed: ``params.seed``, or one drawn for this request.
            stop_ids: Tokens that end the request; None takes the config's ``eos_token_id``.
            honoured: Options outside of sampling that the caller takes care of.

        Raises:
            InvalidArgumentError: a value is out of its range, a token outside the vocabulary, or none may be sampled.
            UnsupportedArgumentError: an option is set that the engine does not support.
        """
        assert params.is_engine_only, f"merge {params} into the config first"
        validate_options(config)
        if unsupported := unsupported_options(config, honoured):
            raise UnsupportedArgumentError(
                f"{', '.join(unsupported)}: expected options that requests of a batch can have each for itself, got "
                f"{ {name: getattr(config, name) for name in unsupported} }; leave them out, or call generate()"
            )
        row = cls.of_checked(params, config, vocab_size=vocab_size, seed=seed, stop_ids=stop_ids)
        if row.floats["temperature"] < COLDEST:
            row = dataclasses.replace(row, floats={**row.floats, "temperature": 0.0})
        if row.forbids_all:
            raise InvalidArgumentError(
                f"expected at least one token of {vocab_size} that may be chosen, got options that forbid all; look at "
                "allowed_token_ids, suppress_tokens, bad_words_ids and sequence_bias"
            )
        return row

    @classmethod
    def of_checked(
        cls,
        params: SamplingParams,
        config: GenerationConfig,
        *,
        vocab_size: int,
        seed: int,
        stop_ids: Collection[int] | None = None,
    ) -> RowSamplingParams:
        """Returns parameters as `of`, for a config with supported options in their ranges.

        The options may forbid all tokens.
        """
        if seed not in _SEEDS:
            raise invalid("seed", f"a whole number from 0 to {MAX_SEED}", seed, "draw one with secrets.randbits(63)")
        eos = [token_id for token_id in id_list(config.eos_token_id) if token_id != NEVER_A_TOKEN]
        stops = tuple(sorted(eos if stop_ids is None else stop_ids))
        return cls(
            vocab_size=vocab_size,
            floats=_floats(params, config),
            top_k=min(int(config.top_k or 0), vocab_size) if config.do_sample else 0,
            seed=int(seed),
            min_new_tokens=int(config.min_new_tokens or 0),
            min_len=int(config.min_length or 0),
            max_new_tokens=int(config.max_new_tokens or config.max_length or 1),
            stop_ids=stops,
            forbidden_first=tuple(id_list(config.begin_suppress_tokens)),
            suppressed=tuple(id_list(config.suppress_tokens)),
            token_bias=_bias(params, config, eos, vocab_size),
            logprobs=params.logprobs,
            history=HistoryOptions.of(config, stops, vocab_size),
        )

    @classmethod
    def neutral(cls, vocab_size: int) -> RowSamplingParams:
        """Returns greedy decoding without options, for a row that is not read."""
        return cls(vocab_size, NEUTRAL)

    @property
    def bias(self) -> np.ndarray | None:
        """float32[vocab], added to the logits, -inf at banned tokens; None: no bias."""
        return None if self.token_bias is None else self.token_bias.dense(self.vocab_size)

    @property
    def scores_logprobs(self) -> bool:
        """Whether log-probabilities of the request are those of the processed scores."""
        return self.history is not None and self.history.scores_logprobs

    @property
    def forbids_all(self) -> bool:
        """Whether no token may ever be sampled."""
        if self.token_bias is None and not self.suppressed:
            return False
        bias = (
            np.zeros(self.vocab_size, np.float32) if self.token_bias is None else self.token_bias.dense(self.vocab_size)
        )
        bias[[token for token in self.suppressed if token < self.vocab_size]] = -math.inf
        return bool((bias == -math.inf).all())

    @property
    def level(self) -> Level:
        """The lowest level that covers the request once it may end."""
        if self.history is not None or self.floats["top_h"] > 0:
            return "history"
        given = {name for name in FLOAT_COLUMNS if self.floats[name] != NEUTRAL[name]}
        if self.token_bias is not None or self.suppressed or given - {"temperature", "top_p_tail", "min_p"}:
            return "penalties"
        return "sampled" if self.floats["temperature"] > 0 else "greedy"

    def needs_tables(self, prompt_len: int) -> bool:
        """Returns whether the request has rows in `SamplerTables`."""
        return self.level in ("penalties", "history") or self.num_tokens_with_tables(prompt_len) > 0

    def num_tokens_with_tables(self, prompt_len: int) -> int:
        """Returns the number of first new tokens that need the level "penalties" in any case."""
        return max(self.num_forced_tokens(prompt_len), 1 if self.forbidden_first else 0)

    def num_forced_tokens(self, prompt_len: int) -> int:
        """Returns the number of new tokens before the request may end."""
        return max(self.min_new_tokens, self.min_len - prompt_len, 0) if self.stop_ids else 0


def _floats(params: SamplingParams, config: GenerationConfig) -> dict[str, float]:
    floats = dict(NEUTRAL)
    if config.repetition_penalty is not None:
        floats["repetition_penalty"] = float(config.repetition_penalty)
    for name in ("presence_penalty", "frequency_penalty"):
        floats[name] = float(getattr(params, name) or 0)
    if not config.do_sample:
        return floats
    floats["temperature"] = 1.0
    for name in ("temperature", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"):
        if getattr(config, name) is not None:
            floats[name] = float(getattr(config, name))
    floats["temperature"] = max(floats["temperature"], SMALLEST_TEMPERATURE)
    if config.top_p is not None:
        floats["top_p_tail"] = 1 - float(config.top_p)
    return floats


def _bias(params: SamplingParams, config: GenerationConfig, eos: list[int], vocab_size: int) -> TokenBias | None:
    """Returns the biases that do not depend on earlier tokens; None if all are zero.

    Raises:
        InvalidArgumentError: a token is outside the vocabulary.
    """
    sequences = [] if config.sequence_bias is None else bias_pairs(config.sequence_bias)
    words = config.bad_words_ids or []
    _check_inside("sequence_bias", [token for ids, _ in sequences for token in ids], vocab_size)
    _check_inside("bad_words_ids", [token for word in words for token in word], vocab_size)
    _check_inside("logit_bias", params.logit_bias or {}, vocab_size)
    _check_inside("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    pairs = [(ids[0], bias) for ids, bias in sequences if len(ids) == 1]
    pairs += (params.logit_bias or {}).items()
    # The end-of-sequence token is never a bad word.
    banned = [word[0] for word in words if len(word) == 1 and word[0] not in eos]
    if not pairs and not banned and params.allowed_token_ids is None:
        return None
    token_bias = TokenBias(
        np.array([token for token, _ in pairs], np.int32),
        np.array([value for _, value in pairs], np.float32),
        np.array(banned, np.int32),
        None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int32),
    )
    return token_bias if token_bias.dense(vocab_size).any() else None


def _check_inside(name: str, ids: Collection[int], vocab_size: int) -> None:
    beyond = [token for token in ids if token >= vocab_size]
    if beyond:
        remedy = "take ids from the model's own tokenizer"
        raise invalid(name, f"token ids below the vocabulary size {vocab_size}", beyond, remedy)
