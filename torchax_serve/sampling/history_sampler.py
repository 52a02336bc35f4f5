"""Choosing the tokens of one request by itself: options that depend on the whole history of a row.

Repeated n-grams, sequences of several tokens, forced tokens and the like keep `torchax_serve.sampling`'s state of a
batch of one. That costs such a request a launch of its own in each step, and its first combination of options a
compilation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.bridge.host_arrays import to_device
from model_adapters.program.trace_context import torch_promotion
from torchax_serve import sampling
from torchax_serve.buckets import next_bucket
from torchax_serve.sampling import GenerationSampling, SamplingHistory
from torchax_serve.sampling.processors import bias_sequences, penalise_repetition
from torchax_serve.sampling.row_params import RowSamplingParams
from torchax_serve.sampling.sample import argmax_tokens
from torchax_serve.scheduler import INVALID_TOKEN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Extras:
    """What a generation config has no place for."""

    bias: jax.Array | None  # float32[vocab]
    presence_penalty: jax.Array  # float32[]
    frequency_penalty: jax.Array  # float32[]


class HistorySampler:
    """Chooses for one request; made when the request is given a slot, also again after a preemption."""

    def __init__(
        self,
        params: RowSamplingParams,
        prompt_ids: Sequence[int],
        outputs: Sequence[int],
        sharding: jax.sharding.Sharding,
    ) -> None:
        """See `SlotParams.set` for the arguments; ``params.history_config`` is set. `sharding` is where the state lies.

        Raises:
            InvalidArgumentError: options at odds with each other, or tokens outside the vocabulary.
        """
        assert params.history_config is not None
        vocab_size = params.vocab_size
        self._plan = GenerationSampling.build(
            params.history_config,
            prompt_len=len(prompt_ids),
            vocab_size=vocab_size,
            eos_token_ids=list(params.stop_ids),
        )
        tokens = np.array([[*prompt_ids, *outputs]], np.int32)
        capacity = next_bucket(max(int(self._plan.max_length), tokens.shape[1] + 1))
        state = sampling.init_history(self._plan, tokens, seed=[params.seed], capacity=capacity)
        state = dataclasses.replace(state, num_new=to_device(len(outputs), np.int32))
        counts = np.bincount(np.asarray(outputs, np.int64), minlength=vocab_size)[:vocab_size]
        self._extras = _Extras(
            None if params.bias is None else to_device(params.bias, np.float32),
            to_device(params.floats["presence_penalty"], np.float32),
            to_device(params.floats["frequency_penalty"], np.float32),
        )
        # Placed as steps leave it: one program, not two.
        self._state, self._counts = jax.device_put((state, to_device(counts, np.int32)), sharding)

    def pick(self, logits: jax.Array) -> jax.Array:
        """The next token, int32[1], for `logits` [1, vocab]; `INVALID_TOKEN` if there is none to choose."""
        token, self._state, self._counts = _pick(self._plan, self._extras, self._state, self._counts, logits)
        return token


@functools.partial(jax.jit, donate_argnums=(2, 3))
@torch_promotion()
def _pick(
    plan: GenerationSampling, extras: _Extras, state: SamplingHistory, counts: jax.Array, logits: jax.Array
) -> tuple[jax.Array, SamplingHistory, jax.Array]:
    scores = logits.astype(jnp.float32)
    if extras.bias is not None:
        scores = scores + extras.bias
    if plan.sequence_bias is not None:
        scores = bias_sequences(plan, state, plan.sequence_bias, scores)
    if state.seen is not None:
        assert plan.repetition_penalty is not None
        scores = penalise_repetition(plan.repetition_penalty, state.seen, scores)
    scores = scores - (extras.frequency_penalty * counts + extras.presence_penalty * (counts > 0))
    scores = sampling.process(dataclasses.replace(plan, sequence_bias=None, repetition_penalty=None), state, scores)
    token = argmax_tokens(scores)
    if plan.do_sample:
        token = jnp.where(token == INVALID_TOKEN, INVALID_TOKEN, sampling.select(plan, state, scores))
    column = jnp.where(token < 0, logits.shape[1], token)  # a negative index would count from the end
    return token, sampling.append(state, token), counts.at[column].add(1, mode="drop")
