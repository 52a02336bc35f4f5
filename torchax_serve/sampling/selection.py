"""Cutting a distribution by cumulative mass without sorting it.

Sorting 32 rows of 32000 scores takes XLA's CPU backend 180 ms. Two ways do without: among a few hundred columns, all
pairs are compared; among many, the threshold's bits are found one after another, a pass over the row each (as radix
select does), which takes 7 ms.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from torchax_serve.scheduler import INVALID_TOKEN

MAX_PAIRWISE = 512  # columns up to which comparing all pairs is the faster way


def last_argmax(values: jax.Array) -> jax.Array:
    """Returns int32[batch]: the last column of each row's maximum."""
    is_max = values == values.max(-1, keepdims=True)
    return jnp.where(is_max, jnp.arange(values.shape[-1]), -1).max(-1)


def mask_below_mass(values: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
    """Returns bool[batch, n]: the smallest columns, with a mass of at most `limit`.

    Equal values count from the left, as in a stable sort. The largest column is never among them.

    Args:
        values: float32[batch, n], by which columns are ordered.
        weights: float32[batch, n], masses of the columns, not negative.
        limit: float32[], [batch] or [batch, 1].
    """
    if values.shape[-1] <= MAX_PAIRWISE:
        columns = jnp.arange(values.shape[-1])
        tail = _mass_up_to_pairwise(values, weights) <= limit
        return tail & (columns != last_argmax(values)[:, None])
    keys = _ordered_bits(values)
    threshold = jnp.minimum(_largest_key(keys, weights, limit, strictly=False), keys.max(-1))[:, None]
    is_tie = keys == threshold

    def cut_ties() -> jax.Array:
        below = jnp.where(keys < threshold, weights, 0.0).sum(-1)
        tie_weight = jnp.where(is_tie, weights, 0.0).max(-1)
        return (keys < threshold) | (is_tie & (jnp.arange(keys.shape[-1]) < _first_kept_tie(is_tie, below, tie_weight)))

    def _first_kept_tie(is_tie: jax.Array, below: jax.Array, tie_weight: jax.Array) -> jax.Array:
        columns = jnp.arange(is_tie.shape[-1])

        def set_bit(i: jax.Array, first: jax.Array) -> jax.Array:
            candidate = first | (1 << (num_bits - 1 - i))
            count = (is_tie & (columns < candidate[:, None])).sum(-1)
            return jnp.where(below + tie_weight * count <= limit, candidate, first)

        num_bits = is_tie.shape[-1].bit_length()
        first = lax.fori_loop(0, num_bits, set_bit, jnp.zeros(is_tie.shape[0], jnp.int32))
        return jnp.minimum(first, jnp.where(is_tie, columns, -1).max(-1))[:, None]

    return lax.cond((is_tie.sum(-1) > 1).any(), cut_ties, lambda: keys < threshold)


def threshold_for_mass(values: jax.Array, weights: jax.Array, mass: jax.Array) -> jax.Array:
    """Returns bool[batch, n]: columns above the one at which `mass` is reached from below.

    If rounding keeps the whole row below `mass`, no column is. Arguments as in `mask_below_mass`; values are not
    negative.
    """
    if values.shape[-1] <= MAX_PAIRWISE:
        reached = _mass_up_to_pairwise(values, weights) >= mass
        return values > jnp.where(reached, values, jnp.inf).min(-1, keepdims=True)
    keys = _ordered_bits(values)
    return keys > _largest_key(keys, weights, mass, strictly=True)[:, None]


def _mass_up_to_pairwise(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns float32[batch, n]: cumulative masses in the order of a stable ascending sort."""
    columns = jnp.arange(values.shape[-1])
    mine, other = values[:, :, None], values[:, None, :]
    no_later = (other < mine) | ((other == mine) & (columns <= columns[:, None]))
    return jnp.where(no_later, weights[:, None, :], 0.0).sum(-1)


def _ordered_bits(values: jax.Array) -> jax.Array:
    """Returns uint32[...]: integers in the order of the float32 `values`."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)  # -0.0 equals 0.0
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_key(keys: jax.Array, weights: jax.Array, limit: jax.Array, *, strictly: bool) -> jax.Array:
    """Returns uint32[batch]: the largest T with keys below T weighing at most `limit`.

    With `strictly` they weigh less. T is the smallest key up to which the mass exceeds (`strictly`: reaches) `limit`,
    or the largest number if none does.
    """

    def set_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        mass = jnp.where(keys < candidate[:, None], weights, 0.0).sum(-1)
        light = mass < limit if strictly else mass <= limit
        return jnp.where(light, candidate, threshold)

    return lax.fori_loop(0, 32, set_bit, jnp.zeros(keys.shape[0], jnp.uint32))


def first_argmax(scores: jax.Array) -> jax.Array:
    """Returns int32[batch]: the first maximum of each row; as in ``torch.argmax`` nan is one.

    In two levels: XLA's CPU backend computes a maximum with vector instructions and an argmax one number at a time, 20
    times slower.
    """
    blocks = _in_blocks(scores)
    block = jnp.argmax(blocks.max(-1), axis=-1).astype(jnp.int32)
    inside = jnp.argmax(_block_of(blocks, block), axis=-1).astype(jnp.int32)
    return block * blocks.shape[-1] + inside


def draw(keys: jax.Array, scores: jax.Array) -> jax.Array:
    """Draws a token of each row, int32[batch], from ``softmax(scores)`` with `keys` key[batch].

    Inverts the cumulative distribution in two levels, a block and then a column of it, with a random number for each:
    two numbers a row instead of one for each token, and 46 random bits instead of 23.
    """
    best = scores.max(-1, keepdims=True)
    blocks = jnp.exp(_in_blocks(scores) - best[:, :, None])
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    block = _invert_cumulative(blocks.sum(-1), uniform[:, 0])
    inside = _invert_cumulative(_block_of(blocks, block), uniform[:, 1])
    return jnp.where(jnp.isfinite(best[:, 0]), block * blocks.shape[-1] + inside, INVALID_TOKEN)


def _invert_cumulative(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Returns int32[batch]: the first column up to which weights exceed a fraction of all."""
    cumulative = jnp.cumsum(weights, axis=-1)
    # A scan rounds differently from column to column, so a column of no weight could seem to add some.
    reached = (cumulative > uniform[:, None] * cumulative[:, -1:]) & (weights > 0)
    first = jnp.argmax(reached, axis=-1)
    return jnp.where(reached.any(-1), first, jnp.argmax(weights, axis=-1)).astype(jnp.int32)


def _in_blocks(scores: jax.Array) -> jax.Array:
    """Reshapes rows to [batch, num_blocks, width], blocks of about the square root of a row."""
    batch, vocab_size = scores.shape
    width = _block_width(vocab_size)
    padding = -vocab_size % width
    if padding:
        scores = jnp.pad(scores, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return scores.reshape(batch, -1, width)


def _block_width(vocab_size: int) -> int:
    """Returns the divisor of `vocab_size` nearest to 256; 256 if all are far from it."""
    width = min((w for w in range(64, 2049) if vocab_size % w == 0), key=lambda w: abs(w - 256), default=256)
    return min(width, vocab_size)


def _block_of(blocks: jax.Array, block: jax.Array) -> jax.Array:
    return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
