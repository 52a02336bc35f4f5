"""The pure step functions of a model, jitted: its forwards on the device.

A decode step is two programs. `StepFunctions.decode` is the model: weights and cache are arguments, the cache is
donated, so it is updated in place. Sampling (`torchax_serve/sampling/batch_sampler.py`) is the other, the same program
for every model with that vocabulary. `num_traces` counts compilations of a model by function; tests hold it constant
from token to token. A model's programs are stored on disk if its identity is known
(`torchax_serve/compilation/executable_cache.py`).
"""

from __future__ import annotations

import collections
import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.caches.device_cache import LayerStates
from model_adapters.ops.compressed_weight import Weights
from model_adapters.program.model_program import Arrays, CallSpec, MethodSpec, ModelProgram
from model_adapters.program.varlen_forward import forward_varlen
from torchax_serve.compilation.executable_cache import CachedFunction, ExecutableCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchPosition:
    """Positions of a static batch; stays on the device from step to step."""

    position: jax.Array  # int32[..., batch], position id of the newest token, on each axis that the model has
    offset: jax.Array  # int32[], tokens in the cache, padding included
    starts: jax.Array  # int32[batch], first position that is no padding


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """The static part of a decode step."""

    call: CallSpec
    position_ids: bool  # the forward takes position ids


class StepFunctions:
    """Compiled `forward` and `decode` of one model."""

    def __init__(self, program: ModelProgram, cache: ExecutableCache) -> None:
        self.program = program
        self.executables = cache

        def has_hooks() -> bool:
            return bool(program.watch.hooked)

        kept = partial(
            CachedFunction,
            cache,
            donate={"states": 1},
            facts=program.trace_facts,
            restore_facts=program.restore_facts,
            is_uncompiled=has_hooks,
        )
        of_part = f"_{program.submodule.replace('.', '_')}" if program.submodule else ""
        self.forward = kept(f"forward{of_part}", self._forward)
        self.decode = kept(f"decode{of_part}", self.decode_once)
        self.varlen = kept(f"varlen{of_part}", self._varlen, donate={})
        self.call_method = CachedFunction(cache, "method", self._method, is_uncompiled=has_hooks)

    @property
    def num_traces(self) -> collections.Counter[str]:
        """Traces so far, by function."""
        return self.executables.num_traces

    def _forward(
        self,
        weights: Weights,
        states: LayerStates | None,
        offset: jax.Array | None,
        inputs: Arrays,
        spec: CallSpec,
    ) -> tuple[Arrays, LayerStates | None]:
        """Computes any forward, a prefill or a caller's; see `ModelProgram.forward`."""
        return self.program.forward(weights, states, offset, inputs, spec)

    def _varlen(self, weights: Weights, inputs: Arrays, cu_seqlens: jax.Array, spec: None) -> Arrays:
        """Computes a forward of texts in one row; see `forward_varlen`."""
        return forward_varlen(self.program, weights, inputs, cu_seqlens)

    def _method(self, weights: Weights, inputs: Arrays, spec: MethodSpec) -> Any:
        """Computes a method of a submodule; see `ModelProgram.method`."""
        return self.program.method(weights, inputs, spec)

    def decode_once(
        self,
        weights: Weights,
        states: LayerStates,
        token: jax.Array,
        carry: BatchPosition,
        context: Arrays,
        spec: DecodeSpec,
    ) -> tuple[jax.Array, LayerStates, BatchPosition]:
        """Computes float32 logits [batch, vocab] of the next token from the newest, int32[batch].

        `context` has further arguments of the forward, the same at each step: an encoder's output and its mask.
        """
        names = self.program.names
        inputs: dict[str, Any] = {names.ids: token[:, None], "starts": carry.starts, **context}
        if spec.position_ids:
            inputs[names.positions] = carry.position[..., None]
        fields, new_states = self.program.forward(weights, states, carry.offset, inputs, spec.call)
        assert new_states is not None
        carry = BatchPosition(carry.position + 1, carry.offset + 1, carry.starts)
        return fields["logits"][:, -1].astype(jnp.float32), new_states, carry


@jax.jit
def of_last_position(logits: jax.Array) -> jax.Array:
    """Returns float32[batch, vocab], the logits of the last position, of [batch, len, vocab]."""
    return logits[:, -1].astype(jnp.float32)
