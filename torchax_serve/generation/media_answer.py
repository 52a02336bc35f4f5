"""Answers to conversations with images or audio."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import GenerationConfig

from model_adapters.errors import UnsupportedArgumentError
from torchax_serve.generation.threaded_generate import iter_generate_in_thread, torch_seed
from torchax_serve.multimodal.processor import media_inputs
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.text.chat_template import ChatOptions
from torchax_serve.text.detokenizer import Detokenizer
from torchax_serve.text.prompt import (
    DEFAULT_CHAT_MAX_NEW_TOKENS,
    PreparedPrompt,
    given_or_default,
    merged,
    need_tokenizer,
)
from torchax_serve.text.text_stream import TextStream


def stream_about_media(
    model: Any, conversation: list[dict[str, Any]], params: SamplingParams | None, options: ChatOptions
) -> TextStream:
    """Streams the answer to a conversation with images or audio, by ``generate``: one call at a time.

    Raises:
        UnsupportedArgumentError: `params` has options that only the engine honours, or asks for several answers.
        InvalidArgumentError, UnsupportedModelError: as `torchax_serve.multimodal.processor.media_inputs`.
    """
    params = given_or_default(params)
    if unknown := params.engine_only():
        raise UnsupportedArgumentError(
            f"{', '.join(unknown)}: requests with images or audio run without the engine, which alone honours "
            "this; leave it out"
        )
    config, stop_strings = merged(model, params)
    if (config.num_return_sequences or 1) > 1:
        raise UnsupportedArgumentError(
            "n: expected one answer to a conversation with images or audio; ask again for another"
        )
    if config.max_new_tokens is None and config.max_length is None:
        config.max_new_tokens = DEFAULT_CHAT_MAX_NEW_TOKENS
    inputs = media_inputs(model, conversation, options)
    prompt_ids = tuple(int(token_id) for token_id in inputs["input_ids"][0])
    request = PreparedPrompt(prompt_ids, config, stop_strings, params.seed, params)
    tokens = _tokens(model, inputs, config, params.seed)
    return TextStream(request, Detokenizer(need_tokenizer(model)), tokens)


def _tokens(model: Any, inputs: dict[str, Any], config: GenerationConfig, seed: int | None) -> Iterator[int]:
    if (config.num_beams or 1) == 1:
        yield from iter_generate_in_thread(model, inputs, {"generation_config": config}, seed)
        return
    with torch_seed(seed):  # the best beam is known at the end
        row = model.generate(**inputs, generation_config=config)[0]
    yield from row[1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1] :].tolist()
