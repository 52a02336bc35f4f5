"""Processors that every decoding mode applies, on scores f32[batch, vocab].

Each is transformers' processor of the same name (``generation/logits_process.py``), written without a loop over rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torchax_serve.sampling.history import GenerationSampling, SamplingHistory, SequenceBias

MAX_UNROLLED = 16  # tokens of an n-gram up to which each has an operation of its own; many take long to compile


def bias_sequences(
    plan: GenerationSampling, state: SamplingHistory, bias: SequenceBias, scores: jax.Array
) -> jax.Array:
    """Adds the bias of each sequence to its last token where the tokens so far end with its prefix."""
    total = jnp.broadcast_to(bias.single, scores.shape)
    for prefixes, last_tokens, biases in bias.groups:
        prefix_len = prefixes.shape[1]
        if prefix_len > state.tokens.shape[1]:
            continue  # longer than any row can become
        min_context = prefix_len + 1 if plan.rules.bias_needs_longer_context else prefix_len
        tail = lax.dynamic_slice_in_dim(state.tokens, state.length - prefix_len, prefix_len, axis=1)
        matches = (tail[:, None, :] == prefixes).all(-1) & (state.length >= min_context)
        total = total.at[:, last_tokens].add(jnp.where(matches, biases, 0.0))
    return scores + total


def penalise_repetition(penalty: jax.Array, seen: jax.Array, scores: jax.Array) -> jax.Array:
    """Divides positive and multiplies negative scores of the tokens in `seen` (Keskar et al. 2019, CTRL)."""
    return jnp.where(seen, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)


def ban_repeated_ngrams(size: int, state: SamplingHistory, scores: jax.Array) -> jax.Array:
    """Bans each token that would complete an n-gram which the row already has."""
    (batch, capacity), vocab_size = state.tokens.shape, scores.shape[1]
    num_windows = capacity - size + 1
    if num_windows <= 0:
        return scores
    start = jnp.maximum(state.length - (size - 1), 0)
    prefix = lax.dynamic_slice_in_dim(state.tokens, start, size - 1, axis=1)
    matches = jnp.arange(num_windows) + size <= state.length  # whole windows only
    matches = jnp.broadcast_to(matches, (batch, num_windows))

    def match(offset: Any, matches: jax.Array) -> jax.Array:
        window = lax.dynamic_slice_in_dim(state.tokens, offset, num_windows, axis=1)
        return matches & (window == lax.dynamic_slice_in_dim(prefix, offset, 1, axis=1))

    if size <= MAX_UNROLLED:
        for offset in range(size - 1):
            matches = match(offset, matches)
    else:
        matches = lax.fori_loop(0, size - 1, match, matches)
    ends = jnp.where(matches, state.tokens[:, size - 1 :], vocab_size)
    ends = jnp.where(ends < 0, vocab_size, ends)  # a negative index would count from the end
    return scores.at[jnp.arange(batch)[:, None], ends].set(-jnp.inf, mode="drop")


def force(forced: jax.Array, now: jax.Array, scores: jax.Array) -> jax.Array:
    """Where `now` (bool[]) holds, leaves only the tokens of `forced` (bool[vocab]), with a score of zero."""
    return jnp.where(now, jnp.where(forced, 0.0, -jnp.inf), scores)


def remove_invalid_values(scores: jax.Array) -> jax.Array:
    """Makes nan zero, and infinities the largest numbers there are."""
    limits = jnp.finfo(scores.dtype)
    return jnp.nan_to_num(scores, nan=0.0, posinf=float(limits.max), neginf=float(limits.min))


def decay_length_penalty(plan: GenerationSampling, state: SamplingHistory, scores: jax.Array) -> jax.Array:
    """Raises the score of eos exponentially once a row is longer than ``plan.decay_start``."""
    start, weights, eos_mask = _given(plan.decay_start), _given(plan.decay_weights), _given(plan.eos_mask)
    num_late = state.length - start
    penalty = jnp.abs(scores) * weights[jnp.clip(num_late, 0, len(weights) - 1)]
    if plan.rules.decay_skips_infinite:
        penalty = jnp.where(jnp.isfinite(scores), penalty, 0.0)
    return jnp.where(eos_mask & (num_late > 0), scores + penalty, scores)


def process_all_modes(plan: GenerationSampling, state: SamplingHistory, scores: jax.Array) -> jax.Array:
    """All processors that do not depend on sampling, in the order of ``GenerationMixin._get_logits_processor``."""
    if plan.sequence_bias is not None:
        scores = bias_sequences(plan, state, plan.sequence_bias, scores)
    if plan.repetition_penalty is not None:
        scores = penalise_repetition(plan.repetition_penalty, _given(state.seen), scores)
    if plan.no_repeat_ngram_size is not None:
        scores = ban_repeated_ngrams(plan.no_repeat_ngram_size, state, scores)
    if plan.bad_words is not None:
        scores = bias_sequences(plan, state, plan.bad_words, scores)
    if plan.min_length is not None:
        scores = jnp.where(_given(plan.eos_mask) & (state.length < plan.min_length), -jnp.inf, scores)
    if plan.forced_bos is not None:
        scores = force(jnp.arange(plan.vocab_size) == plan.forced_bos, state.length == 1, scores)
    if plan.forced_eos_mask is not None:
        scores = force(plan.forced_eos_mask, state.length == plan.max_length - 1, scores)
    if plan.remove_invalid_values:
        scores = remove_invalid_values(scores)
    if plan.decay_start is not None:
        scores = decay_length_penalty(plan, state, scores)
    if plan.suppress_mask is not None:
        scores = jnp.where(plan.suppress_mask, -jnp.inf, scores)
    if plan.begin_suppress_mask is not None:
        scores = jnp.where(plan.begin_suppress_mask & (state.length == plan.begin_suppress_at), -jnp.inf, scores)
    return scores


def _given(array: jax.Array | None) -> Any:
    assert array is not None, "the plan builds these fields together"
    return array
