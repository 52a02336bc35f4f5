"""From logits to the next token: `process` the scores, `select` a token, or both in one `sample_step`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from torchax_serve.sampling.history import GenerationSampling, SamplingHistory, append, is_finished
from torchax_serve.sampling.processors import process_all_modes
from torchax_serve.sampling.selection import draw, first_argmax
from torchax_serve.sampling.truncation import process_sampling


def process(plan: GenerationSampling, state: SamplingHistory, logits: jax.Array) -> jax.Array:
    """The scores f32[batch, vocab] that transformers' ``LogitsProcessorList`` makes of `logits` [batch, vocab]."""
    scores = process_all_modes(plan, state, logits.astype(jnp.float32))
    if plan.do_sample:
        scores = process_sampling(plan, scores)
    return jax.nn.log_softmax(scores, axis=-1) if plan.renormalize_logits else scores


def select(plan: GenerationSampling, state: SamplingHistory, scores: jax.Array) -> jax.Array:
    """The next token of each row, i32[batch]: the first of the best, or one drawn from ``softmax(scores)``.

    A draw depends on the row's key and on how many tokens the row has chosen: not on padding, and not on other rows.
    A row with nan, +inf, or -inf throughout cannot be drawn from and gives `INVALID_TOKEN`.
    """
    if not plan.do_sample or plan.is_cold:
        return first_argmax(scores)
    keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.num_new)
    return draw(keys, scores)


def sample_step(
    plan: GenerationSampling, state: SamplingHistory, logits: jax.Array
) -> tuple[jax.Array, SamplingHistory, jax.Array]:
    """One decode step: (tokens i32[batch], the next state, scores f32[batch, vocab]).

    As in transformers, rows that have ended go on with the pad token where there is an end-of-sequence token at all.
    """
    scores = process(plan, state, logits)
    tokens = select(plan, state, scores)
    if plan.pad_id is not None:
        tokens = jnp.where(state.ended, plan.pad_id, tokens)
    state = append(state, tokens)
    return tokens, dataclasses.replace(state, ended=state.ended | is_finished(plan, state, tokens)), scores
