"""Samples the tokens of a step on the device, for a batch of rows with options of their own.

A row's result is a function of that row only: the other rows of the batch decide which branches of the program run,
never what they compute for it. `Sampler` keeps the state of an engine's slots, `BatchSampler` that of a static batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torchax_serve.sampling.processors import process, renormalize
from torchax_serve.sampling.selection import INVALID_TOKEN, draw, first_argmax
from torchax_serve.sampling.token_masks import mask_logits
from torchax_serve.sampling.truncation import truncate
from torchax_serve.sampling.types import Logprobs, RowOptions, Sampled, SamplerSpec, SamplerState


def sample(
    spec: SamplerSpec, options: RowOptions, state: SamplerState, logits: jax.Array, bitmask: jax.Array | None = None
) -> tuple[Sampled, SamplerState]:
    """Samples a token for each row. Pure: jit it with `spec` static and `state` donated.

    A row of nan, or with no finite score left, gives `INVALID_TOKEN`. Rows whose slot is out of range write nothing.
    Tables and history are read and written by their levels only and passed through by the others, whose programs need
    not know them: `Sampler` leaves them out.

    Args:
        spec: Level that covers every row (`PROGRAM_LEVELS`), and what to return.
        options: Options of the n rows.
        state: State of all slots.
        logits: float[n, vocab], of each row's last token.
        bitmask: int32[n, ceil(vocab / 32)], tokens that a row may sample, as for `mask_logits`; None: all.
    """
    tokens, scores, token_logprobs = _choose(spec, options, state, logits, bitmask)
    return Sampled(tokens, None, scores, token_logprobs), append(spec, options, state, tokens)


def choose(
    spec: SamplerSpec, options: RowOptions, state: SamplerState, logits: jax.Array, bitmask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns tokens int32[n], and scores float32[n, vocab] if `spec` asks for them.

    Arguments are those of `sample`; the state does not change.
    """
    return _choose(spec, options, state, logits, bitmask)[:2]


def _choose(
    spec: SamplerSpec, options: RowOptions, state: SamplerState, logits: jax.Array, bitmask: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns what `choose` does, with log-probabilities float32[n] if there is a history."""
    if spec.level == "greedy":  # a maximum is the same in any order, and in the dtype of the logits
        best = mask_logits(logits, bitmask, functools.partial(_best_tokens, spec))
        return best, mask_logits(logits, bitmask).astype(jnp.float32) if spec.scores else None, None
    has_history = spec.level == "history" and state.history is not None

    def of_rows(options: RowOptions, logits: jax.Array, bitmask: jax.Array | None) -> tuple[jax.Array, ...]:
        scores = processed(spec, options, state, mask_logits(logits, bitmask))
        best = _best_tokens(spec, _renormalized(spec, options, state, scores))

        def drawn() -> tuple[jax.Array, ...]:
            kept = truncate(options, scores, level=spec.level)
            kept = jnp.where(is_random[:, None], kept, scores) if spec.scores or has_history else kept
            kept = _renormalized(spec, options, state, kept)
            return with_scores(jnp.where(is_random, draw(row_keys(options), kept), best), kept)

        def greedy() -> tuple[jax.Array, ...]:
            return with_scores(best, _renormalized(spec, options, state, scores))

        def with_scores(tokens: jax.Array, kept: jax.Array) -> tuple[jax.Array, ...]:
            logprobs = [_token_logprobs(options, state, kept, tokens)] if has_history else []
            return tokens, *logprobs, *([kept] if spec.scores else [])

        if not spec.draws:
            return greedy()
        is_random = (options.float_column("temperature") > 0) & (best != INVALID_TOKEN)
        return lax.cond(is_random.any(), drawn, greedy)

    if spec.level == "penalties" and not spec.draws:  # no sums, so rows cannot change each other
        tokens, *rest = of_rows(options, logits, bitmask)
    else:
        tokens, *rest = per_row(of_rows, options, logits, bitmask, num_rows=_num_read(options, state))
    return tokens, rest[-1] if spec.scores else None, rest[0] if has_history else None


def _token_logprobs(options: RowOptions, state: SamplerState, scores: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns log-probabilities of `tokens` int32[n]; zeros where no row asks for them.

    A temperature is taken out of the scores again, as ``generate`` of Whisper does to compare temperatures.

    Args:
        options: Options of the n rows.
        state: State of all slots, with a history.
        scores: float32[n, vocab], divided by the temperature.
        tokens: int32[n].
    """
    assert state.history is not None
    asks = state.history.column("scores_logprobs").at[options.int_column("history_slot")].get(mode="fill", fill_value=0)
    temperature = options.float_column("temperature")

    def computed() -> jax.Array:
        at_one = scores * jnp.where(temperature > 0, temperature, 1.0)[:, None]
        chosen = jnp.take_along_axis(at_one, jnp.maximum(tokens, 0)[:, None], axis=1)[:, 0]
        return chosen - jax.nn.logsumexp(at_one, axis=-1)

    return lax.cond((asks > 0).any(), computed, lambda: jnp.zeros(tokens.shape, jnp.float32))


def processed(spec: SamplerSpec, options: RowOptions, state: SamplerState, logits: jax.Array) -> jax.Array:
    """Returns float32[n, vocab]: the scores before truncation. Arguments are those of `sample`."""
    scores = logits.astype(jnp.float32)
    if spec.level in ("penalties", "history"):
        scores = process(options, state, scores, spec.rules)
    return scores


def append(spec: SamplerSpec, options: RowOptions, state: SamplerState, tokens: jax.Array) -> SamplerState:
    """Returns the state after `tokens` int32[n]; other arguments are those of `sample`."""
    # The next step embeds the last token, so even a failed row's must be one.
    last_tokens = state.last_tokens.at[options.int_column("slot")].set(jnp.maximum(tokens, 0), mode="drop")
    state = dataclasses.replace(state, last_tokens=last_tokens)
    if spec.level in ("penalties", "history") and state.tables is not None:
        counts = state.tables.counts
        column = jnp.where(tokens < 0, counts.shape[1], tokens)  # a negative index would count from the end
        counts = counts.at[options.int_column("table_slot"), column].add(1, mode="drop")
        state = dataclasses.replace(state, tables=dataclasses.replace(state.tables, counts=counts))
    if spec.level == "history" and state.history is not None:
        history, slot = state.history, options.int_column("history_slot")
        length = history.column("prompt_len").at[slot].get(mode="clip") + options.int_column("num_new")
        stored = history.tokens.at[slot, length].set(tokens, mode="drop")
        state = dataclasses.replace(state, history=dataclasses.replace(history, tokens=stored))
    return state


def logprobs_of(
    logits: jax.Array,
    tokens: jax.Array,
    bitmask: jax.Array | None = None,
    *,
    num_top: int,
    has_top: jax.Array | bool = True,
    num_rows: jax.Array | int | None = None,
) -> Logprobs:
    """Computes log-probabilities of `tokens` int32[n] and of the `num_top` likeliest.

    They follow from `logits`. That of an invalid token is nan.

    Args:
        logits: float[n, vocab].
        tokens: int32[n].
        bitmask: As in `sample`; masked tokens have a probability of zero.
        num_top: Number of likeliest tokens.
        has_top: Whether these are read; else they are zeros.
        num_rows: Number of rows that are read, as in `per_row`.
    """

    def of_rows(logits: jax.Array, tokens: jax.Array, bitmask: jax.Array | None) -> Logprobs:
        logits = mask_logits(logits, bitmask).astype(jnp.float32)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        column = jnp.where(tokens < 0, logits.shape[1], tokens)[:, None]
        logit = jnp.take_along_axis(logits, column, axis=1, mode="fill", fill_value=jnp.nan)
        chosen, rank = logit - total, jnp.sum(logits >= logit, axis=1, dtype=jnp.int32)
        if not num_top:
            return Logprobs(chosen[:, 0], rank, None, None)

        def likeliest() -> tuple[jax.Array, jax.Array]:
            best, ids = lax.top_k(logits, num_columns)
            return ids, best - total

        num_columns = min(num_top, logits.shape[1])
        shape = (len(logits), num_columns)
        none = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
        return Logprobs(chosen[:, 0], rank, *lax.cond(has_top, likeliest, lambda: none))

    logprobs: Logprobs = per_row(of_rows, logits, tokens, bitmask, num_rows=num_rows)
    return logprobs


def per_row(function: Callable[..., Any], *operands: Any, num_rows: jax.Array | int | None = None) -> Any:
    """Applies `function` to pytrees of arrays [n, ...]; on a CPU, to one row at a time.

    XLA's CPU backend adds up the numbers of a row in an order that depends on how many rows there are. Row by row the
    sums are the same in any company. It is no slower: a row fits into the cache, and takes only its own branches. An
    accelerator, to which rows one after another would be slow, gets all of them at once; nothing is promised about the
    last bit of its sums.

    Args:
        function: Function of the arrays of some rows.
        *operands: Arrays [n, ...].
        num_rows: Number of rows whose results are read, int32[]; None: all. Those behind may be zeros.
    """

    def one_by_one(num_rows: jax.Array, *operands: Any) -> Any:
        def one(index: jax.Array) -> Any:
            row = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, index, 1), operands)
            return function(*row)

        def write(index: jax.Array, out: Any) -> Any:
            return jax.tree.map(
                lambda array, of_row: lax.dynamic_update_slice_in_dim(array, of_row, index, 0), out, one(index)
            )

        shapes = jax.eval_shape(one, jnp.int32(0))
        out = jax.tree.map(lambda of_row: jnp.zeros((size, *of_row.shape[1:]), of_row.dtype), shapes)
        return lax.fori_loop(0, num_rows, write, out)

    def at_once(num_rows: jax.Array, *operands: Any) -> Any:
        return function(*operands)

    size = len(jax.tree.leaves(operands)[0])
    count = jnp.asarray(size if num_rows is None else num_rows, jnp.int32)
    return lax.platform_dependent(count, *operands, cpu=one_by_one, default=at_once)


def _num_read(options: RowOptions, state: SamplerState) -> jax.Array:
    """Returns the number of rows up to the last one that samples, int32[]."""
    samples = options.int_column("slot") < len(state.last_tokens)
    return jnp.max(jnp.where(samples, jnp.arange(1, len(samples) + 1, dtype=jnp.int32), 0))


def with_rows(logits: jax.Array, num_rows: int) -> jax.Array:
    """Returns logits [S, vocab] with rows of zeros behind them, [num_rows, vocab]."""
    return jnp.pad(logits, ((0, num_rows - len(logits)), (0, 0)))


def argmax_tokens(scores: jax.Array) -> jax.Array:
    """Returns int32[n]: the first best token; `INVALID_TOKEN` for nan or nothing finite."""
    tokens = first_argmax(scores)
    best = jnp.take_along_axis(scores, tokens[:, None], axis=1)[:, 0]
    # nan counts as a maximum, so a finite best says it all; only an infinite one has the row looked through.
    all_finite = functools.partial(jnp.isfinite, best)
    any_finite = lax.cond((best == jnp.inf).any(), lambda: jnp.isfinite(scores).any(-1), all_finite)
    return jnp.where(any_finite & ~jnp.isnan(best), tokens, INVALID_TOKEN)


def row_keys(options: RowOptions) -> jax.Array:
    """Returns key[n] of the next draws: from seed, row and number of new tokens."""

    def key_of(low: jax.Array, high: jax.Array, row: jax.Array, num_new: jax.Array) -> jax.Array:
        # The upper half of the seed is folded in: `jax.random.key` would drop it.
        request_key = jax.random.fold_in(jax.random.key(low), high)
        return jax.random.fold_in(jax.random.fold_in(request_key, row), num_new)

    low, high = (lax.bitcast_convert_type(options.int_column(name), jnp.uint32) for name in ("seed_low", "seed_high"))
    return jax.vmap(key_of)(low, high, options.int_column("seed_row"), options.int_column("num_new"))


def _best_tokens(spec: SamplerSpec, scores: jax.Array) -> jax.Array:
    return argmax_tokens(scores) if spec.nan_is_invalid else first_argmax(scores)


def _renormalized(spec: SamplerSpec, options: RowOptions, state: SamplerState, scores: jax.Array) -> jax.Array:
    if spec.level != "history" or state.history is None:
        return scores
    ints = state.history.ints.at[options.int_column("history_slot")].get(mode="fill", fill_value=0)
    return renormalize(dataclasses.replace(state.history, ints=ints), scores)
