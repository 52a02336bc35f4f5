"""Kyutai's speech-to-text reads audio with every token; here all audio is encoded first.

The codec is causal, so both ways give the same codes; encoded window by window it would need a program for each window.
As every token comes with audio, a probe with tokens only cannot show that its cache may have fixed shapes: it may. Its
masks show every token and it relies on the sliding cache dropping old ones, as those of `moshi`.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers.utils import ModelOutput

from model_adapters.bridge.views import in_torch_mode
from model_adapters.errors import UnsupportedArgumentError
from model_adapters.quirks.quirk import Quirk, Run

# Caches by which the codec goes on from window to window; transformers 5.24 renames the first to the second.
_CODEC_CACHES = ("encoder_past_key_values", "encoder_cache", "padding_cache")


def _encode_on_jax(model: Any, run: Run) -> None:
    """Replaces the codec's ``encode``, and has ``generate`` take all audio as one window."""
    codec = model.codec_model
    original, signature = codec.encode, inspect.signature(codec.encode)
    prepare = model._prepare_model_inputs

    def encode(*args: Any, **kwargs: Any) -> Any:
        if in_torch_mode():
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        inputs = {name: value for name, value in given.items() if name not in _CODEC_CACHES and value is not None}
        output: ModelOutput = run("codec_model.encode", inputs)
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


QUIRK = Quirk(unmasked_sliding_cache=True, fixed_cache_is_safe=True, submodules=_encode_on_jax)
