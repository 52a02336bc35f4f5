"""VibeVoice's audio encoder draws noise at each call unless it is told not to.

The argument is `sample`, true by default. A compiled program has one noise for all calls, whatever the seed, so that
noise is refused. `chat`, `transcribe` and the server leave it out: the features are those that the encoder returns
without it.
"""

from __future__ import annotations

from typing import Any

from model_adapters.errors import UnsupportedArgumentError
from model_adapters.quirks.quirk import Quirk


def _get_audio_features(self: Any, *args: Any, sample: bool = True, **kwargs: Any) -> Any:
    if sample:
        raise UnsupportedArgumentError(
            "sample: expected False, got True, which is the default: the audio encoder would add random noise, which a "
            "compiled program repeats at every call; pass sample=False"
        )
    return type(self).get_audio_features(self, *args, sample=False, **kwargs)


QUIRK = Quirk(
    methods={"VibeVoiceAsrModel.get_audio_features": _get_audio_features},
    media_options={"sample": False},
)
