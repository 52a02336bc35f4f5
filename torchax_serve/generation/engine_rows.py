"""Rows of ``generate`` as requests on the engine: what many threads transcribe or translate at once runs side by side.

A class's own ``generate`` prepares everything, and goes on with what comes back: windows of long sounds, languages,
prompts. Only the loop over tokens that it would end in is the engine's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from model_adapters.errors import OutOfMemoryError, UnsupportedModelError
from torchax_serve.engine.request import EngineRequest
from torchax_serve.engine.request_handle import cancel_on_error
from torchax_serve.executors.encoder_inputs import decoder_start_ids
from torchax_serve.generation.static_batch import SampleCall, StaticBatchStart
from torchax_serve.generation.threaded_generate import prepared
from torchax_serve.runtime.encoder_output import ENCODER_ARGUMENTS, EncoderOutput
from torchax_serve.runtime.padding import Padding
from torchax_serve.sampling.config_options import PLAN_OPTIONS
from torchax_serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torchax_serve.engine.data_parallel import DataParallelEngines
    from torchax_serve.engine.engine import Engine
    from torchax_serve.runtime.encoder import EncoderRuntime

logger = logging.getLogger("torchax_serve")

_COUNTERS = ("create_position_ids_from_input_ids", "make_positions")  # methods, of embeddings


class EngineRows:
    """Runs rows of a served model's ``generate`` on its engine, where their tokens are the same as in the loop.

    Args:
        torch_model: the served model on JAX, whose ``generate`` is run.
        get_engine: the engine; it is made when a first request can go there.
    """

    def __init__(self, torch_model: Any, get_engine: Callable[[], Engine | DataParallelEngines]) -> None:
        self._torch_model, self._get_engine = torch_model, get_engine
        self._has_no_engine = False

    def __call__(self, torch_model: Any, request: SampleCall, start: StaticBatchStart) -> torch.Tensor | None:
        """int64[batch, len], prompts and new tokens, padded behind their ends; None to leave it to the loop."""
        if torch_model is not self._torch_model or self._has_no_engine or not _is_greedy(request):
            return None
        if start.encoder is None:  # sounds among words
            return None
        runtime = torch_model._jax_runtime
        names = runtime.program.names
        if Padding.of(request.model_kwargs.get(names.mask), request.input_ids.shape[1]) != Padding():
            return None
        if (request.input_ids == self._padding_id_without_position).any():
            return None  # a prompt's positions depend on what it is computed with
        outputs = None if runtime.encoder is None else encoder_outputs_by_row(runtime.encoder, start.encoder)
        engine = None if outputs is None else self._engine()
        max_length = request.stopping_criteria.max_length
        if engine is None or outputs is None or max_length is None or not engine.can_hold(max_length):
            return None
        longest = max(output.shape[1] for output in outputs)
        if longest > (engine.max_encoder_len or 0) or len(outputs) != len(request.input_ids):
            return None
        return _run(engine, request, outputs, max_length, runtime.limits.vocab_size)

    @cached_property
    def _padding_id_without_position(self) -> int:
        """The padding that a decoder such as M2M100's counts positions without, over the tokens of a step; -1: none."""
        parts = self._torch_model.get_decoder().modules()
        counters = [part for part in parts if any(hasattr(part, name) for name in _COUNTERS)]
        found = (getattr(part, "padding_idx", None) for part in counters)
        return next((padding_idx for padding_idx in found if padding_idx is not None), -1)

    def _engine(self) -> Engine | DataParallelEngines | None:
        try:
            return self._get_engine()
        except (UnsupportedModelError, OutOfMemoryError) as error:
            logger.warning("rows of generate run by themselves, one call at a time: %s", error)
            self._has_no_engine = True
            return None


def encoder_outputs_by_row(encoder: EncoderRuntime[Any], output: EncoderOutput) -> list[np.ndarray] | None:
    """By row what the decoder sees of its encoder's output, ``[1, len, width]``; None where that is not its beginning.

    Args:
        encoder: beside the decoder.
        output: of the encoder, as arguments of the decoder's steps.
    """
    encoded = np.asarray(output.arguments[ENCODER_ARGUMENTS[0]][0])[:, : output.length]
    if encoder.fixed_output_len is not None:
        return list(encoded[:, None]) if encoded.shape[1] == encoder.fixed_output_len else None
    if encoder.output_mask is None:
        return None
    lens = np.full(len(encoded), output.length)
    if (mask := output.arguments.get(ENCODER_ARGUMENTS[1])) is not None:
        ones = np.asarray(mask) != 0
        num_ones = ones.sum(1)
        if (ones != (np.arange(ones.shape[1]) < num_ones[:, None])).any():
            return None
        lens = np.minimum(lens, encoder.output_mask.seen(num_ones))
    return [row[None, :length] for row, length in zip(encoded, lens, strict=True)] if lens.all() else None


def _is_greedy(request: SampleCall) -> bool:
    """Whether nothing is drawn, nothing but tokens is asked for, and nobody looks on from the host."""
    config = request.config
    criteria = {type(criterion) for criterion in request.stopping_criteria}
    return not (
        config.do_sample
        or config.return_dict_in_generate
        or request.streamer is not None
        or criteria - {MaxLengthCriteria, EosTokenCriteria}
    )


def plain(config: GenerationConfig, max_length: int, prompt_len: int) -> GenerationConfig:
    """`config` without what is no loop's business, of an answer that ends at `max_length`."""
    options = {name: getattr(config, name) for name in PLAN_OPTIONS}
    return GenerationConfig(**options | {"max_length": max_length, "max_new_tokens": max_length - prompt_len})


def _run(
    engine: Engine | DataParallelEngines,
    request: SampleCall,
    outputs: list[np.ndarray],
    max_length: int,
    vocab_size: int,
) -> torch.Tensor:
    prompt_len = request.input_ids.shape[1]
    config = plain(request.config, max_length, prompt_len)
    tickets = engine.submit_all(
        [
            EngineRequest.of(prompt, config, vocab_size=vocab_size, seed=0, encoded=output)
            for prompt, output in zip(request.input_ids.tolist(), outputs, strict=True)
        ]
    )
    with cancel_on_error(tickets):
        rows = [ticket.result() for ticket in tickets]
    longest = max(len(row) for row in rows)
    pad = 0 if request.config._pad_token_tensor is None else int(request.config._pad_token_tensor)
    padded = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], dtype=torch.long)
    return torch.cat([request.input_ids, padded], 1)


def engine_request_for(
    model: Any, prompt_ids: Sequence[int], config: GenerationConfig, params: SamplingParams | None, seed: int
) -> EngineRequest | None:
    """A prompt as the engine takes it, for an encoder where there is one; None where only ``generate`` can.

    Args:
        model: what `torchax_serve.generation.jax_model.run_on_jax` returned.
        prompt_ids: checked token ids.
        config: of ``generate``.
        params: options that only the engine honours.
        seed: of the draws.
    """
    runtime = model._jax_runtime
    known: dict[str, Any] = {"vocab_size": runtime.limits.vocab_size, "seed": seed}
    if not runtime.program.names.has_encoder:
        return EngineRequest.of(prompt_ids, config, params, **known)
    begins_with = decoder_start_ids(config, params)
    if runtime.encoder is None or not runtime.encoder.runs_before_engine:
        return EngineRequest.of(begins_with, config, params, source_ids=prompt_ids, **known)
    ids = torch.tensor([list(prompt_ids)], dtype=torch.long)
    request, start = prepared(model, ids, {"generation_config": config}) or (None, None)
    outputs = None if start is None or start.encoder is None else encoder_outputs_by_row(runtime.encoder, start.encoder)
    if request is None or outputs is None or request.stopping_criteria.max_length is None:
        return None
    begins_with = request.input_ids[0].tolist()
    config = plain(request.config, request.stopping_criteria.max_length, len(begins_with))
    return EngineRequest.of(begins_with, config, params, encoded=outputs[0], **known)
