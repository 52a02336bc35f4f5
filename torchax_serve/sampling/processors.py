"""Processes scores as transformers' logits processors do, each row by options of its own.

Every function but `process` is transformers' processor of the same name (``generation/logits_process.py``), written
without a loop over rows. What a row does not ask for is not computed on a CPU, where rows run one by one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torchax_serve.sampling.time_tokens import enforce_time_tokens
from torchax_serve.sampling.transformers_behaviour import TransformersBehaviour, installed_rules
from torchax_serve.sampling.types import (
    FORCED_LAST,
    IN_PROMPT,
    IS_STOP,
    NOT_FIRST,
    SUPPRESSED,
    RowOptions,
    SamplerHistory,
    SamplerState,
)


def process(
    options: RowOptions, state: SamplerState, scores: jax.Array, rules: TransformersBehaviour | None = None
) -> jax.Array:
    """Applies all processors but those of random sampling to `scores`.

    They run in the order of transformers' ``GenerationMixin._get_logits_processor``. Biases of logits are a part of the
    sequence bias; presence and frequency penalties (OpenAI's: over outputs only) follow the repetition penalty
    (transformers': over prompt and outputs).

    Args:
        options: Options of the n rows.
        state: State of all slots, with tables, and with the history if a row needs it.
        scores: float32[n, vocab].
        rules: Release of transformers to follow; None: the installed one.
    """
    rules = rules or installed_rules()
    assert state.tables is not None, "rows of the level penalties come with their tables"
    flags = _rows(state.tables.flags, options.int_column("table_slot"))
    bias = _rows(state.tables.bias, options.int_column("table_slot"))
    num_new = options.int_column("num_new")
    history, not_first_at = None, jnp.zeros_like(num_new)
    if state.history is not None:
        history = jax.tree.map(lambda leaf: _rows(leaf, options.int_column("history_slot")), state.history)
        not_first_at = history.column("not_first_at")
        bias = bias_sequences(history, num_new, bias, rules)
    scores = penalize(options, state.tables.counts, flags, scores + bias)
    if history is not None:
        scores = ban_repeated_ngrams(history, num_new, scores)
    too_early = (flags & IS_STOP > 0) & (num_new < options.int_column("min_new_tokens"))[:, None]
    scores = jnp.where(too_early, -jnp.inf, scores)
    if history is not None:

        def with_history(scores: jax.Array) -> jax.Array:
            scores = force(history, num_new, flags, scores)
            scores = remove_invalid_values(history, scores)
            return decay_length_penalty(history, num_new, flags, scores, rules)

        assert state.history is not None
        has_history = options.int_column("history_slot") < len(state.history.ints)
        scores = lax.cond(has_history.any(), with_history, lambda scores: scores, scores)
    suppressed = (flags & SUPPRESSED > 0) | (flags & NOT_FIRST > 0) & (num_new == not_first_at)[:, None]
    scores = jnp.where(suppressed, -jnp.inf, scores)
    return scores if history is None else enforce_time_tokens(history, num_new, scores)


def _rows(table: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns the rows of `table` at `slot` int32[n]; zeros for a slot that does not exist."""
    return table.at[slot].get(mode="fill", fill_value=0)


def penalize(options: RowOptions, counts: jax.Array, flags: jax.Array, scores: jax.Array) -> jax.Array:
    """Applies repetition (Keskar et al. 2019), frequency and presence penalties (OpenAI).

    Args:
        options: Options of the n rows.
        counts: int32[num_slots, vocab], of `SamplerTables`.
        flags: uint8[n, vocab].
        scores: float32[n, vocab].
    """
    repetition, frequency, presence = (
        options.float_column(f"{name}_penalty")[:, None] for name in ("repetition", "frequency", "presence")
    )

    def penalized() -> jax.Array:
        count = _rows(counts, options.int_column("table_slot"))
        seen = (count > 0) | (flags & IN_PROMPT > 0)
        repeated = jnp.where(seen, jnp.where(scores < 0, scores * repetition, scores / repetition), scores)
        return repeated - (frequency * count + presence * (count > 0))

    is_off = (repetition == 1) & (frequency == 0) & (presence == 0)
    return lax.cond(is_off.all(), lambda: scores, penalized)


def bias_sequences(
    history: SamplerHistory, num_new: jax.Array, bias: jax.Array, rules: TransformersBehaviour
) -> jax.Array:
    """Adds to `bias` float32[n, vocab] that of sequences whose prefix ends the row."""
    if not history.sequences.shape[1]:
        return bias

    def biased() -> jax.Array:
        prefixes = history.sequences[:, :, 1:] - 1  # newest token first; -1: the sequence is shorter
        length = (history.column("prompt_len") + num_new)[:, None]
        places = length - 1 - jnp.arange(prefixes.shape[2])
        newest = jnp.take_along_axis(history.tokens, jnp.maximum(places, 0), axis=1, mode="clip")
        newest = jnp.where(places < 0, -1, newest)[:, None]
        # Only biases may need a token more than those in front: n-grams of the encoder's input do not.
        is_bias = jnp.arange(prefixes.shape[1]) >= history.column("num_encoder_ngrams")[:, None]
        min_len = (prefixes >= 0).sum(-1) + is_bias * rules.bias_needs_longer_context
        matches = ((prefixes < 0) | (prefixes == newest)).all(-1) & (length >= min_len)
        added = jnp.where(matches, history.sequence_bias, 0.0)
        return bias.at[_row_indices(bias), _columns(history.sequences[:, :, 0] - 1, bias)].add(added, mode="drop")

    return lax.cond((history.sequence_bias != 0).any(), biased, lambda: bias)


def ban_repeated_ngrams(history: SamplerHistory, num_new: jax.Array, scores: jax.Array) -> jax.Array:
    """Bans each token that would complete an n-gram which the row already has."""
    tokens, size = history.tokens, history.column("ngram_size")[:, None]
    capacity = tokens.shape[1]
    if not capacity:
        return scores
    length, places = (history.column("prompt_len") + num_new)[:, None], jnp.arange(capacity)

    def banned() -> jax.Array:
        twice = jnp.concatenate([tokens, tokens], axis=1)

        def match(offset: Any, matches: jax.Array) -> jax.Array:
            before = lax.dynamic_slice_in_dim(twice, capacity - offset, capacity, axis=1)  # `offset` tokens earlier
            newest = jnp.take_along_axis(tokens, jnp.maximum(length - offset, 0), axis=1, mode="clip")
            return matches & ((before == newest) | (offset >= size))

        # A place matches if the size - 1 tokens before it are the newest ones: the token there completed the n-gram.
        is_complete = (places >= size - 1) & (places < length) & (size > 0)
        matches = lax.fori_loop(1, size.max(), match, is_complete)
        columns = _columns(jnp.where(matches, tokens, -1), scores)
        return scores.at[_row_indices(scores), columns].set(-jnp.inf, mode="drop")

    return lax.cond((size > 0).any(), banned, lambda: scores)


def force(history: SamplerHistory, num_new: jax.Array, flags: jax.Array, scores: jax.Array) -> jax.Array:
    """Leaves only forced tokens, with a score of zero, in rows whose first or last is forced."""
    first = history.column("forced_first")
    is_first, is_last = (first > 0) & (num_new == 0), history.column("forced_last_at") == num_new + 1
    forced = jnp.where(jnp.arange(scores.shape[1]) == first[:, None] - 1, 0.0, -jnp.inf)
    scores = jnp.where(is_first[:, None], forced, scores)
    return jnp.where(is_last[:, None], jnp.where(flags & FORCED_LAST > 0, 0.0, -jnp.inf), scores)


def remove_invalid_values(history: SamplerHistory, scores: jax.Array) -> jax.Array:
    """Replaces nan by zero, and infinities by the largest numbers there are."""
    limits, is_on = jnp.finfo(scores.dtype), history.column("remove_invalid_values") > 0
    valid = jnp.nan_to_num(scores, nan=0.0, posinf=float(limits.max), neginf=float(limits.min))
    return jnp.where(is_on[:, None], valid, scores)


def decay_length_penalty(
    history: SamplerHistory, num_new: jax.Array, flags: jax.Array, scores: jax.Array, rules: TransformersBehaviour
) -> jax.Array:
    """Raises the score of end-of-sequence tokens exponentially from the decay's start on."""
    if not history.decay_weights.shape[1]:
        return scores
    num_late = (num_new + 1 - history.column("decay_at"))[:, None]
    is_late = (num_late > 0) & (history.column("decay_at") > 0)[:, None]
    weight = jnp.take_along_axis(history.decay_weights, jnp.maximum(num_late, 0), axis=1, mode="clip")
    penalty = jnp.abs(scores) * weight
    if rules.decay_skips_infinite:
        penalty = jnp.where(jnp.isfinite(scores), penalty, 0.0)
    return jnp.where((flags & IS_STOP > 0) & is_late, scores + penalty, scores)


def renormalize(history: SamplerHistory, scores: jax.Array) -> jax.Array:
    """Makes log-probabilities of the scores float32[n, vocab] of rows that ask for it."""
    is_on = history.column("renormalize_logits") > 0
    return lax.cond(
        is_on.any(), lambda: jnp.where(is_on[:, None], jax.nn.log_softmax(scores, axis=-1), scores), lambda: scores
    )


def _row_indices(scores: jax.Array) -> jax.Array:
    return jnp.arange(scores.shape[0])[:, None]


def _columns(tokens: jax.Array, scores: jax.Array) -> jax.Array:
    """Returns column numbers of `tokens`; out of range for tokens below zero."""
    return jnp.where(tokens < 0, scores.shape[1], tokens)
