"""Rows of ``generate`` as engine requests, which share a batch with those of other threads.

``generate`` (Whisper's and SeamlessM4T's own) prepares prompts, languages and windows of long audio and continues
with the tokens that come back. Only its loop over tokens is replaced by the engine.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation import GenerateEncoderDecoderOutput
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from model_adapters.caches.encoder_mask import SourceMask
from model_adapters.errors import OutOfMemoryError, UnsupportedModelError
from torchax_serve.engine.request_handle import RequestHandle
from torchax_serve.executors.encoder_inputs import decoder_start_ids
from torchax_serve.generation.call_limits import CallLimits, current_limits, draw_seed
from torchax_serve.generation.queued_call import run_on_queue
from torchax_serve.generation.routing import EngineFacts, ModelCapabilities, Path, PromptCall, RowsCall, route
from torchax_serve.generation.sample_call import SampleCall, StaticBatchStart, static_batch_start
from torchax_serve.generation.sequence_steps import GenerateWatch
from torchax_serve.generation.single_request import loop_options, prepared_call
from torchax_serve.generation.static_batch import StaticBatchLoop
from torchax_serve.request_params import ENGINE_OPTIONS, PROMPT_OPTIONS, RequestParams, unsupported_options
from torchax_serve.runtime.encoder_output import ENCODER_ARGUMENTS, EncoderOutput
from torchax_serve.runtime.model_generate import without_model_options
from torchax_serve.runtime.padding import Padding
from torchax_serve.sampling_params import NO_PARAMS, SamplingParams
from torchax_serve.scheduler import Request

if TYPE_CHECKING:
    from torchax_serve.engine.data_parallel import DataParallelEngines
    from torchax_serve.engine.engine import Engine
    from torchax_serve.runtime.encoder import EncoderRuntime

logger = logging.getLogger("torchax_serve")

_COUNTERS = ("create_position_ids_from_input_ids", "make_positions")  # methods of embeddings that count positions


class EngineRows:
    """Runner of ``generate`` rows on the engine of a served model.

    Rows run there if they get the same tokens as in the static batch.

    Args:
        torch_model: the served model on JAX, whose ``generate`` prepares the rows.
        get_engine: returns the engine, which is made for the first rows that can run on it.
        get_single_engine: returns the engine for single calls.
    """

    def __init__(
        self,
        torch_model: Any,
        get_engine: Callable[[], Engine | DataParallelEngines],
        get_single_engine: Callable[[], Engine],
    ) -> None:
        self._torch_model, self._get_engine, self._get_single_engine = torch_model, get_engine, get_single_engine
        self._unsupported_reason: str | None = None

    def __call__(self, request: SampleCall, start: StaticBatchStart) -> Any:
        """Returns the result of the sampling loop of ``generate``.

        None for a static batch, which runs on the caller's thread.

        Args:
            request: the rows, as ``generate`` has prepared them.
            start: what a static batch would start with.
        """
        tokens = self._on_engine(request, start)
        limits = current_limits()
        if tokens is not None or limits is None:
            return tokens
        loop = StaticBatchLoop(self._torch_model._jax_runtime, request, start)
        return self._on_queue(lambda watch: loop.run(watch.check), request, limits)

    def run_loop(self, loop: Callable[..., Any], request: SampleCall) -> Any:
        """Returns the result of transformers' own loop, for rows that have no static batch.

        Of a call with limits it runs on the engine of single requests.

        Args:
            loop: calls it with its ``stopping_criteria``.
            request: the rows.
        """
        limits = current_limits()
        if limits is None:
            return loop(stopping_criteria=request.stopping_criteria)

        @torch.no_grad()  # which ``generate`` has set for its caller's thread
        def call(watch: GenerateWatch) -> Any:
            criteria = StoppingCriteriaList([*request.stopping_criteria, watch.criterion()])
            return loop(stopping_criteria=criteria)

        return self._on_queue(call, request, limits)

    def _on_queue(self, call: Callable[[GenerateWatch], Any], request: SampleCall, limits: CallLimits) -> Any:
        """Returns the result of a loop, which runs on the engine of single requests."""
        output = run_on_queue(self._get_single_engine(), call, limits)
        if len(request.input_ids) == 1:
            limits.put_tokens(getattr(output, "sequences", output)[0, request.input_ids.shape[1] :].tolist())
        return output

    def _on_engine(self, request: SampleCall, start: StaticBatchStart) -> Any:
        """Returns what the loop of ``generate`` does; None if the engine takes no rows.

        That is prompts and new tokens, int64[batch, len], padded on the right.
        """
        runtime = self._torch_model._jax_runtime
        if runtime.encoder is None or self._unsupported_reason is not None:
            return None
        found = _engine_outputs(self._torch_model, request, start, self._engine_facts)
        if isinstance(found, str):
            return None
        assert request.stopping_criteria.max_length is not None
        return _run(self._get_engine(), request, found, request.stopping_criteria.max_length)

    def _engine_facts(self) -> EngineFacts:
        try:
            return EngineFacts.of(self._get_engine())
        except (UnsupportedModelError, OutOfMemoryError) as error:
            logger.warning("rows of generate run by themselves, one call at a time: %s", error)
            self._unsupported_reason = str(error)
            return EngineFacts(self._unsupported_reason)


def _engine_outputs(
    model: Any, request: SampleCall, start: StaticBatchStart, engine: Callable[[], EngineFacts]
) -> list[np.ndarray] | str:
    """Returns the encoder output of each row, or why the engine does not take the rows."""
    runtime = model._jax_runtime
    outputs = _RowOutputs(runtime.encoder, start.encoder)
    mask = request.model_kwargs.get(runtime.program.names.mask)
    call = RowsCall(
        num_rows=len(request.input_ids),
        max_len=request.stopping_criteria.max_length,
        wants_tokens_only=_wants_tokens_only(request),
        has_encoder_output=start.encoder is not None,
        is_padded=Padding.of(mask, request.input_ids.shape[1]) != Padding(),
        has_uncounted_padding=bool((request.input_ids == _padding_id_without_position(model)).any()),
        encoder_lens=outputs.lens,
        engine=engine,
    )
    chosen = route(ModelCapabilities.of(runtime), call)
    if chosen.path is not Path.ENGINE:
        return str(chosen.reason)
    assert outputs.rows is not None
    return outputs.rows


@lru_cache(maxsize=64)
def _padding_id_without_position(model: Any) -> int:
    """Returns the padding id that the decoder skips when it counts positions.

    M2M100 does; -1 if it skips none.
    """
    counters = [part for part in model.get_decoder().modules() if any(hasattr(part, name) for name in _COUNTERS)]
    found = (getattr(part, "padding_idx", None) for part in counters)
    return next((padding_idx for padding_idx in found if padding_idx is not None), -1)


class _RowOutputs:
    """Encoder output by row, copied to the host when it is first read."""

    def __init__(self, encoder: EncoderRuntime[Any], output: EncoderOutput | None) -> None:
        self._encoder, self._output = encoder, output

    @cached_property
    def rows(self) -> list[np.ndarray] | None:
        """As `encoder_outputs_by_row`; None without an output."""
        return None if self._output is None else encoder_outputs_by_row(self._encoder, self._output)

    def lens(self) -> list[int] | None:
        """Returns the number of positions of each row's output."""
        return None if self.rows is None else [row.shape[1] for row in self.rows]


def encoder_outputs_by_row(encoder: EncoderRuntime[Any], output: EncoderOutput) -> list[np.ndarray] | None:
    """Returns for each row the encoder output that the decoder sees, [1, len, width].

    Args:
        encoder: the model's encoder.
        output: its output, as arguments of the decoder's steps.

    Returns:
        One array per row; None if the decoder does not see the output from its beginning, or nothing of it.
    """
    encoded = np.asarray(output.arguments[ENCODER_ARGUMENTS[0]][0])[:, : output.length]
    if encoder.fixed_output_len is not None:
        return list(encoded[:, None]) if encoded.shape[1] == encoder.fixed_output_len else None
    if encoder.output_mask is None:
        return None
    lens, ones = np.full(len(encoded), output.length), output.own_mask()
    rule = SourceMask() if ones is not None else encoder.output_mask
    if ones is None and (mask := output.arguments.get(ENCODER_ARGUMENTS[1])) is not None:
        ones = np.asarray(mask) != 0
    if ones is not None:
        num_ones = ones.sum(1)
        if (ones != (np.arange(ones.shape[1]) < num_ones[:, None])).any():
            return None
        lens = np.minimum(lens, rule.seen(num_ones))
    return [row[None, :length] for row, length in zip(encoded, lens, strict=True)] if lens.all() else None


def _wants_tokens_only(request: SampleCall) -> bool:
    """Returns whether `request` wants tokens only, without code that runs between them.

    Inside a transcription scores are read for their tokens' log-probabilities only (`WhisperFallback`).
    """
    config = request.config
    criteria = {type(criterion) for criterion in request.stopping_criteria}
    wants_more = config.return_dict_in_generate and (current_limits() is None or bool(config.output_logits))
    return not (wants_more or request.streamer is not None or criteria - {MaxLengthCriteria, EosTokenCriteria})


def _run(
    engine: Engine | DataParallelEngines,
    request: SampleCall,
    outputs: list[np.ndarray],
    max_length: int,
) -> torch.Tensor | GenerateEncoderDecoderOutput:
    config = loop_options(request.config, max_length, request.input_ids.shape[1])
    limits = current_limits() or CallLimits()
    params = limits.params()
    has_scores = bool(request.config.return_dict_in_generate and request.config.output_scores)
    requests = []
    for prompt, output in zip(request.input_ids.tolist(), outputs, strict=True):
        seed = draw_seed(do_sample=config.do_sample)
        own = RequestParams.of_generation_config(config, params, seed=seed)
        if has_scores:
            own = dataclasses.replace(own, logprobs=0, scores_logprobs=True)
        requests.append(Request.of(prompt, own, request_input=output, is_continuation=limits.has_begun))
    handles = engine.submit_all(requests)
    with limits.cancelling(handles):
        rows = [read_tokens(handle, limits) for handle in handles]
    pad = 0 if request.config._pad_token_tensor is None else int(request.config._pad_token_tensor)
    sequences = torch.cat([request.input_ids, _padded([ids for ids, _ in rows], pad)], 1)
    if not request.config.return_dict_in_generate:
        return sequences
    logprobs = _padded([logprobs for _, logprobs in rows], 0.0)
    scores: Any = tuple(logprobs[:, step, None] for step in range(logprobs.shape[1])) if has_scores else None
    fields: dict[str, Any] = {"sequences": sequences, "scores": scores}
    return GenerateEncoderDecoderOutput(**fields)


def read_tokens(handle: RequestHandle, limits: CallLimits) -> tuple[list[int], list[float]]:
    """Returns a request's tokens and log-probabilities; passes tokens on as they come."""
    logprobs: list[float] = []
    for output in handle:
        logprobs += [each.logprob for each in output.logprobs or ()]
        limits.put_tokens(output.token_ids)
    return handle.token_ids, logprobs


def _padded(rows: Sequence[Sequence[Any]], value: float) -> torch.Tensor:
    """Returns rows of different lengths as a tensor, padded on the right."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def prompt_call(
    model: Any,
    prompt_ids: Sequence[int],
    config: GenerationConfig,
    engine: Callable[[], EngineFacts],
) -> PromptCall:
    """Returns the facts of a prompt for `torchax_serve.generation.routing.route`.

    Args:
        model: what `torchax_serve.generation.jax_model.run_on_jax` returned.
        prompt_ids: checked token ids.
        config: of ``generate``.
        engine: returns the limits of the model's engine.
    """
    encoder = model._jax_runtime.encoder
    if encoder is not None and encoder.runs_before_engine:
        config = without_model_options(model, config)  # the class's own generate reads the others
    options = unsupported_options(config, ENGINE_OPTIONS | PROMPT_OPTIONS)
    return PromptCall(len(prompt_ids), engine, options)


def engine_request_for(
    model: Any, prompt_ids: Sequence[int], config: GenerationConfig, params: SamplingParams | None, seed: int
) -> Request | None:
    """Returns the engine request of a prompt, which is the encoder's input if there is one.

    None if the class's ``generate`` does more than it prepares for a loop over tokens.

    Args:
        model: what `torchax_serve.generation.jax_model.run_on_jax` returned.
        prompt_ids: checked token ids.
        config: of ``generate``.
        params: the caller's parameters, for options that only the engine honours.
        seed: of sampling.
    """
    runtime = model._jax_runtime
    given = params or NO_PARAMS
    if not runtime.program.names.has_encoder:
        return Request.of(prompt_ids, RequestParams.of_generation_config(config, given, seed=seed))
    start_ids = decoder_start_ids(config, params)
    if runtime.encoder is None or not runtime.encoder.runs_before_engine:
        own = RequestParams.of_generation_config(config, given, seed=seed)
        return Request.of(start_ids, own, encoder_ids=prompt_ids, request_input=tuple(prompt_ids))
    ids = torch.tensor([list(prompt_ids)], dtype=torch.long)
    request = prepared_call(model, {"input_ids": ids}, config)
    start = None if request is None else static_batch_start(runtime, request)
    if request is None or not isinstance(start, StaticBatchStart) or start.encoder is None:
        return None
    outputs = encoder_outputs_by_row(runtime.encoder, start.encoder)
    if outputs is None or request.stopping_criteria.max_length is None:
        return None
    start_ids = request.input_ids[0].tolist()
    config = loop_options(request.config, request.stopping_criteria.max_length, len(start_ids))
    own = RequestParams.of_generation_config(config, given, seed=seed)
    return Request.of(start_ids, own, encoder_ids=prompt_ids, request_input=outputs[0])


def encoded_request(
    model: Any,
    get_engine: Callable[[], Engine | DataParallelEngines],
    inputs: Mapping[str, Any],
    config: GenerationConfig,
    params: SamplingParams | None,
    seed: int | None,
) -> Request | str:
    """Returns the request of a decoder behind an encoder of images or audio, which has run here.

    If the engine does not take it, the reason is returned instead.

    Args:
        model: what `torchax_serve.generation.jax_model.run_on_jax` returned; it has an encoder.
        get_engine: returns the engine, which is made for the first request that it can take.
        inputs: all tensors of one row by argument of ``generate``.
        config: limits and options of decoding.
        params: options that only the engine honours.
        seed: of sampling; None: one from torch's global generator.
    """
    runtime = model._jax_runtime
    if runtime.encoder.is_masked:
        return "its encoder reads tokens beside images or audio"
    if runtime.why_stepwise is not None:
        return str(runtime.why_stepwise)
    call = prepared_call(model, inputs, config)
    if call is None or len(call.input_ids) != 1:
        return "its generate does more than it prepares for the loop over tokens"
    if unsupported := unsupported_options(call.config, ENGINE_OPTIONS):
        return f"{', '.join(unsupported)} is set"
    start = static_batch_start(runtime, call)
    if not isinstance(start, StaticBatchStart):
        return start

    found = _engine_outputs(model, call, start, lambda: EngineFacts.of_engine(get_engine))
    if isinstance(found, str):
        return found
    seed = draw_seed(seed, do_sample=call.config.do_sample)
    max_len = call.stopping_criteria.max_length
    assert max_len is not None
    start_ids = call.input_ids[0].tolist()
    options = loop_options(call.config, max_len, len(start_ids))
    own = RequestParams.of_generation_config(options, params or NO_PARAMS, seed=seed)
    return Request.of(start_ids, own, request_input=found[0])
