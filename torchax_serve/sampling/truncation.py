"""Truncates distributions by row: temperature, top-h, top-k, top-p, min-p and the rest.

A row whose top-k is small is truncated among its best columns; so is a row without top-k if its nucleus is within
them. Others take the whole vocabulary. Which it is depends on the row only, so that the other rows cannot change a bit
of it; a branch that no row takes is not run.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from torchax_serve.sampling.selection import MAX_PAIRWISE, mask_below_mass, threshold_for_mass
from torchax_serve.sampling.types import Level, RowOptions

NUM_CANDIDATES = 128


MAX_TOP_K = 120
"""Largest top-k that is computed with among the candidates. A few columns more, for tokens that tie with the k-th and
stay; rows with more of them than that take the whole vocabulary."""


BLOCK_WIDTH = 32  # columns; of 16, 32 and 64 the fastest on a CPU for vocabularies of 32,000 and 150,000


def truncate(options: RowOptions, scores: jax.Array, *, level: Level) -> jax.Array:
    """Divides `scores` by the temperature and removes tokens, which get -inf.

    Args:
        options: Options of the rows; a temperature of 0 counts as 1.
        scores: float32[n, vocab], after penalties and biases.
        level: Level that covers the rows.
    """
    temperature, top_k = options.float_column("temperature"), options.int_column("top_k")
    has_top_p = options.float_column("top_p_tail") > 0
    scores = scores / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    all_options = level in ("penalties", "history")
    if level == "history":
        top_h = options.float_column("top_h")
        scores = _map_rows(top_h > 0, lambda scores: keep_top_h(top_h[:, None], scores), scores)
    pending = has_top_p | (top_k > 0) | (options.float_column("min_p") > 0)
    if all_options:
        pending |= jnp.stack([_is_on(options, name) for name in ("typical_p", "epsilon_cutoff", "eta_cutoff")]).any(0)
    num_candidates = min(NUM_CANDIDATES, scores.shape[1])
    max_top_k = MAX_TOP_K if num_candidates < scores.shape[1] else num_candidates
    few = (top_k > 0) & (top_k <= max_top_k) | (top_k == 0) & has_top_p
    scores, done = _truncate_candidates(options, scores, pending & few, num_candidates, all_options=all_options)
    pending &= ~done
    return _map_rows(
        pending, lambda scores: _truncate_vocabulary(options, scores, pending, all_options=all_options), scores
    )


def _truncate_candidates(
    options: RowOptions, scores: jax.Array, rows: jax.Array, num_candidates: int, *, all_options: bool
) -> tuple[jax.Array, jax.Array]:
    """Truncates `rows` among their best columns if possible; also returns which, bool[n]."""
    tail, top_k = options.float_column("top_p_tail"), options.int_column("top_k")
    has_top_k = (top_k > 0)[:, None]

    def run() -> tuple[jax.Array, jax.Array]:
        best, ids, descending = top_candidates(scores, num_candidates)
        last = descending[:, -1:]
        kth = jnp.take_along_axis(descending, jnp.clip(top_k - 1, 0, num_candidates - 1)[:, None], axis=1)
        columns = jnp.where(has_top_k & (best < kth), -jnp.inf, best)  # ties with the k-th best stay
        masses, outside = _masses(scores, columns, is_nucleus=rows & (top_k == 0))
        light = mask_below_mass(columns, masses, _limit(tail - outside, num_candidates))
        columns = jnp.where(light & (tail > 0)[:, None], -jnp.inf, columns)
        # All that tie with the k-th must be here; and the smallest of a nucleus, lest columns beyond are in it too.
        cut_is_here = jnp.where(has_top_k, last < kth, ((columns == -jnp.inf) | (best > last)).all(-1, keepdims=True))
        all_are_here = (last == -jnp.inf) | (num_candidates == scores.shape[1])
        done = rows & (cut_is_here | all_are_here)[:, 0]
        columns = _min_p_and_later(options, columns, all_options=all_options)
        cut_scores = jnp.full_like(scores, -jnp.inf)
        cut_scores = cut_scores.at[jnp.arange(len(scores))[:, None], ids].set(columns, mode="drop")
        return jnp.where(done[:, None], cut_scores, scores), done

    return lax.cond(rows.any(), run, lambda: (scores, jnp.zeros_like(rows)))


def _masses(scores: jax.Array, columns: jax.Array, *, is_nucleus: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes masses of `columns`, of all `scores` if `is_nucleus`, and that of the others."""
    among_columns = jax.nn.softmax(columns, axis=-1)

    def among_all() -> tuple[jax.Array, jax.Array]:
        best = scores.max(-1, keepdims=True)
        total = jnp.exp(scores - best).sum(-1, keepdims=True)
        masses = jnp.exp(columns - best) / total
        outside = jnp.maximum(1 - masses.sum(-1), 0)
        return jnp.where(is_nucleus[:, None], masses, among_columns), jnp.where(is_nucleus, outside, 0)

    return lax.cond(is_nucleus.any(), among_all, lambda: (among_columns, jnp.zeros_like(columns[:, 0])))


def top_candidates(scores: jax.Array, num_columns: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the best of each row: scores by ascending id, the ids, scores descending.

    Each is [n, num_columns].

    In two levels: the best columns lie in the blocks of the best maxima. XLA's CPU backend looks at one number at a
    time for a top-k and at many for a maximum. Ids may exceed the vocabulary where the score is -inf.
    """
    n, vocab_size = scores.shape
    if vocab_size <= 2 * BLOCK_WIDTH * num_columns:
        best, ids = top_columns(scores, num_columns)
    else:
        padded = jnp.pad(scores, ((0, 0), (0, -vocab_size % BLOCK_WIDTH)), constant_values=-jnp.inf)
        blocks = padded.reshape(n, -1, BLOCK_WIDTH)
        # In ascending order, so that columns of equal scores keep theirs.
        block_ids = jnp.sort(top_columns(blocks.max(-1), num_columns)[1], axis=-1)
        inner = jnp.take_along_axis(blocks, block_ids[:, :, None], axis=1).reshape(n, -1)
        best, columns = top_columns(inner, num_columns)
        ids = jnp.take_along_axis(block_ids, columns // BLOCK_WIDTH, axis=1) * BLOCK_WIDTH + columns % BLOCK_WIDTH
    ids, by_id = lax.sort((ids, best), dimension=1, num_keys=1)
    return by_id, ids, best


def _truncate_vocabulary(options: RowOptions, scores: jax.Array, rows: jax.Array, *, all_options: bool) -> jax.Array:
    tail, top_k = options.float_column("top_p_tail"), options.int_column("top_k")
    vocab_size = scores.shape[1]

    def keep_top_k(scores: jax.Array) -> jax.Array:
        num_removed = _limit((vocab_size - top_k).astype(jnp.float32), vocab_size)
        removed = mask_below_mass(scores, jnp.ones_like(scores), num_removed)
        kth = jnp.where(removed, jnp.inf, scores).min(-1, keepdims=True)
        return jnp.where(scores < kth, -jnp.inf, scores)  # ties with the k-th best stay

    scores = _map_rows(rows & (top_k > 0), keep_top_k, scores)
    scores = _map_rows(rows & (tail > 0), lambda s: top_p(_limit(tail, vocab_size), s), scores)
    return _min_p_and_later(options, scores, all_options=all_options)


def _min_p_and_later(options: RowOptions, scores: jax.Array, *, all_options: bool) -> jax.Array:
    """Applies what follows top-p to any columns of the rows."""

    def column(name: str) -> jax.Array:
        return options.float_column(name)[:, None]

    scores = _map_rows(options.float_column("min_p") > 0, lambda s: keep_min_p(column("min_p"), s), scores)
    if all_options:
        mass = _limit(options.float_column("typical_p"), scores.shape[1])
        scores = _map_rows(_is_on(options, "typical_p"), lambda s: keep_typical(mass, s), scores)
        epsilon, eta = column("epsilon_cutoff"), column("eta_cutoff")
        scores = _map_rows(_is_on(options, "epsilon_cutoff"), lambda s: epsilon_cutoff(epsilon, s), scores)
        scores = _map_rows(_is_on(options, "eta_cutoff"), lambda s: cut_eta(eta, s), scores)
    return scores


def _is_on(options: RowOptions, name: str) -> jax.Array:
    return options.float_column(name) < 1 if name == "typical_p" else options.float_column(name) > 0


def _map_rows(rows: jax.Array, change: Callable[[jax.Array], jax.Array], scores: jax.Array) -> jax.Array:
    """Applies `change` to those `rows` of `scores`; computes nothing if there are none."""
    return lax.cond(rows.any(), lambda: jnp.where(rows[:, None], change(scores), scores), lambda: scores)


def _limit(limit: jax.Array, num_columns: int) -> jax.Array:
    """Reshapes limits of rows [n] to what `mask_below_mass` broadcasts for so many columns."""
    return limit[:, None] if num_columns <= MAX_PAIRWISE else limit


TOP_H_CANDIDATES = 100  # transformers looks at no more


def top_columns(scores: jax.Array, num_columns: int) -> tuple[jax.Array, jax.Array]:
    """Returns the largest of each row [batch, num_columns], descending, and their columns.

    Barriers keep XLA from merging later slices into this one: its CPU backend would no longer see a top-k there and
    sort whole rows, 100 times slower. One barrier for both would crash its compiler where a program runs on several
    devices.
    """
    best, columns = lax.top_k(scores, num_columns)
    return lax.optimization_barrier(best), lax.optimization_barrier(columns)


def keep_top_h(top_h: jax.Array, scores: jax.Array) -> jax.Array:
    """Keeps the likeliest tokens up to a fraction of the entropy (Top-H, arXiv:2509.02510)."""
    best, ids = top_columns(scores, min(TOP_H_CANDIDATES, scores.shape[-1]))
    log_probs = jax.nn.log_softmax(best, axis=-1)
    probs = jnp.exp(log_probs)
    # A token of no probability makes 0 * -inf = nan in transformers, and with it everything behind is removed.
    cumulative = jnp.cumsum(-probs * jnp.where(probs > 0, log_probs, -jnp.inf), axis=-1)
    entropy = jnp.where(probs > 0, -probs * log_probs, 0.0).sum(-1, keepdims=True)
    keep = (cumulative <= entropy * top_h).at[:, 0].set(True)
    rows = jnp.arange(scores.shape[0])[:, None]
    return jnp.full_like(scores, -jnp.inf).at[rows, ids].set(jnp.where(keep, best, -jnp.inf))


def top_p(tail: jax.Array, scores: jax.Array) -> jax.Array:
    """Removes the least likely tokens up to a mass of `tail` = 1 - top_p (Holtzman et al. 2019)."""
    return jnp.where(mask_below_mass(scores, jax.nn.softmax(scores, axis=-1), tail), -jnp.inf, scores)


def keep_min_p(min_p: jax.Array, scores: jax.Array) -> jax.Array:
    """Removes tokens less likely than `min_p` times the likeliest (Nguyen et al. 2024)."""
    probs = jax.nn.softmax(scores, axis=-1)
    return jnp.where(probs < min_p * probs.max(-1, keepdims=True), -jnp.inf, scores)


def keep_typical(mass: jax.Array, scores: jax.Array) -> jax.Array:
    """Keeps `mass` of the tokens whose surprise is closest to the entropy (Meister et al. 2022)."""
    log_probs = jax.nn.log_softmax(scores, axis=-1)
    probs = jnp.exp(log_probs)
    distance = jnp.abs(-log_probs - _entropy(log_probs, probs))
    return jnp.where(threshold_for_mass(distance, jax.nn.softmax(scores, axis=-1), mass), -jnp.inf, scores)


def epsilon_cutoff(epsilon: jax.Array, scores: jax.Array) -> jax.Array:
    """Removes tokens less likely than `epsilon`, never the likeliest (Hewitt et al. 2022)."""
    removed = (jax.nn.softmax(scores, axis=-1) < epsilon) & (scores < scores.max(-1, keepdims=True))
    return jnp.where(removed, -jnp.inf, scores)


def cut_eta(epsilon: jax.Array, scores: jax.Array) -> jax.Array:
    """Removes tokens below a cut-off that falls with the entropy (eta, Hewitt et al. 2022)."""
    log_probs = jax.nn.log_softmax(scores, axis=-1)
    eta = jnp.minimum(epsilon, jnp.sqrt(epsilon) * jnp.exp(-_entropy(log_probs, jnp.exp(log_probs))))
    return epsilon_cutoff(eta, scores)


def _entropy(log_probs: jax.Array, probs: jax.Array) -> jax.Array:
    return -jnp.where(probs > 0, log_probs * probs, 0.0).sum(-1, keepdims=True)
