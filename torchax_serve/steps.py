"""The pure step functions of a model, jitted: the only code that runs on the device.

Each takes the weights and the cache as arguments; the cache is donated, so a step updates it in place. `num_traces`
counts compilations by function, which tests hold constant from token to token.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.caches import LayerStates
from model_adapters.program import Arrays, CallSpec, ModelProgram
from torchax_serve import sampling
from torchax_serve.sampling import SamplingPlan, SamplingState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """What a decode step hands to the next one, on the device."""

    token: jax.Array  # int32[batch], the newest token, not yet in the cache
    position: jax.Array  # int32[batch], its position id
    offset: jax.Array  # int32[], tokens in the cache, padding included
    starts: jax.Array  # int32[batch], first position that is no padding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepResult:
    """What the host reads of a step."""

    token: jax.Array  # int32[batch]
    logits: jax.Array | None  # float32[batch, vocab], as the model gave them; None unless asked for
    scores: jax.Array | None  # float32[batch, vocab], after the logits processors; None unless asked for


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """The static part of a decode step."""

    call: CallSpec = CallSpec()
    position_ids: bool = True  # the forward takes position ids
    keep_logits: bool = False
    keep_scores: bool = False


class Steps:
    """Jitted `forward`, `first_token` and `decode` of one model."""

    def __init__(self, program: ModelProgram) -> None:
        self.program = program
        self.num_traces: collections.Counter[str] = collections.Counter()
        self.forward = jax.jit(self._forward, static_argnames="spec", donate_argnames="states")
        self.first_token = jax.jit(self._first_token, static_argnames="spec", donate_argnames="state")
        self.decode = jax.jit(self._decode, static_argnames="spec", donate_argnames=("states", "state"))

    def _forward(
        self,
        weights: Mapping[str, jax.Array],
        states: LayerStates | None,
        offset: jax.Array | None,
        inputs: Arrays,
        spec: CallSpec,
    ) -> tuple[Arrays, LayerStates | None]:
        self.num_traces["forward"] += 1
        return self.program.forward(weights, states, offset, inputs, spec)

    def _first_token(
        self, plan: SamplingPlan, state: SamplingState, logits: jax.Array, spec: DecodeSpec
    ) -> tuple[StepResult, SamplingState]:
        """Picks the first token from the prefill's `logits` [batch, vocab]."""
        self.num_traces["first_token"] += 1
        return _pick(plan, state, logits, spec)

    def _decode(
        self,
        weights: Mapping[str, jax.Array],
        states: LayerStates,
        carry: Carry,
        plan: SamplingPlan,
        state: SamplingState,
        spec: DecodeSpec,
    ) -> tuple[StepResult, LayerStates, Carry, SamplingState]:
        """Feeds the newest token of every row and picks the next."""
        self.num_traces["decode"] += 1
        inputs: dict[str, Any] = {"input_ids": carry.token[:, None], "starts": carry.starts}
        if spec.position_ids:
            inputs["position_ids"] = carry.position[:, None]
        fields, new_states = self.program.forward(weights, states, carry.offset, inputs, spec.call)
        assert new_states is not None
        result, state = _pick(plan, state, fields["logits"][:, -1], spec)
        carry = Carry(result.token, carry.position + 1, carry.offset + 1, carry.starts)
        return result, new_states, carry, state


def _pick(
    plan: SamplingPlan, state: SamplingState, logits: jax.Array, spec: DecodeSpec
) -> tuple[StepResult, SamplingState]:
    logits = logits.astype(jnp.float32)
    token, state, scores = sampling.step(plan, state, logits)
    return StepResult(token, logits if spec.keep_logits else None, scores if spec.keep_scores else None), state
