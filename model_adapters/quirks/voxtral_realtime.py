"""Voxtral Realtime hears a piece of sound with every token; here a sound is encoded as a whole, before its tokens.

Its encoder is causal, so a piece is encoded alike either way. Piece by piece, the encoder's cache would give each step
another shape, and with it a program of its own. What was encoded comes in the place of what the encoder's first layers
make, ``encoder_inputs_embeds``, and is told from that by its width.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def width_before(config: Any) -> int | None:
    """Width of what was encoded before, by place of the encoder; None where it could be mistaken for embeddings."""
    width, rest = divmod(config.text_config.hidden_size, config.downsample_factor)
    return None if rest or width == config.audio_config.hidden_size else width


def get_audio_features(self: Any, input_features: Any = None, **kwargs: Any) -> Any:
    """The model's own, or what was encoded before, ``[batch, num_tokens, hidden]``."""
    embeds = kwargs.get("encoder_inputs_embeds")
    if input_features is not None or embeds is None or embeds.shape[-1] != width_before(self.config):
        return type(self).get_audio_features(self, input_features, **kwargs)
    hidden = embeds.reshape(embeds.shape[0], -1, embeds.shape[-1] * self.config.downsample_factor)
    return SimpleNamespace(pooler_output=hidden, past_key_values=None, cache=None, padding_cache=None)


METHODS = {"VoxtralRealtimeModel.get_audio_features": get_audio_features}
