"""Voxtral Realtime reads audio with every token; here all audio is encoded first.

Its encoder is causal, so both ways give the same output. Piece by piece, the encoder's cache would give each step
another shape, and with it a program of its own. The encoder output replaces the output of the encoder's first layers,
``encoder_inputs_embeds``, and is told apart from it by its width. As every token comes with audio, a probe with tokens
only cannot show that its cache may have fixed shapes: it may.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from model_adapters.bridge.views import in_torch_mode
from model_adapters.quirks.quirk import Quirk, Run


def _width(config: Any) -> int | None:
    """Returns the width of the encoder output per encoder position.

    None where it could be mistaken for embeddings.
    """
    width, rest = divmod(config.text_config.hidden_size, config.downsample_factor)
    return None if rest or width == config.audio_config.hidden_size else width


def _get_audio_features(self: Any, input_features: Any = None, **kwargs: Any) -> Any:
    """Returns the encoder output [batch, num_tokens, hidden] that was given.

    If none was given, it returns what the original computes.
    """
    embeds = kwargs.get("encoder_inputs_embeds")
    if input_features is not None or embeds is None or embeds.shape[-1] != _width(self.config):
        return type(self).get_audio_features(self, input_features, **kwargs)
    hidden = embeds.reshape(embeds.shape[0], -1, embeds.shape[-1] * self.config.downsample_factor)
    return SimpleNamespace(pooler_output=hidden, past_key_values=None, cache=None, padding_cache=None)


def _encode_on_jax(model: Any, run: Run) -> None:
    """Replaces the forward of the encoder's first layers by that of the full encoder, on JAX."""
    config, embedder = model.config, model.model.audio_tower.embedder
    original, width = embedder.forward, _width(config)
    if width is None:
        return

    def encode(input_features: torch.Tensor, padding_cache: Any = None) -> torch.Tensor:
        if in_torch_mode() or padding_cache is not None:
            return original(input_features, padding_cache)
        num_frames = input_features.shape[-1] // config.audio_length_per_tok * config.audio_length_per_tok
        features = input_features[..., :num_frames]
        hidden = run("model.audio_tower.forward", {"input_features": features, "use_cache": False}).last_hidden_state
        by_token = hidden.reshape(hidden.shape[0], -1, hidden.shape[-1] * config.downsample_factor)
        encoded: torch.Tensor = run("model.multi_modal_projector.forward", {"audio_features": by_token})
        return encoded.reshape(hidden.shape[0], -1, width)

    vars(embedder)["forward"] = encode


QUIRK = Quirk(
    methods={"VoxtralRealtimeModel.get_audio_features": _get_audio_features},
    fixed_cache_is_safe=True,
    submodules=_encode_on_jax,
)
