"""`HistoryOptions`: options that depend on the order of tokens, as rows of `SamplerHistory`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from torchax_serve.buckets import next_bucket
from torchax_serve.sampling.config_options import id_list
from torchax_serve.sampling.types import HISTORY_COLUMNS, SamplerHistory
from torchax_serve.sampling_params import bias_pairs, invalid

if TYPE_CHECKING:
    from transformers import GenerationConfig

MAX_DECAY_STEPS = 2**20  # entries of a table of decay weights; the last one is that of all later tokens
NUM_SEQUENCES, SEQUENCE_LEN = 64, 8
"""Sequences of several tokens, and tokens of one, that a history has room for from the start: more than the lists of
bad words of usual configs. A request with more compiles one program."""

MAX_NGRAM_SIZE = 2**30  # longer ones than any row; twice as many are still an int32


@dataclasses.dataclass(frozen=True, eq=False)
class HistoryOptions:
    """Options that depend on more of the tokens so far than their counts.

    Attributes:
        ngram_size: Size of n-grams that may not repeat; 0: any may.
        sequences: Token ids and the bias of the last one behind the others; -inf for bad words. At least two tokens.
        forced_first: Token that the first new one must be if the prompt is one token; None: any.
        forced_last: Tokens of which the last one before the maximum length must be one; empty: any.
        decay: Number of new tokens from which scores of end-of-sequence tokens rise, and the factor; None: never.
        remove_invalid_values: Whether nan and infinities are replaced.
        renormalize_logits: Whether scores are normalized to log-probabilities.
    """

    ngram_size: int
    sequences: tuple[tuple[tuple[int, ...], float], ...]
    forced_first: int | None
    forced_last: tuple[int, ...]
    decay: tuple[int, float] | None
    remove_invalid_values: bool
    renormalize_logits: bool

    @classmethod
    def of(cls, config: GenerationConfig, stop_ids: Sequence[int], vocab_size: int) -> HistoryOptions | None:
        """Returns the options of a checked config; None if it has none of them.

        Raises:
            InvalidArgumentError: a token is outside the vocabulary, or a decay has no end-of-sequence token.
        """
        sequences = [] if config.sequence_bias is None else bias_pairs(config.sequence_bias)
        sequences += [(tuple(word), -np.inf) for word in dict.fromkeys(map(tuple, config.bad_words_ids or ()))]
        first, decay = config.forced_bos_token_id, config.exponential_decay_length_penalty
        last = id_list(config.forced_eos_token_id)
        _check_inside("forced_bos_token_id", [] if first is None else [first], vocab_size)
        _check_inside("forced_eos_token_id", last, vocab_size)
        if decay is not None:
            if not stop_ids:
                remedy = "set eos_token_id"
                raise invalid("exponential_decay_length_penalty", "an eos_token_id beside it", decay, remedy)
            _check_inside("eos_token_id", list(stop_ids), vocab_size)
        options = cls(
            ngram_size=min(int(config.no_repeat_ngram_size or 0), MAX_NGRAM_SIZE),
            sequences=tuple((tuple(ids), float(bias)) for ids, bias in sequences if len(ids) > 1),
            forced_first=first,
            forced_last=tuple(last),
            decay=None if decay is None else (int(decay[0]), float(decay[1])),
            remove_invalid_values=config.remove_invalid_values is True,
            renormalize_logits=config.renormalize_logits is True,
        )
        values = [getattr(options, field.name) for field in dataclasses.fields(options)]
        return (
            options
            if any(value is not None and value not in (0, (), False) for value in values) or (first is not None)
            else None
        )

    def row(self, prompt_ids: Sequence[int], outputs: Sequence[int], max_new_tokens: int) -> SamplerHistory:
        """Returns the rows of a slot on the host, no larger than the request needs.

        Args:
            prompt_ids: Prompt, left padding included.
            outputs: Tokens that the request was given before a preemption.
            max_new_tokens: Maximum number of new tokens.
        """
        tokens = np.zeros(0, np.int32)
        if self.ngram_size or self.sequences:
            tokens = np.zeros(next_bucket(len(prompt_ids) + max(max_new_tokens, len(outputs) + 1)), np.int32)
            tokens[: len(prompt_ids) + len(outputs)] = (*prompt_ids, *outputs)
        longest = max((len(ids) for ids, _ in self.sequences), default=0)
        sequences = np.zeros((_power_of_two(len(self.sequences)), _power_of_two(longest)), np.int32)
        sequence_bias = np.zeros(len(sequences), np.float32)
        for index, (ids, bias) in enumerate(self.sequences):
            sequences[index, : len(ids)] = np.array(ids[::-1]) + 1
            sequence_bias[index] = bias
        has_first = self.forced_first is not None and len(prompt_ids) == 1
        ints = {
            "prompt_len": len(prompt_ids),
            "ngram_size": self.ngram_size,
            "forced_first": self.forced_first + 1 if has_first and self.forced_first is not None else 0,
            "forced_last_at": max_new_tokens if self.forced_last else 0,
            "not_first_at": int(has_first),
            "decay_at": 0 if self.decay is None else self.decay[0] + 1,
            "remove_invalid_values": self.remove_invalid_values,
            "renormalize_logits": self.renormalize_logits,
        }
        numbers: Any = np.array([ints[name] for name in HISTORY_COLUMNS], np.int32)
        arrays: Any = (tokens, sequences, sequence_bias, self._decay_weights(max_new_tokens))
        return SamplerHistory(numbers, *arrays)

    def _decay_weights(self, max_new_tokens: int) -> np.ndarray:
        """Returns ``factor**i - 1`` as a table: transformers computes the power in double precision."""
        if self.decay is None:
            return np.zeros(0, np.float32)
        num_late = min(max(max_new_tokens - self.decay[0], 1), MAX_DECAY_STEPS)
        with np.errstate(over="ignore"):
            return (np.float64(self.decay[1]) ** np.arange(_power_of_two(num_late + 1)) - 1).astype(np.float32)


def _check_inside(name: str, ids: list[int], vocab_size: int) -> None:
    if any(not 0 <= token < vocab_size for token in ids):
        raise invalid(name, f"token ids from 0 to {vocab_size - 1}", ids)


def _power_of_two(number: int) -> int:
    """Returns the next power of two, so that few shapes are compiled; 0 for 0."""
    return 1 << (number - 1).bit_length() if number else 0


def empty_history(num_slots: int, max_len: int | None) -> SamplerHistory:
    """Returns the history of unused slots on the host.

    It has room for requests of `max_len` tokens; None: for none.
    """
    num_tokens, num_sequences, sequence_len, num_weights = 0, 0, 0, 0
    if max_len is not None:
        num_tokens, num_weights = next_bucket(max_len), _power_of_two(min(max_len, MAX_DECAY_STEPS) + 1)
        num_sequences, sequence_len = NUM_SEQUENCES, SEQUENCE_LEN
    arrays: Any = (
        np.zeros((num_slots, len(HISTORY_COLUMNS)), np.int32),
        np.zeros((num_slots, num_tokens), np.int32),
        np.zeros((num_slots, num_sequences, sequence_len), np.int32),
        np.zeros((num_slots, num_sequences), np.float32),
        np.zeros((num_slots, num_weights), np.float32),
    )
    return SamplerHistory(*arrays)


def with_room_for(history: SamplerHistory, row: SamplerHistory, sharding: jax.sharding.Sharding) -> SamplerHistory:
    """Returns `history` with arrays at least as large as those of `row`."""

    def grown(array: jax.Array, of_row: np.ndarray) -> jax.Array:
        padding = [(0, max(0, need - have)) for have, need in zip(array.shape[1:], of_row.shape, strict=True)]
        if not any(after for _, after in padding):
            return array
        return jax.device_put(jnp.pad(array, [(0, 0), *padding]), sharding)

    return jax.tree.map(grown, history, row)


def padded_row(row: SamplerHistory, history: SamplerHistory) -> SamplerHistory:
    """Returns the rows of a slot with the sizes of `history`."""

    def padded(array: np.ndarray, of_all: jax.Array) -> np.ndarray:
        return np.pad(array, [(0, most - have) for have, most in zip(array.shape, of_all.shape[1:], strict=True)])

    return jax.tree.map(padded, row, history)
