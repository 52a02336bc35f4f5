"""The answer to a conversation with images or sounds."""

from __future__ import annotations

from typing import Any

import torch

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.images.processor import media_inputs
from torchax_serve.request import SamplingParams

MAX_NEW_TOKENS = 1024
"""Where neither the request nor the model says how long an answer may be."""


def answer_about_media(model: Any, conversation: list[dict[str, Any]], params: SamplingParams | None) -> str:
    """Text behind `conversation`, by ``generate``: requests with images or sounds run one after the other.

    Raises:
        UnsupportedArgumentError: `params` has options of the engine alone, or asks for several answers.
        InvalidArgumentError, UnsupportedModelError: as `torchax_serve.images.processor.media_inputs`.
    """
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidArgumentError(f"params: expected SamplingParams or None, got {type(params).__name__}")
    params = params or SamplingParams()
    if unknown := params.engine_only():
        raise UnsupportedArgumentError(
            f"{', '.join(unknown)}: requests with images or sounds run without the engine, which alone knows "
            "this; leave it out"
        )
    config = params.to_generation_config(model.generation_config)
    if (config.num_return_sequences or 1) > 1:
        raise UnsupportedArgumentError(
            "n: expected one answer to a conversation with images or sounds; ask again for another"
        )
    if config.max_new_tokens is None and config.max_length is None:
        config.max_new_tokens = MAX_NEW_TOKENS
    inputs = media_inputs(model, conversation)
    options: dict[str, Any] = {"tokenizer": model.tokenizer} if config.stop_strings else {}
    with torch.random.fork_rng(devices=[], enabled=params.seed is not None):
        if params.seed is not None:
            torch.manual_seed(params.seed)
        tokens = model.generate(**inputs, generation_config=config, **options)
    return model.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
