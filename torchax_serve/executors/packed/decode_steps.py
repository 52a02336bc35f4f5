"""The program of decode steps: forward and sampling, one time or several, in one dispatch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.caches.packed_batch import Pool
from model_adapters.ops.compressed_weight import Weights
from torchax_serve.executors.slot_adapters import SlotAdapters
from torchax_serve.executors.step_inputs import SAMPLED_ON_DEVICE, PackedDecodeSpec
from torchax_serve.executors.traced_function import TracedFunction
from torchax_serve.sampling.sample import sample, with_rows
from torchax_serve.sampling.types import RowOptions, SamplerSpec, SamplerState


def decode_steps(
    forward_of: Callable[..., Any],
    adapters: SlotAdapters,
    constrain_pools: Callable[[tuple[Pool, ...]], tuple[Pool, ...]],
    weights: Weights,
    pools: tuple[Pool, ...],
    state: SamplerState,
    options: RowOptions,
    numbers: jax.Array,
    spec: PackedDecodeSpec,
) -> tuple[tuple[jax.Array, jax.Array], tuple[Pool, ...], SamplerState]:
    """Returns the last step's logits, all tokens int32[max_num_steps, S], pools and state.

    Args:
        forward_of: Forward of a packed step.
        adapters: Adapters by slot.
        constrain_pools: Constrains the pools to the shardings that programs take them with.
        weights: Weights by name.
        pools: Pages of each layer.
        state: State of the sampler.
        options: Options of the rows at their first token.
        numbers: Inputs of the steps, as `PackedDecodeSpec.pack` makes them, and the adapters behind them.
        spec: The static arguments.
    """
    batch, slots, num_steps, draws = spec.unpack(numbers[: spec.size])
    batch = adapters.with_adapters(batch, numbers, slots)
    in_use = batch.kv_lens > 0
    # Traced in front of the loop, which has to know the shape of the logits.
    forward = TracedFunction(functools.partial(forward_of, spec=spec.packed), weights, pools, batch)

    # The loop over the steps. Its number is an input, so that one program serves every number. The carry:
    #
    #   logits  [S, vocab], of the last step: all that is read where the token is sampled elsewhere, for one step
    #   tokens  int32[max_num_steps, S], sampled so far; zeros from `num_steps` on
    #   pools   with keys and values of all steps so far, in place
    #   state   of the sampler: `last_tokens` of a slot is the input of its next step
    #
    # Invariant: in front of step i, the pages of a row in use hold `kv_lens + i - 1` tokens, and the scheduler has
    # reserved those for all steps. A row may end in the middle: it is computed on, and `Scheduler.commit` drops what is
    # behind its end. Rows that are not in use have the length 0 in every step.
    def step(index: jax.Array, carry: Any) -> Any:
        _, tokens, pools, state = carry
        # A prefill row of one token may be among the rows: its token comes from the plan.
        is_given = (index == 0) & (batch.token_ids != SAMPLED_ON_DEVICE)
        now = dataclasses.replace(
            batch,
            token_ids=jnp.where(is_given, batch.token_ids, state.last_tokens[slots]),
            positions=batch.positions + index,
            kv_lens=batch.kv_lens + jnp.where(in_use, index, 0),
        )
        logits, pools, _ = forward(weights, pools, now)
        args = options.advanced(now.kv_lens), state, logits
        # Behind the condition XLA would look for the maxima on one thread.
        greedy = sample(SamplerSpec("greedy"), *args)
        sampled, state = jax.lax.cond(draws, lambda: sample(SamplerSpec("sampled"), *args), lambda: greedy)
        return logits, tokens.at[index].set(sampled.tokens), pools, state

    shape = forward.result_shape[0]
    logits = jnp.zeros(shape.shape, shape.dtype)
    tokens = jnp.zeros((spec.max_num_steps, spec.packed.num_rows), jnp.int32)
    logits, tokens, pools, state = jax.lax.fori_loop(0, num_steps, step, (logits, tokens, pools, state))
    return (with_rows(logits, len(state.last_tokens)), tokens), constrain_pools(pools), state
