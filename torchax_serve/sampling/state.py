"""What decoding remembers of a batch: its tokens, which rows have ended, and a random key for each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model_adapters.arrays import from_host
from torchax_serve.request import MAX_SEED, Limits, invalid
from torchax_serve.sampling.plan import SamplingPlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """A pytree; donate it to the step. Behind `length`, `tokens` holds zeros."""

    tokens: jax.Array  # i32[batch, capacity], prompt (left padding included) and what has been chosen
    length: jax.Array  # i32[], tokens in each row
    num_new: jax.Array  # i32[], how many of them were chosen
    keys: jax.Array  # key[batch]
    ended: jax.Array  # bool[batch]
    seen: jax.Array | None  # bool[batch, vocab], tokens under the repetition penalty; None where there is no penalty


def start(
    plan: SamplingPlan,
    prompt_ids: np.ndarray,
    *,
    seed: int | Sequence[int],
    attention_mask: np.ndarray | None = None,
    capacity: int | None = None,
) -> SamplingState:
    """The state before the first token; runs on the host.

    Args:
        plan: of this batch.
        prompt_ids: int[batch, prompt_len], left-padded.
        seed: 0 to 2**64 - 1. One number for a batch that is one request: row i draws with ``fold_in(key(seed), i)``. A
            sequence gives each row the seed of its own request, and the row draws as if it were alone.
        attention_mask: [batch, prompt_len], zero at padding; None where transformers has none either.
        capacity: tokens that a row can hold; None: the plan's `max_length`. A bucket above it saves compilations.

    Raises:
        InvalidArgumentError: shapes that do not fit each other, too little capacity, a seed out of range.
    """
    prompt_ids = np.asarray(prompt_ids)
    if prompt_ids.ndim != 2 or not np.issubdtype(prompt_ids.dtype, np.integer):
        raise invalid("prompt_ids", "int[batch, prompt_len]", f"{prompt_ids.dtype}{list(prompt_ids.shape)}", "reshape")
    if attention_mask is not None and np.shape(attention_mask) != prompt_ids.shape:
        remedy = "give the mask of these very prompts"
        raise invalid("attention_mask", f"shape {prompt_ids.shape}", np.shape(attention_mask), remedy)
    (batch, prompt_len), max_length = prompt_ids.shape, int(plan.max_length)
    capacity = max(max_length, prompt_len) if capacity is None else capacity
    if capacity < max(max_length, prompt_len):
        remedy = "raise it, or lower max_new_tokens"
        raise invalid("capacity", f"at least {max(max_length, prompt_len)} (prompt and new tokens)", capacity, remedy)
    tokens = np.zeros((batch, capacity), np.int32)
    tokens[:, :prompt_len] = prompt_ids
    return SamplingState(
        tokens=from_host(tokens, np.int32),
        length=from_host(prompt_len, np.int32),
        num_new=from_host(0, np.int32),
        keys=_row_keys(seed, batch),
        ended=from_host(np.zeros(batch), bool),
        seen=None if plan.repetition_penalty is None else _seen_in_prompt(plan, prompt_ids, attention_mask),
    )


def append(state: SamplingState, next_tokens: jax.Array) -> SamplingState:
    """The state one token later. `next_tokens`: i32[batch]; ``state.ended`` is left to the caller."""
    seen = state.seen
    if seen is not None:
        rows, vocab_size = jnp.arange(seen.shape[0]), seen.shape[1]
        columns = jnp.where(next_tokens < 0, vocab_size, next_tokens)  # a negative index would count from the end
        seen = seen.at[rows, columns].set(True, mode="drop")
    return dataclasses.replace(
        state,
        tokens=lax.dynamic_update_slice_in_dim(
            state.tokens, next_tokens[:, None].astype(jnp.int32), state.length, axis=1
        ),
        length=state.length + 1,
        num_new=state.num_new + 1,
        seen=seen,
    )


def finished(plan: SamplingPlan, state: SamplingState, token: jax.Array) -> jax.Array:
    """bool[batch]: whether a row ends with `token` (i32[batch]), the last one of `state`: by eos or by length.

    Stop strings and time limits are a matter of the host; it may set more rows of ``state.ended``.
    """
    too_long = state.length >= plan.max_length
    if plan.eos_ids is None:
        return jnp.broadcast_to(too_long, token.shape)
    return too_long | (token[:, None] == plan.eos_ids).any(-1)


def _row_keys(seed: int | Sequence[int], batch: int) -> jax.Array:
    seeds = list(seed) if isinstance(seed, Sequence) else [seed]
    if any(item not in Limits(0, MAX_SEED, whole=True) for item in seeds):
        raise invalid("seed", f"whole numbers from 0 to {MAX_SEED}", seed, "draw one with random.getrandbits(63)")
    if isinstance(seed, Sequence):
        if len(seeds) != batch:
            raise invalid("seed", f"one number, or one for each of {batch} rows", len(seeds), "give as many as rows")
        return _keys(seeds, [0] * batch)
    return _keys(seeds * batch, range(batch))


def _keys(seeds: Sequence[int], rows: Sequence[int]) -> jax.Array:
    """key[n]: ``fold_in(key(seed), row)``. A seed's upper half is folded in: ``jax.random.key`` would drop it."""
    low, high = (np.array([seed >> shift & 0xFFFFFFFF for seed in seeds], np.uint32) for shift in (0, 32))
    return _fold_keys(low, high, np.array(rows, np.uint32))


@jax.jit
@jax.vmap
def _fold_keys(low: jax.Array, high: jax.Array, row: jax.Array) -> jax.Array:
    return jax.random.fold_in(request_key(low, high), row)


def request_key(low: jax.Array, high: jax.Array) -> jax.Array:
    """key[]: of a request's seed, in two halves uint32[]; its rows fold their number in."""
    return jax.random.fold_in(jax.random.key(low), high)


def _seen_in_prompt(plan: SamplingPlan, prompt_ids: np.ndarray, attention_mask: np.ndarray | None) -> jax.Array:
    batch, prompt_len = prompt_ids.shape
    seen = np.zeros((batch, plan.vocab_size + 1), bool)  # the last column takes what has none of its own
    columns = np.where((prompt_ids < 0) | (prompt_ids > plan.vocab_size), plan.vocab_size, prompt_ids)
    if attention_mask is not None and plan.rules.penalty_skips_padding:
        first_token = (np.asarray(attention_mask) != 0).argmax(axis=1)  # 0 in a row that is all padding
        columns = np.where(np.arange(prompt_len) < first_token[:, None], plan.vocab_size, columns)
    np.put_along_axis(seen, columns, True, axis=1)
    return from_host(seen[:, :-1], bool)
