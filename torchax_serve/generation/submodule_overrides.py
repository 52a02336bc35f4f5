"""Submodules that a class's ``generate`` calls outside the forward, compiled as well."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import ModelOutput

from model_adapters.bridge.views import in_torch_mode
from model_adapters.errors import UnsupportedArgumentError
from model_adapters.quirks.voxtral_realtime import width_before


def compile_submodules(model: Any, run: Callable[[str, dict[str, Any]], Any]) -> None:
    """Replaces methods of submodules that the ``generate`` of `model` calls, if it calls any.

    Args:
        model: a transformers model.
        run: as `torchax_serve.runtime.model_runtime.ModelRuntime.call_method`.
    """
    put = _BY_TYPE.get(getattr(model.config, "model_type", ""))
    if put is not None:
        put(model, run)


def has_parts_on_jax(model: Any) -> bool:
    """Returns whether `compile_submodules` has replaced methods of submodules of `model`."""
    return getattr(model.config, "model_type", "") in _BY_TYPE


def reject_generators(kwargs: dict[str, Any]) -> None:
    """Raises UnsupportedArgumentError for audio that arrives in pieces, from a generator."""
    for name, value in kwargs.items():
        if isinstance(value, types.GeneratorType):
            raise UnsupportedArgumentError(
                f"{name}: expected a tensor with all of the input, got a generator; audio that is still being "
                "recorded is not supported here: collect it first"
            )


def _voxtral_realtime(model: Any, run: Callable[[str, dict[str, Any]], Any]) -> None:
    """Encodes audio at once instead of in pieces; see `model_adapters.quirks.voxtral_realtime`."""
    config, embedder = model.config, model.model.audio_tower.embedder
    theirs, width = embedder.forward, width_before(config)
    if width is None:
        return

    def encode(input_features: torch.Tensor, padding_cache: Any = None) -> torch.Tensor:
        if in_torch_mode() or padding_cache is not None:
            return theirs(input_features, padding_cache)
        num_frames = input_features.shape[-1] // config.audio_length_per_tok * config.audio_length_per_tok
        features = input_features[..., :num_frames]
        hidden = run("model.audio_tower.forward", {"input_features": features, "use_cache": False}).last_hidden_state
        by_token = hidden.reshape(hidden.shape[0], -1, hidden.shape[-1] * config.downsample_factor)
        encoded: torch.Tensor = run("model.multi_modal_projector.forward", {"audio_features": by_token})
        return encoded.reshape(hidden.shape[0], -1, width)

    vars(embedder)["forward"] = encode


def _kyutai_speech_to_text(model: Any, run: Callable[[str, dict[str, Any]], Any]) -> None:
    """Encodes audio at once instead of in windows: the codec is causal, and each window would need a program."""
    codec = model.codec_model
    theirs, signature = codec.encode, inspect.signature(codec.encode)
    prepare = model._prepare_model_inputs

    def encode(*args: Any, **kwargs: Any) -> Any:
        if in_torch_mode():
            return theirs(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        given = {name: value for name, value in given.items() if name not in CACHES and value is not None}
        output: ModelOutput = run("codec_model.encode", given)
        return output

    def prepare_at_once(inputs: Any = None, bos_token_id: Any = None, model_kwargs: Any = None) -> Any:
        given = dict(model_kwargs or {})
        if given.get("audio_window_size") is not None:
            raise UnsupportedArgumentError(
                f"audio_window_size: expected None, since audio is encoded at once here, got "
                f"{given['audio_window_size']}; set generation_config.audio_window_size = None"
            )
        given["audio_window_size"] = -(-given["input_values"].shape[-1] // model.config.frame_size)
        return prepare(inputs, bos_token_id, given)

    vars(codec)["encode"] = encode
    vars(model)["_prepare_model_inputs"] = prepare_at_once


CACHES = ("encoder_past_key_values", "encoder_cache", "padding_cache")
"""Arguments with a codec's state between windows; transformers 5.24 renamed the first to the second."""
_BY_TYPE = {"kyutai_speech_to_text": _kyutai_speech_to_text, "voxtral_realtime": _voxtral_realtime}
