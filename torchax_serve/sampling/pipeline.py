"""From logits to the next token: `process` the scores, `select` a token, or both and the bookkeeping in one `step`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from torchax_serve.sampling.plan import SamplingPlan
from torchax_serve.sampling.processors import process_all_modes
from torchax_serve.sampling.state import SamplingState, append, finished
from torchax_serve.sampling.warpers import process_sampling

NO_VALID_TOKEN = -1
"""What `select` answers for a row without a distribution to draw from (transformers raises there)."""


def process(plan: SamplingPlan, state: SamplingState, logits: jax.Array) -> jax.Array:
    """The scores f32[batch, vocab] that transformers' ``LogitsProcessorList`` makes of `logits` [batch, vocab]."""
    scores = process_all_modes(plan, state, logits.astype(jnp.float32))
    if plan.do_sample:
        scores = process_sampling(plan, scores)
    return jax.nn.log_softmax(scores, axis=-1) if plan.renormalize_logits else scores


def select(plan: SamplingPlan, state: SamplingState, scores: jax.Array) -> jax.Array:
    """The next token of each row, i32[batch]: the first of the best, or one drawn from ``softmax(scores)``.

    A draw depends on the row's key and on how many tokens the row has chosen: not on padding, and not on other rows.
    A row with nan, +inf, or -inf throughout cannot be drawn from and gives `NO_VALID_TOKEN`.
    """
    if not plan.do_sample or plan.is_cold:
        return first_argmax(scores)
    keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.num_new)
    return draw(keys, scores)


def step(plan: SamplingPlan, state: SamplingState, logits: jax.Array) -> tuple[jax.Array, SamplingState, jax.Array]:
    """One decode step: (tokens i32[batch], the next state, scores f32[batch, vocab]).

    As in transformers, rows that have ended go on with the pad token where there is an end-of-sequence token at all.
    """
    scores = process(plan, state, logits)
    tokens = select(plan, state, scores)
    if plan.pad_id is not None:
        tokens = jnp.where(state.ended, plan.pad_id, tokens)
    state = append(state, tokens)
    return tokens, dataclasses.replace(state, ended=state.ended | finished(plan, state, tokens)), scores


def first_argmax(scores: jax.Array) -> jax.Array:
    """i32[batch]: the first column of each row's maximum (nan counts as one), as ``torch.argmax`` gives.

    In two levels: XLA's CPU backend computes a maximum with vector instructions and an argmax one number at a time, 20
    times slower.
    """
    blocks = _in_blocks(scores)
    block = jnp.argmax(blocks.max(-1), axis=-1).astype(jnp.int32)
    inside = jnp.argmax(_block_of(blocks, block), axis=-1).astype(jnp.int32)
    return block * blocks.shape[-1] + inside


def draw(keys: jax.Array, scores: jax.Array) -> jax.Array:
    """i32[batch]: one token of each row from ``softmax(scores)``, `keys`: key[batch].

    Inverts the cumulative distribution in two levels, a block and then a column of it, with a random number for each:
    two numbers a row instead of one for each token, and 46 random bits instead of 23.
    """
    best = scores.max(-1, keepdims=True)
    blocks = jnp.exp(_in_blocks(scores) - best[:, :, None])
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    block = _invert_cumulative(blocks.sum(-1), uniform[:, 0])
    inside = _invert_cumulative(_block_of(blocks, block), uniform[:, 1])
    return jnp.where(jnp.isfinite(best[:, 0]), block * blocks.shape[-1] + inside, NO_VALID_TOKEN)


def _invert_cumulative(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """i32[batch]: the first column up to which the weights f32[batch, n] exceed the part `uniform` (in [0, 1))."""
    cumulative = jnp.cumsum(weights, axis=-1)
    # A scan rounds differently from column to column, so a column of no weight could seem to add some.
    reached = (cumulative > uniform[:, None] * cumulative[:, -1:]) & (weights > 0)
    first = jnp.argmax(reached, axis=-1)
    return jnp.where(reached.any(-1), first, jnp.argmax(weights, axis=-1)).astype(jnp.int32)


def _in_blocks(scores: jax.Array) -> jax.Array:
    """f32[batch, num_blocks, width]: rows cut into blocks of about the square root of their length."""
    batch, vocab_size = scores.shape
    width = _block_width(vocab_size)
    padding = -vocab_size % width
    if padding:
        scores = jnp.pad(scores, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return scores.reshape(batch, -1, width)


def _block_width(vocab_size: int) -> int:
    """The divisor of `vocab_size` nearest to 256, so that nothing is copied; 256 itself if all are far from it."""
    width = min((w for w in range(64, 2049) if vocab_size % w == 0), key=lambda w: abs(w - 256), default=256)
    return min(width, vocab_size)


def _block_of(blocks: jax.Array, block: jax.Array) -> jax.Array:
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
