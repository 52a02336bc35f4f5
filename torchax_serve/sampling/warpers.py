"""Processors of sampling: each removes (scores as -inf) the tokens that its method leaves out.

Behind top-k they work on any set of columns, the whole vocabulary or a few candidates of it in ascending order of
token id, because removed tokens have no mass. Each gives what transformers' warper of the same name gives.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from torchax_serve.sampling.plan import SamplingPlan
from torchax_serve.sampling.thresholds import beyond_mass, in_light_tail

TOP_H_CANDIDATES = 100  # transformers looks at no more


def top_columns(scores: jax.Array, num_columns: int) -> tuple[jax.Array, jax.Array]:
    """The largest of each row, f32[batch, num_columns] in descending order, and their columns.

    Barriers keep XLA from merging later slices into this one: its CPU backend would no longer see a top-k there and
    sort whole rows, 100 times slower. One barrier for both would crash its compiler where a program runs on several
    devices.
    """
    best, columns = lax.top_k(scores, num_columns)
    return lax.optimization_barrier(best), lax.optimization_barrier(columns)


def keep_top_h(top_h: jax.Array, scores: jax.Array) -> jax.Array:
    """Keeps the likeliest tokens as long as their entropy stays below a part of the whole (Top-H, arXiv:2509.02510)."""
    best, ids = top_columns(scores, min(TOP_H_CANDIDATES, scores.shape[-1]))
    log_probs = jax.nn.log_softmax(best, axis=-1)
    probs = jnp.exp(log_probs)
    # A token of no probability makes 0 * -inf = nan in transformers, and with it everything behind is removed.
    cumulative = jnp.cumsum(-probs * jnp.where(probs > 0, log_probs, -jnp.inf), axis=-1)
    entropy = jnp.where(probs > 0, -probs * log_probs, 0.0).sum(-1, keepdims=True)
    keep = (cumulative <= entropy * top_h).at[:, 0].set(True)
    rows = jnp.arange(scores.shape[0])[:, None]
    return jnp.full_like(scores, -jnp.inf).at[rows, ids].set(jnp.where(keep, best, -jnp.inf))


def top_candidates(
    scores: jax.Array, num_candidates: int, top_k: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The best tokens of each row, in ascending order of id, and the score of the k-th best.

    Returns:
        Scores f32[batch, num_candidates], their token ids i32[batch, num_candidates], the k-th best score f32[batch,
        1], and bool[]: false if tokens that tie with the k-th best may lie beyond these columns.
    """
    best, ids = top_columns(scores, num_candidates)
    kth = jnp.take_along_axis(best, jnp.broadcast_to(top_k - 1, (len(best), 1)), axis=1)
    complete = num_candidates == scores.shape[1] or ((best[:, -1:] < kth) | (best[:, -1:] == -jnp.inf)).all()
    order = jnp.argsort(ids, axis=1)
    ids, best = jnp.take_along_axis(ids, order, axis=1), jnp.take_along_axis(best, order, axis=1)
    return best, ids, kth, jnp.asarray(complete)


def keep_top_p(tail: jax.Array, scores: jax.Array) -> jax.Array:
    """Removes the least likely tokens up to a mass of `tail` = 1 - top_p (nucleus sampling, Holtzman et al. 2019)."""
    return jnp.where(in_light_tail(scores, jax.nn.softmax(scores, axis=-1), tail), -jnp.inf, scores)


def keep_min_p(min_p: jax.Array, scores: jax.Array) -> jax.Array:
    """Removes tokens less likely than `min_p` times the likeliest (Nguyen et al. 2024)."""
    probs = jax.nn.softmax(scores, axis=-1)
    return jnp.where(probs < min_p * probs.max(-1, keepdims=True), -jnp.inf, scores)


def keep_typical(mass: jax.Array, scores: jax.Array) -> jax.Array:
    """Keeps `mass` of the tokens whose surprise is closest to the entropy (Meister et al. 2022)."""
    log_probs = jax.nn.log_softmax(scores, axis=-1)
    probs = jnp.exp(log_probs)
    distance = jnp.abs(-log_probs - _entropy(log_probs, probs))
    return jnp.where(beyond_mass(distance, jax.nn.softmax(scores, axis=-1), mass), -jnp.inf, scores)


def cut_epsilon(epsilon: jax.Array, scores: jax.Array) -> jax.Array:
    """Removes tokens less likely than `epsilon`, never the likeliest (Hewitt et al. 2022)."""
    removed = (jax.nn.softmax(scores, axis=-1) < epsilon) & (scores < scores.max(-1, keepdims=True))
    return jnp.where(removed, -jnp.inf, scores)


def cut_eta(epsilon: jax.Array, scores: jax.Array) -> jax.Array:
    """Like `cut_epsilon`, with a cut-off that falls with the entropy (eta sampling, Hewitt et al. 2022)."""
    log_probs = jax.nn.log_softmax(scores, axis=-1)
    eta = jnp.minimum(epsilon, jnp.sqrt(epsilon) * jnp.exp(-_entropy(log_probs, jnp.exp(log_probs))))
    return cut_epsilon(eta, scores)


def _entropy(log_probs: jax.Array, probs: jax.Array) -> jax.Array:
    return -jnp.where(probs > 0, log_probs * probs, 0.0).sum(-1, keepdims=True)


def warp_columns(plan: SamplingPlan, scores: jax.Array) -> jax.Array:
    """All that comes behind top-k, in transformers' order, on any set of columns."""
    if plan.top_p_tail is not None:
        scores = keep_top_p(plan.top_p_tail, scores)
    if plan.min_p is not None:
        scores = keep_min_p(plan.min_p, scores)
    if plan.typical_p is not None:
        scores = keep_typical(plan.typical_p, scores)
    if plan.epsilon_cutoff is not None:
        scores = cut_epsilon(plan.epsilon_cutoff, scores)
    if plan.eta_cutoff is not None:
        scores = cut_eta(plan.eta_cutoff, scores)
    return scores


def process_sampling(plan: SamplingPlan, scores: jax.Array) -> jax.Array:
    """All processors of sampling, f32[batch, vocab] to the same. Behind top-k, only candidates are computed with."""
    if plan.temperature is not None:
        scores = scores / plan.temperature
    if plan.top_h is not None:
        scores = keep_top_h(plan.top_h, scores)
    if plan.top_k is None:
        return warp_columns(plan, scores)
    candidates, ids, kth, complete = top_candidates(scores, plan.num_candidates, plan.top_k)

    def cut_and_warp(columns: jax.Array) -> jax.Array:
        return warp_columns(plan, jnp.where(columns < kth, -jnp.inf, columns))  # ties with the k-th best stay

    def on_candidates() -> jax.Array:
        rows = jnp.arange(scores.shape[0])[:, None]
        return jnp.full_like(scores, -jnp.inf).at[rows, ids].set(cut_and_warp(candidates))

    return lax.cond(complete, on_candidates, lambda: cut_and_warp(scores))
