"""`SampleCall`: inputs of ``generate``'s sampling loop, and the start of their static batch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteriaList

from model_adapters.caches.device_cache import DeviceCache
from model_adapters.program.call_signature import generate_cache_name
from torchax_serve.generation.routing import LoopCall, ModelCapabilities, Path, route
from torchax_serve.multimodal.decode_inputs import PreparedSteps
from torchax_serve.request_params import CALLER_OPTIONS, unsupported_options
from torchax_serve.runtime.encoder_output import ENCODER_ARGUMENTS, EncoderOutput
from torchax_serve.runtime.model_runtime import ModelRuntime
from torchax_serve.runtime.padding import Padding

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
    """Returns the first inputs of a static batch for `request`.

    If the request needs transformers' own loop, the reason is returned instead.
    """
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
        unsupported_options=unsupported_options(config, HONOURED_OPTIONS),
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
    """Returns the arguments of a call with media; None for text.

    If a static batch cannot take the call, the reason is returned instead.

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
