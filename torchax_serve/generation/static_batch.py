"""The static batch of ``generate``: one prefill, then one compiled step per token, the host one step behind."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput, GenerationConfig
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from model_adapters.bridge.host_arrays import to_device
from model_adapters.bridge.views import to_torch_tensor
from model_adapters.caches.device_cache import DeviceCache
from model_adapters.errors import InvalidArgumentError
from model_adapters.program.call_signature import cache_field_of, cache_in, generate_cache_name
from model_adapters.program.model_program import CallSpec
from torchax_serve import sampling
from torchax_serve.buckets import next_bucket
from torchax_serve.generation.routing import LoopCall, ModelCapabilities, Path, route
from torchax_serve.multimodal.decode_inputs import PreparedSteps
from torchax_serve.runtime.encoder_output import ENCODER_ARGUMENTS, EncoderOutput
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.runtime.padding import Padding
from torchax_serve.runtime.step_functions import BatchPosition, DecodeSpec, of_last_position
from torchax_serve.sampling import CALLER_OPTIONS, INVALID_TOKEN, BatchSampler

# Generation options that this loop honours itself, apart from those of sampling.
HONOURED_OPTIONS = CALLER_OPTIONS | {"use_cache", "cache_implementation", "max_time"}
CUSTOM = "_torchax_serve_custom"  # attribute of a generation config: name of the argument with Python code for scores
UNDERSTOOD_KWARGS = frozenset({"use_cache", "logits_to_keep"})


@dataclasses.dataclass(frozen=True)
class SampleCall:
    """Arguments of transformers' sampling loop, prepared and checked by its ``generate``."""

    input_ids: torch.Tensor  # int64[batch, prompt_len], padded on the left
    logits_processor: Any
    stopping_criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: Any
    model_kwargs: dict[str, Any]


class StepOutput(NamedTuple):
    """Output of a step, on the device."""

    token: jax.Array  # int32[batch]
    logits: jax.Array  # float32[batch, vocab], of the model
    scores: jax.Array | None  # float32[batch, vocab], after the logits processors; None if not asked for


@dataclasses.dataclass(frozen=True)
class StaticBatchStart:
    """First inputs of a static batch, apart from tokens.

    Attributes:
        prepared: Arguments of the forwards of a call with media; None for text.
        encoder: Output of the encoder; None without one.
    """

    prepared: PreparedSteps | None
    encoder: EncoderOutput | None


def static_batch_start(runtime: ModelRuntime, request: SampleCall) -> StaticBatchStart | str:
    """Returns what a static batch starts `request` with, or the reason why it needs transformers' own loop."""
    kwargs, config = request.model_kwargs, request.config
    names, model = runtime.program.names, ModelCapabilities.of(runtime)
    cache = kwargs.get(generate_cache_name(runtime.program.cache_name) or "")
    extra = _further(runtime, kwargs)
    prepare_steps = functools.cache(lambda: _prepared_steps(runtime, request, extra))
    encode = functools.cache(lambda: EncoderOutput.of(kwargs, is_masked=model.encoder_reads_tokens))

    def media_reason() -> str | None:
        return steps if isinstance(steps := prepare_steps(), str) else None

    call = LoopCall(
        has_fresh_cache=isinstance(cache, DeviceCache) and not cache.length,
        returns_attentions=bool(config.output_attentions or config.output_hidden_states),
        prefills_in_chunks=config.prefill_chunk_size is not None or bool(config.is_assistant),
        embeddings=names.embeds if kwargs.get(names.embeds) is not None else None,
        has_irregular_mask=lambda: Padding.of(kwargs.get(names.mask), request.input_ids.shape[1]).mask is not None,
        custom_argument=getattr(config, CUSTOM, None),
        unsupported_options=sampling.unsupported_options(config, HONOURED_OPTIONS),
        has_media=bool(extra),
        media_reason=media_reason,
        has_encoder_output=lambda: encode() is not None,
    )
    chosen = route(model, call)
    if chosen.path is not Path.STATIC_BATCH:
        return str(chosen.reason)
    steps = prepare_steps()
    assert not isinstance(steps, str)
    return StaticBatchStart(steps, encode() if model.has_encoder else None)


def _prepared_steps(runtime: ModelRuntime, request: SampleCall, extra: list[str]) -> PreparedSteps | str | None:
    """Returns the arguments of a call with media; None for text, or the reason why a static batch cannot take it.

    Args:
        runtime: of the model.
        request: the call, with a fresh cache.
        extra: names of its arguments that are neither text nor an encoder's output.
    """
    names, cache_name = runtime.program.names, generate_cache_name(runtime.program.cache_name)
    assert cache_name is not None
    if not extra:
        return None
    if names.has_encoder or names.embeds in extra:  # embeddings replace the tokens that the loop starts with
        return f"the forward gets {', '.join(extra)}"
    known = UNDERSTOOD_KWARGS | {cache_name, names.ids, names.mask, names.positions}
    return PreparedSteps.of(runtime.program.module, request.input_ids, request.model_kwargs, cache_name, known)


def _further(runtime: ModelRuntime, kwargs: dict[str, Any]) -> list[str]:
    """Returns the names of arguments that are neither text nor an encoder's output, sorted."""
    names = runtime.program.names
    cache_name = generate_cache_name(runtime.program.cache_name) or ""
    understood = UNDERSTOOD_KWARGS | {names.ids, names.mask, names.positions, cache_name}
    if names.has_encoder:
        understood |= set(ENCODER_ARGUMENTS)
    return sorted(name for name, value in kwargs.items() if value is not None and name not in understood)


class StaticBatchLoop:
    """Decodes the rows of one call in lockstep; `run` returns what ``generate`` returns, `tokens` yields each step.

    Args:
        runtime: of the model.
        request: the call.
        start: its first inputs.
        seed: of sampling; None takes one from torch's global generator.
    """

    sampler: BatchSampler
    spec: DecodeSpec
    carry: BatchPosition
    newest: jax.Array  # int32[batch]
    last_logits: jax.Array  # float32[batch, vocab]

    def __init__(
        self, runtime: ModelRuntime, request: SampleCall, start: StaticBatchStart, seed: int | None = None
    ) -> None:
        self.runtime, self.request, self.config = runtime, request, request.config
        self.start, self.seed = start, seed
        self.batch, self.prompt_len = request.input_ids.shape
        self.cache: DeviceCache = cache_in(request.model_kwargs)
        assert request.stopping_criteria.max_length is not None
        self.max_length: int = request.stopping_criteria.max_length
        wants_dict = bool(self.config.return_dict_in_generate)
        self.keep_scores = wants_dict and bool(self.config.output_scores)
        self.keep_logits = wants_dict and bool(self.config.output_logits)
        kinds = {type(criterion) for criterion in request.stopping_criteria}
        # The next step may be launched before the host has read this one's tokens. It may not if only the host
        # knows that a row has ended (stop strings, time) and what that row computes afterwards is returned.
        rope = runtime.program.rope
        self.recompute_len = None if rope is None else rope.lengths.recompute_len
        self.stops_on_device = kinds <= {MaxLengthCriteria, EosTokenCriteria}
        self.runs_ahead = (self.stops_on_device or not self.keep_scores) and (self.cache.is_croppable or not wants_dict)
        self.scores: list[jax.Array] = []
        self.logits: list[jax.Array] = []
        self.sequences = request.input_ids

    def run(self) -> GenerateDecoderOnlyOutput | GenerateEncoderDecoderOutput | torch.Tensor:
        """Decodes to the end and passes each step's tokens to the streamer."""
        streamer = self.request.streamer
        for token in self.tokens():
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
            **{cache_name: self.cache.to_dynamic()},
        )

    def tokens(self) -> Iterator[torch.Tensor]:
        """Yields int64[batch] per step, finished rows padded; at the end `sequences` and `cache` are complete."""
        max_new = self.max_length - self.prompt_len
        ends_at_eos = any(hasattr(criterion, "eos_token_id") for criterion in self.request.stopping_criteria)
        pad = self.config._pad_token_tensor if ends_at_eos else None
        unfinished = torch.ones(self.batch, dtype=torch.long)
        self._prefill()
        pending = self._pick()
        for index in range(max_new):
            # Not ahead of the first token, since that step may have to be compiled first, and not if the sequence with
            # this token is recomputed.
            looks_ahead = self.runs_ahead and 0 < index < max_new - 1 and self.prompt_len + index != self.recompute_len
            following = self._decode() if looks_ahead else None
            token = _on_host(pending.token)
            if pad is not None:
                token = token * unfinished + pad * (1 - unfinished)
            self.sequences = torch.cat([self.sequences, token[:, None]], 1)
            self._keep(pending)
            scores = _as_tensors(self.scores) if self.keep_scores and not self.stops_on_device else None
            unfinished = unfinished & ~self.request.stopping_criteria(self.sequences, scores)
            self.cache.length = self.sequences.shape[1] - 1
            yield token
            if not unfinished.any() or index + 1 == max_new:
                return
            if following is None:
                if not self.stops_on_device:
                    self.sampler.set_ended(unfinished.numpy() == 0)
                is_new = self.sequences.shape[1] - 1 == self.recompute_len
                following = self._recompute() if is_new else self._decode()
            pending = following

    def _keep(self, choice: StepOutput) -> None:
        if self.keep_scores:
            assert choice.scores is not None
            self.scores.append(choice.scores)
        if self.keep_logits:
            self.logits.append(choice.logits)

    def _prefill(self) -> None:
        runtime, request = self.runtime, self.request
        runtime.process.check()
        names = runtime.program.names
        mask = request.model_kwargs.get(names.mask)
        starts = Padding.of(mask, self.prompt_len).starts
        self.cache.reserve(next_bucket(self.max_length))
        prepared = self.start.prepared
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
        self.context: dict[str, Any] = {}
        if self.start.encoder is not None:
            given[ENCODER_ARGUMENTS[0]] = self.start.encoder
            self.context = dict(self.start.encoder.arguments)
        self.last_logits = of_last_position(runtime.forward_arrays(given, CallSpec(), self.cache)["logits"])
        seed = self.seed
        if seed is None:  # torch.manual_seed makes it repeatable, as in transformers
            seed = int(torch.randint(2**63 - 1, ())) if self.config.do_sample else 0
        self.sampler = BatchSampler(
            self.config,
            request.input_ids.numpy(),
            vocab_size=self.last_logits.shape[-1],
            seed=seed,
            attention_mask=None if mask is None else mask.numpy(),
            sharding=self.last_logits.sharding,  # as after a step: one program, not two
        )
        self.spec = DecodeSpec(CallSpec(left_padded=starts is not None, static_args=constants), takes_positions)
        self.carry = BatchPosition(
            position=to_device(after.numpy(), np.int32),
            offset=to_device(self.prompt_len, np.int32),
            starts=to_device(np.zeros(self.batch) if starts is None else starts.numpy(), np.int32),
        )

    def _decode(self) -> StepOutput:
        """Launches a step: the forward of the newest tokens, then sampling."""
        self.last_logits, self.cache.states, self.carry = self.runtime.steps.decode(
            self.runtime.weights, self.cache.states, self.newest, self.carry, self.context, spec=self.spec
        )
        return self._pick()

    def _recompute(self) -> StepOutput:
        """As `_decode`, but on all tokens: the model's rotary frequencies change at this length."""
        names, ids = self.runtime.program.names, self.sequences
        starts = torch.from_numpy(np.array(self.carry.starts)).long()
        steps = torch.arange(ids.shape[1])[None] - starts[:, None]
        given: dict[str, Any] = {names.ids: ids, names.mask: (steps >= 0).long(), "logits_to_keep": 1}
        if self.spec.position_ids:
            given[names.positions] = steps.clamp(min=0)
        self.cache = self.runtime.cache_support.new(1)
        self.cache.reserve(next_bucket(self.max_length))
        self.last_logits = of_last_position(self.runtime.forward_arrays(given, CallSpec(), self.cache)["logits"])
        self.carry = dataclasses.replace(
            self.carry, position=self.carry.position + 1, offset=to_device(ids.shape[1], np.int32)
        )
        return self._pick()

    def _pick(self) -> StepOutput:
        self.newest, scores = self.sampler.sample(self.last_logits, keep_scores=self.keep_scores)
        return StepOutput(self.newest, self.last_logits, scores)


def _as_tensors(arrays: list[jax.Array]) -> tuple[torch.Tensor, ...]:
    return tuple(to_torch_tensor(array) for array in arrays)


def _on_host(token: jax.Array) -> torch.Tensor:
    """int64[batch]; waits for the step that made it."""
    values = np.asarray(token).astype(np.int64)
    if (values == INVALID_TOKEN).any():
        row = int((values == INVALID_TOKEN).argmax())
        raise InvalidArgumentError(
            f"expected scores with a token to draw in every row, got inf, nan or nothing in row {row}; "
            "loosen the sampling options, or load the model in another dtype"
        )
    return torch.from_numpy(values)
