"""Static batch of ``generate``: one prefill, then one compiled step per token.

The host is one step behind the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from model_adapters.bridge.views import to_torch_tensor
from model_adapters.errors import InvalidArgumentError
from model_adapters.program.call_signature import cache_field_of
from torchax_serve.generation.batch_forward import BatchForward
from torchax_serve.generation.call_limits import draw_seed
from torchax_serve.generation.sample_call import SampleCall, StaticBatchStart
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.sampling import INVALID_TOKEN, BatchSampler


class StepOutput(NamedTuple):
    """Output of a step, on the device."""

    token: jax.Array  # int32[batch]
    logits: jax.Array  # float32[batch, vocab], of the model
    scores: jax.Array | None  # float32[batch, vocab], after the logits processors; None if not asked for


GenerateOutput = GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput | torch.Tensor


class StaticBatchLoop:
    """Decoding loop over the rows of one call in lockstep.

    `run` returns what ``generate`` returns, `tokens` yields each step.

    Args:
        runtime: of the model.
        request: the call.
        start: its first inputs.
    """

    sampler: BatchSampler
    newest: jax.Array  # int32[batch]
    last_logits: jax.Array  # float32[batch, vocab]

    def __init__(self, runtime: ModelRuntime, request: SampleCall, start: StaticBatchStart) -> None:
        self.runtime, self.request, self.config = runtime, request, request.config
        self.forward = BatchForward(runtime, request, start)
        wants_dict = bool(self.config.return_dict_in_generate)
        self.keep_scores = wants_dict and bool(self.config.output_scores)
        self.keep_logits = wants_dict and bool(self.config.output_logits)
        kinds = {type(criterion) for criterion in request.stopping_criteria}
        # The next step may be launched before the host has read this one's tokens. It may not if only the host
        # knows that a row has ended (stop strings, time) and what that row computes afterwards is returned.
        self.stops_on_device = kinds <= {MaxLengthCriteria, EosTokenCriteria}
        is_croppable = self.forward.cache.is_croppable
        self.runs_ahead = (self.stops_on_device or not self.keep_scores) and (is_croppable or not wants_dict)
        self.scores: list[jax.Array] = []
        self.logits: list[jax.Array] = []
        self.sequences = request.input_ids

    def run(self, check: Callable[[], None] = lambda: None) -> GenerateOutput:
        """Decodes to the end and passes each step's tokens to the streamer.

        Args:
            check: called after each step; what it raises ends the call.
        """
        streamer = self.request.streamer
        for token in self.tokens():
            check()
            if streamer is not None:
                streamer.put(token)
        if streamer is not None:
            streamer.end()
        if not self.config.return_dict_in_generate:
            return self.sequences
        has_encoder = self.runtime.program.names.has_encoder
        output_class: Any = GenerateEncoderDecoderOutput if has_encoder else GenerateDecoderOnlyOutput
        cache_name = cache_field_of(output_class)
        assert cache_name is not None
        return output_class(
            sequences=self.sequences,
            scores=_as_tensors(self.scores) if self.keep_scores else None,
            logits=_as_tensors(self.logits) if self.keep_logits else None,
            **{cache_name: self.forward.cache.to_dynamic()},
        )

    def tokens(self) -> Iterator[torch.Tensor]:
        """Yields the tokens of each step, int64[batch], with finished rows padded.

        At the end `sequences` and the cache are complete.
        """
        forward, prompt_len = self.forward, self.forward.prompt_len
        max_new = forward.max_length - prompt_len
        ends_at_eos = any(hasattr(criterion, "eos_token_id") for criterion in self.request.stopping_criteria)
        pad = self.config._pad_token_tensor if ends_at_eos else None
        unfinished = torch.ones(forward.batch, dtype=torch.long)
        self._start(forward.prefill())
        pending = self._pick()
        for index in range(max_new):
            # Not ahead of the first token, since that step may have to be compiled first, and not if the sequence with
            # this token is recomputed.
            looks_ahead = self.runs_ahead and 0 < index < max_new - 1 and prompt_len + index != forward.recompute_len
            following = self._decode() if looks_ahead else None
            token = self._on_host(pending.token)
            if pad is not None:
                token = token * unfinished + pad * (1 - unfinished)
            self.sequences = torch.cat([self.sequences, token[:, None]], 1)
            self._keep(pending)
            scores = _as_tensors(self.scores) if self.keep_scores and not self.stops_on_device else None
            unfinished = unfinished & ~self.request.stopping_criteria(self.sequences, scores)
            forward.cache.length = self.sequences.shape[1] - 1
            yield token
            if not unfinished.any() or index + 1 == max_new:
                return
            if following is None:
                if not self.stops_on_device:
                    self.sampler.set_ended(unfinished.numpy() == 0)
                is_new = self.sequences.shape[1] - 1 == forward.recompute_len
                following = self._recompute() if is_new else self._decode()
            pending = following

    def _on_host(self, token: jax.Array) -> torch.Tensor:
        """Returns int64[batch]; waits for the step that made it.

        Raises:
            NoTokenLeftError: the options forbid every token of a row.
            InvalidArgumentError: a row has no finite scores.
        """
        values = np.asarray(token).astype(np.int64)
        if (values == INVALID_TOKEN).any():
            row = int((values == INVALID_TOKEN).argmax())
            self.sampler.check_tokens_left(self.sequences[row].tolist())
            raise InvalidArgumentError(
                f"expected scores with a token to draw in every row, got inf, nan or nothing in row {row}; "
                "loosen the sampling options, or load the model in another dtype"
            )
        return torch.from_numpy(values)

    def _keep(self, choice: StepOutput) -> None:
        if self.keep_scores:
            assert choice.scores is not None
            self.scores.append(choice.scores)
        if self.keep_logits:
            self.logits.append(choice.logits)

    def _start(self, logits: jax.Array) -> None:
        """Makes the state of sampling for the first logits, float32[batch, vocab]."""
        request = self.request
        self.last_logits = logits
        mask = request.model_kwargs.get(self.runtime.program.names.mask)
        self.sampler = BatchSampler(
            self.config,
            request.input_ids.numpy(),
            vocab_size=logits.shape[-1],
            seed=draw_seed(do_sample=self.config.do_sample),
            attention_mask=None if mask is None else mask.numpy(),
            sharding=logits.sharding,  # as after a step: one program, not two
        )

    def _decode(self) -> StepOutput:
        """Launches a step: the forward of the newest tokens, then sampling."""
        self.last_logits = self.forward.decode(self.newest)
        return self._pick()

    def _recompute(self) -> StepOutput:
        """Computes a step on all tokens: the model's rotary frequencies change at this length."""
        self.last_logits = self.forward.recompute(self.sequences)
        return self._pick()

    def _pick(self) -> StepOutput:
        self.newest, scores = self.sampler.sample(self.last_logits, keep_scores=self.keep_scores)
        return StepOutput(self.newest, self.last_logits, scores)


def _as_tensors(arrays: list[jax.Array]) -> tuple[torch.Tensor, ...]:
    return tuple(to_torch_tensor(array) for array in arrays)
