"""Rows of ``generate`` as requests on the engine: what many threads transcribe at once runs side by side.

The model's own ``generate`` prepares everything, and goes on with what comes back: windows of long sounds, languages,
prompts. Only the loop over tokens that it would end in is the engine's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from model_adapters.errors import OutOfMemoryError, UnsupportedModelError
from torchax_serve.decode_loop import LoopRequest, Start
from torchax_serve.encoder_output import CONTEXT
from torchax_serve.engine.request import RowRequest
from torchax_serve.padding import Padding
from torchax_serve.sampling.options import PLAN_OPTIONS

if TYPE_CHECKING:
    from torchax_serve.engine.engine import Engine
    from torchax_serve.engine.replicas import Replicas
    from torchax_serve.model import ServedModel

logger = logging.getLogger("torchax_serve")


class SpeechRows:
    """Runs rows of a served model's ``generate`` on its engine, where their tokens are the same as in the loop.

    Args:
        model: the served one; its engine is made when a first request can go there.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._has_no_engine = False

    def __call__(self, torch_model: Any, request: LoopRequest, start: Start) -> torch.Tensor | None:
        """int64[batch, len], prompts and new tokens, padded behind their ends; None to leave it to the loop."""
        if torch_model is not self._model.torch_model or self._has_no_engine or not _is_greedy(request):
            return None
        if start.encoder is None:  # sounds among words
            return None
        names = torch_model._jax_runtime.program.names
        if Padding.of(request.model_kwargs.get(names.mask), request.input_ids.shape[1]) != Padding():
            return None
        encoded = np.asarray(start.encoder.arguments[CONTEXT[0]][0])
        engine = self._engine(torch_model, encoded.shape[1])
        max_length = request.stopping_criteria.max_length
        if engine is None or max_length is None or not engine.fits(max_length):
            return None
        return _run(engine, request, encoded, max_length, torch_model._jax_runtime.vocab_size)

    def _engine(self, torch_model: Any, length: int) -> Engine | Replicas | None:
        if torch_model._jax_runtime.length_heard != length:
            self._has_no_engine = True
            return None
        try:
            return self._model.engine
        except (UnsupportedModelError, OutOfMemoryError) as error:
            logger.warning("transcripts run by themselves, one call at a time: %s", error)
            self._has_no_engine = True
            return None


def _is_greedy(request: LoopRequest) -> bool:
    """Whether nothing is drawn, nothing but tokens is asked for, and nobody looks on from the host."""
    config = request.config
    criteria = {type(criterion) for criterion in request.stopping_criteria}
    return not (
        config.do_sample
        or config.return_dict_in_generate
        or request.streamer is not None
        or criteria - {MaxLengthCriteria, EosTokenCriteria}
    )


def _plain(config: GenerationConfig) -> GenerationConfig:
    """`config` without what is no loop's business."""
    return GenerationConfig(**{name: getattr(config, name) for name in PLAN_OPTIONS})


def _run(
    engine: Engine | Replicas, request: LoopRequest, encoded: np.ndarray, max_length: int, vocab_size: int
) -> torch.Tensor:
    prompt_len = request.input_ids.shape[1]
    config = _plain(request.config)
    config.max_length, config.max_new_tokens = max_length, max_length - prompt_len
    tickets = []
    try:
        for prompt, output in zip(request.input_ids.tolist(), encoded, strict=True):
            row = RowRequest.of(prompt, config, vocab_size=vocab_size, seed=0, encoded=output[None])
            tickets.append(engine.submit(row))
        rows = [ticket.result() for ticket in tickets]
    except BaseException:  # the caller's interrupt, too: nobody will read what the others bring
        for ticket in tickets:
            ticket.cancel()
        raise
    longest = max(len(row) for row in rows)
    pad = 0 if request.config._pad_token_tensor is None else int(request.config._pad_token_tensor)
    padded = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], dtype=torch.long)
    return torch.cat([request.input_ids, padded], 1)
