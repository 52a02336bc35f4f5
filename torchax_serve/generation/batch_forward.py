"""`BatchForward`: the forwards of the rows of one call, on one dense cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import torch

from model_adapters.caches.device_cache import DeviceCache
from model_adapters.device_arrays import to_device
from model_adapters.program.call_signature import cache_in
from model_adapters.program.model_program import CallSpec
from torchax_serve.buckets import next_bucket
from torchax_serve.generation.sample_call import SampleCall, StaticBatchStart
from torchax_serve.runtime.encoder_output import ENCODER_ARGUMENTS
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.runtime.padding import Padding
from torchax_serve.runtime.step_functions import BatchPosition, DecodeSpec, of_last_position


class BatchForward:
    """Logits of all rows of a call: `prefill` once, then `decode` for each new token.

    Args:
        runtime: Runtime of the model.
        request: The call; its cache is filled.
        start: First inputs of the call.

    Attributes:
        cache: Dense cache of all rows, replaced by `recompute`.
        prompt_ids: Padded prompts, int64[batch, prompt_len].
        prompt_len: Number of tokens of the padded prompts.
        max_length: Maximum number of tokens of a row, prompt and answer.
        recompute_len: Number of tokens at which the rotary frequencies change, so that all tokens are computed again;
            None: never.
    """

    _spec: DecodeSpec
    _carry: BatchPosition

    def __init__(self, runtime: ModelRuntime, request: SampleCall, start: StaticBatchStart) -> None:
        self._runtime, self._request, self._start = runtime, request, start
        self.prompt_ids = request.input_ids
        self.batch, self.prompt_len = request.input_ids.shape
        assert request.stopping_criteria.max_length is not None
        self.max_length: int = request.stopping_criteria.max_length
        self.cache: DeviceCache = cache_in(request.model_kwargs)
        self._context: dict[str, Any] = {} if start.encoder is None else dict(start.encoder.arguments)
        rope = runtime.program.rope
        self.recompute_len = None if rope is None else rope.lengths.recompute_len

    def prefill(self) -> jax.Array:
        """Computes the prompts; returns the logits of their last tokens, float32[batch, vocab]."""
        runtime, request, prepared = self._runtime, self._request, self._start.prepared
        runtime.process.check()
        names = runtime.program.names
        mask = request.model_kwargs.get(names.mask)
        starts = Padding.of(mask, self.prompt_len).starts
        self.cache.reserve(next_bucket(self.max_length))
        positions = request.model_kwargs.get(names.positions)
        if positions is None:
            positions = torch.arange(self.prompt_len)[None]
        if positions.ndim == 2:
            positions = positions.expand(self.batch, -1)
        after = positions[..., -1] + 1
        given: dict[str, Any] = {names.ids: request.input_ids}
        constants: tuple[tuple[str, Any], ...] = ()
        if prepared is not None:
            given, constants = dict(prepared.first), prepared.constants
            if prepared.position_ids is not None:
                after = prepared.position_ids[..., 0]
        given["logits_to_keep"] = 1
        takes_positions = runtime.program.accepts(names.positions)
        if prepared is not None:  # some models get none and count tokens
            takes_positions = prepared.position_ids is not None
        elif takes_positions:
            given[names.positions] = positions
        if starts is not None:
            given[names.mask] = mask
        if self._start.encoder is not None:
            given[ENCODER_ARGUMENTS[0]] = self._start.encoder
        logits = of_last_position(runtime.forward_arrays(given, CallSpec(), self.cache)["logits"])
        self._spec = DecodeSpec(CallSpec(left_padded=starts is not None, static_args=constants), takes_positions)
        self._carry = BatchPosition(
            position=to_device(after.numpy(), np.int32),
            offset=to_device(self.prompt_len, np.int32),
            starts=to_device(np.zeros(self.batch) if starts is None else starts.numpy(), np.int32),
        )
        return logits

    def decode(self, newest: jax.Array) -> jax.Array:
        """Dispatches the step of the newest tokens and returns its logits.

        `newest` is int32[batch], the logits are float32[batch, vocab].
        """
        logits, self.cache.states, self._carry = self._runtime.steps.decode(
            self._runtime.weights, self.cache.states, newest, self._carry, self._context, spec=self._spec
        )
        return logits

    def recompute(self, sequences: torch.Tensor) -> jax.Array:
        """Computes all tokens again, at `recompute_len`; otherwise as `decode`.

        Args:
            sequences: int64[batch, len], padded prompts and all new tokens.
        """
        names = self._runtime.program.names
        starts = torch.from_numpy(np.array(self._carry.starts)).long()
        steps = torch.arange(sequences.shape[1])[None] - starts[:, None]
        given: dict[str, Any] = {names.ids: sequences, names.mask: (steps >= 0).long(), "logits_to_keep": 1}
        if self._spec.position_ids:
            given[names.positions] = steps.clamp(min=0)
        self.cache = self._runtime.cache_support.new(1)
        self.cache.reserve(next_bucket(self.max_length))
        logits = of_last_position(self._runtime.forward_arrays(given, CallSpec(), self.cache)["logits"])
        self._carry = dataclasses.replace(
            self._carry, position=self._carry.position + 1, offset=to_device(sequences.shape[1], np.int32)
        )
        return logits
