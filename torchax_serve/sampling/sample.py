"""Samples the tokens of a step on the device, for a batch of rows with options of their own.

The options of a row are applied in transformers' order of processors, with the penalties of OpenAI's interface in
between. A row's result is a function of that row only: the other rows of the batch decide which branches of the program
run, never what they compute for it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torchax_serve.sampling.history import request_key
from torchax_serve.sampling.processors import penalise_repetition
from torchax_serve.sampling.selection import draw, first_argmax
from torchax_serve.sampling.truncation import truncate
from torchax_serve.sampling.types import Logprobs, RowOptions, Sampled, SamplerSpec, SamplerState, SamplerTables
from torchax_serve.scheduler import INVALID_TOKEN

IN_PROMPT, IS_STOP, NOT_FIRST = 1, 2, 4  # bits of `SamplerTables.flags`


def sample(
    spec: SamplerSpec, options: RowOptions, state: SamplerState, logits: jax.Array
) -> tuple[Sampled, SamplerState]:
    """Chooses a token for each row. Pure: jit it with `spec` static and `state` donated.

    A row of nan, or with no finite score left, gives `INVALID_TOKEN`. Rows whose slot is out of range write nothing.
    Tables of the state are read and written by the level "full" alone and passed through by the others, whose program
    need not know them: `torchax_serve.sampling.sampler.Sampler` leaves them out.

    Args:
        spec: covers every row (`SlotParams.rows` gives it).
        options: of the n rows.
        state: of all slots.
        logits: float[n, vocab], of each row's last token.
    """
    tables = state.tables

    def tokens_of(options: RowOptions, logits: jax.Array) -> jax.Array:
        scores = logits.astype(jnp.float32)
        if spec.level == "full":
            assert tables is not None, "rows of the level full come with their tables"
            scores = apply_penalties(options, tables, scores)
        return _draw_some(options, scores, argmax_tokens(scores), full=spec.level == "full")

    # A maximum is the same in any order, and in the dtype the logits come in.
    tokens = argmax_tokens(logits) if spec.level == "greedy" else per_row(tokens_of, options, logits)
    slot = options.int_column("slot")
    # The next step embeds the last token, so even a failed row's must be one.
    last_tokens = state.last_tokens.at[slot].set(jnp.maximum(tokens, 0), mode="drop")
    if spec.level == "full":
        assert tables is not None
        column = jnp.where(tokens < 0, logits.shape[1], tokens)  # a negative index would count from the end
        tables = dataclasses.replace(tables, counts=tables.counts.at[slot, column].add(1, mode="drop"))
    logprobs = logprobs_of(logits, tokens, num_top=spec.num_top) if spec.logprobs else None
    return Sampled(tokens, logprobs), SamplerState(last_tokens, tables)


def apply_penalties(options: RowOptions, tables: SamplerTables, scores: jax.Array) -> jax.Array:
    """float32[n, vocab]: biases, penalties, bans on ending early and on first tokens, as every decoding mode has them.

    Biases come first, as transformers' sequence bias does; presence and frequency penalties (OpenAI's: over outputs
    alone) right behind the repetition penalty (transformers': over prompt and outputs).
    """
    slot = options.int_column("slot")

    def rows_of(table: jax.Array) -> jax.Array:
        return table.at[slot].get(mode="clip")  # a row that is padding gets another's, and nobody looks

    def column(name: str) -> jax.Array:
        return options.float_column(name)[:, None]

    flags = rows_of(tables.flags)
    scores = scores + rows_of(tables.bias)

    def penalise(scores: jax.Array) -> jax.Array:
        counts = rows_of(tables.counts)
        seen = (counts > 0) | (flags & IN_PROMPT > 0)
        scores = penalise_repetition(column("repetition_penalty"), seen, scores)
        return scores - (column("frequency_penalty") * counts + column("presence_penalty") * (counts > 0))

    off = (column("repetition_penalty") == 1) & (column("frequency_penalty") == 0) & (column("presence_penalty") == 0)
    scores = lax.cond(off.all(), lambda scores: scores, penalise, scores)
    num_new = options.int_column("num_new")[:, None]
    too_early = (flags & IS_STOP > 0) & (num_new < options.int_column("min_new_tokens")[:, None])
    return jnp.where(too_early | (flags & NOT_FIRST > 0) & (num_new == 0), -jnp.inf, scores)


def logprobs_of(logits: jax.Array, tokens: jax.Array, *, num_top: int) -> Logprobs:
    """Log-probabilities of `tokens` int32[n] under `logits` [n, vocab], and of the `num_top` likeliest.

    That of an invalid token is nan.
    """
    logits = logits.astype(jnp.float32)
    total = per_row(functools.partial(jax.nn.logsumexp, axis=-1, keepdims=True), logits)
    column = jnp.where(tokens < 0, logits.shape[1], tokens)[:, None]
    chosen = jnp.take_along_axis(logits, column, axis=1, mode="fill", fill_value=jnp.nan) - total
    if not num_top:
        return Logprobs(chosen[:, 0], None, None)
    best, ids = lax.top_k(logits, min(num_top, logits.shape[1]))
    return Logprobs(chosen[:, 0], ids, best - total)


def per_row(function: Callable[..., jax.Array], *operands: Any) -> jax.Array:
    """What `function` gives for pytrees of arrays whose first dimension is the row; on a CPU, for one row at a time.

    XLA's CPU backend adds up the numbers of a row in an order that depends on how many rows there are. Row by row the
    sums are the same in any company. It is no slower: a row fits into the cache, and takes only its own branches. An
    accelerator, to which rows one after another would be slow, gets all of them at once; nothing is promised about the
    last bit of its sums.
    """

    def one_by_one(*operands: Any) -> jax.Array:
        return lax.map(lambda row: function(*jax.tree.map(lambda array: array[None], row))[0], operands)

    return lax.platform_dependent(*operands, cpu=one_by_one, default=function)


def argmax_tokens(scores: jax.Array) -> jax.Array:
    """int32[n]: the first of each row's best; `INVALID_TOKEN` where a row has nan or nothing finite."""
    tokens = first_argmax(scores)
    best = jnp.take_along_axis(scores, tokens[:, None], axis=1)[:, 0]
    # nan counts as a maximum, so a finite best says it all; only an infinite one has the row looked through.
    all_finite = functools.partial(jnp.isfinite, best)
    any_finite = lax.cond((best == jnp.inf).any(), lambda: jnp.isfinite(scores).any(-1), all_finite)
    return jnp.where(any_finite & ~jnp.isnan(best), tokens, INVALID_TOKEN)


def row_keys(options: RowOptions) -> jax.Array:
    """key[n], with which a row draws its next token: that of `torchax_serve.sampling` for a request by itself."""

    def key_of(low: jax.Array, high: jax.Array, num_new: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(request_key(low, high), 0), num_new)

    low, high = (lax.bitcast_convert_type(options.int_column(name), jnp.uint32) for name in ("seed_low", "seed_high"))
    return jax.vmap(key_of)(low, high, options.int_column("num_new"))


def _draw_some(options: RowOptions, scores: jax.Array, greedy: jax.Array, *, full: bool) -> jax.Array:
    """int32[n]: drawn where a row's temperature is above zero, `greedy` elsewhere."""
    is_drawn = (options.float_column("temperature") > 0) & (greedy != INVALID_TOKEN)

    def drawn() -> jax.Array:
        return jnp.where(is_drawn, draw(row_keys(options), truncate(options, scores, full=full)), greedy)

    return lax.cond(is_drawn.any(), drawn, lambda: greedy)
