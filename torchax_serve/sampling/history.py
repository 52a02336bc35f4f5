"""Options that depend on the order of tokens, as rows of `SamplerHistory`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torchax_serve.buckets import next_bucket
from torchax_serve.request_params import RequestParams
from torchax_serve.sampling.time_tokens import time_columns
from torchax_serve.sampling.types import HISTORY_COLUMNS, SamplerHistory

MAX_DECAY_STEPS = 2**20  # entries of a table of decay weights; the last one is that of all later tokens
NUM_SEQUENCES, SEQUENCE_LEN = 64, 8
"""Sequences of several tokens, and tokens of one, that a history has room for from the start: more than the lists of
bad words of usual configs. A request with more compiles one program."""


def history_row(
    params: RequestParams, prompt_ids: Sequence[int], outputs: Sequence[int], max_new_tokens: int
) -> SamplerHistory:
    """Returns the rows of a slot on the host, no larger than the request needs.

    Args:
        params: Options of the request.
        prompt_ids: Prompt, left padding included.
        outputs: Tokens that the request was given before a preemption.
        max_new_tokens: Maximum number of new tokens.
    """
    tokens = np.zeros(0, np.int32)
    if params.ngram_size or params.sequences or params.time_tokens is not None:
        tokens = np.zeros(next_bucket(len(prompt_ids) + max(max_new_tokens, len(outputs) + 1)), np.int32)
        tokens[: len(prompt_ids) + len(outputs)] = (*prompt_ids, *outputs)
    longest = max((len(ids) for ids, _ in params.sequences), default=0)
    sequences = np.zeros((_power_of_two(len(params.sequences)), _power_of_two(longest)), np.int32)
    sequence_bias = np.zeros(len(sequences), np.float32)
    for index, (ids, bias) in enumerate(params.sequences):
        sequences[index, : len(ids)] = np.array(ids[::-1]) + 1
        sequence_bias[index] = bias
    has_first = params.forced_first is not None and len(prompt_ids) == 1
    ints = {
        "prompt_len": len(prompt_ids),
        "ngram_size": params.ngram_size,
        "forced_first": params.forced_first + 1 if has_first and params.forced_first is not None else 0,
        "forced_last_at": max_new_tokens if params.forced_last else 0,
        "not_first_at": int(has_first),
        "decay_at": 0 if params.decay is None else params.decay[0] + 1,
        "remove_invalid_values": params.remove_invalid_values,
        "renormalize_logits": params.renormalize_logits,
        "scores_logprobs": params.scores_logprobs,
        "num_encoder_ngrams": params.num_encoder_ngrams,
        **time_columns(params.time_tokens),
    }
    numbers: Any = np.array([ints[name] for name in HISTORY_COLUMNS], np.int32)
    arrays: Any = (tokens, sequences, sequence_bias, _decay_weights(params.decay, max_new_tokens))
    return SamplerHistory(numbers, *arrays)


def _decay_weights(decay: tuple[int, float] | None, max_new_tokens: int) -> np.ndarray:
    """Returns ``factor**i - 1`` as a table: transformers computes the power in double precision."""
    if decay is None:
        return np.zeros(0, np.float32)
    num_late = min(max(max_new_tokens - decay[0], 1), MAX_DECAY_STEPS)
    with np.errstate(over="ignore"):
        return (np.float64(decay[1]) ** np.arange(_power_of_two(num_late + 1)) - 1).astype(np.float32)


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
