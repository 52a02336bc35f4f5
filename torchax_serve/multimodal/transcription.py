"""Prompts for transcription, of models that read audio among the tokens of a decoder."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np

from model_adapters import quirks
from model_adapters.caches.native_cache import allows_fixed_shapes
from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.multimodal.audio import check_rate
from torchax_serve.multimodal.decode_inputs import in_dtype
from torchax_serve.multimodal.processor import processor_of


def transcription_inputs(
    model: Any, arrays: list[np.ndarray], sampling_rate: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Returns inputs of ``generate`` with a prompt for transcription.

    The options of that prompt are removed from `options`.

    Args:
        model: What `torchax_serve.serve` returned.
        arrays: Samples float32[num_samples] of each audio.
        sampling_rate: Samples per second (Hz).
        options: Those of the prompt, and of ``generate``.

    Raises:
        InvalidArgumentError: another sampling rate than the model's; audio or options that its processor refuses.
        UnsupportedModelError: the processor has no prompt for transcription.
    """
    processor = processor_of(model)
    check_rate(getattr(model.feature_extractor, "sampling_rate", None), sampling_rate)
    write = getattr(processor, "apply_transcription_request", None)
    if write is None and allows_fixed_shapes(model.torch_model):
        write = functools.partial(_audio_per_token, processor, sampling_rate)
    if write is None:
        raise UnsupportedModelError(
            f"expected a processor with a prompt for transcription, {type(processor).__name__} of {model.name} has "
            'none; ask by chat() with a part {"type": "audio", "audio": samples, "sampling_rate": …}'
        )
    prompt_options = {name: options.pop(name) for name in inspect.signature(write).parameters if name in options}
    try:
        inputs = write(audio=arrays, **prompt_options)
    except Exception as error:  # processors raise whatever they like
        raise InvalidArgumentError(
            f"expected audio that the processor of {model.name} takes, it raised {type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}; check the audio and the options"
        ) from error
    return {**quirks.of(model.torch_model).media_options, **in_dtype(inputs, model.torch_model.dtype)}


def _audio_per_token(processor: Any, sampling_rate: int, *, audio: list[np.ndarray]) -> dict[str, Any]:
    """Returns inputs of a model that gets audio with every token and no prompt."""
    return dict(processor(audio=audio, sampling_rate=sampling_rate, return_tensors="pt"))
