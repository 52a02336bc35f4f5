"""``/v1/audio/speech``: spoken texts."""

from __future__ import annotations

import io
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from torchax_serve.multimodal.audio import resampled
from torchax_serve.server import require_packages
from torchax_serve.server.context import context_of
from torchax_serve.server.errors import bad_request
from torchax_serve.server.media_inputs import results
from torchax_serve.server.model_requests import read_for_model
from torchax_serve.server.request_checks import check_text_size
from torchax_serve.server.request_fields import ApiRequest, ModelName, honoured, no_effect, refused

_TYPES = {
    "mp3": ("audio/mpeg", "MP3", "MPEG_LAYER_III"),
    "wav": ("audio/wav", "WAV", "PCM_16"),
    "flac": ("audio/flac", "FLAC", "PCM_16"),
    "opus": ("audio/ogg", "OGG", "OPUS"),
    "pcm": ("audio/pcm", "", ""),
}
"""Media type, and format and subtype of libsndfile, of each form of an answer."""
_OPUS_RATES = (8_000, 12_000, 16_000, 24_000, 48_000)
"""Rates of the codec (Hz); sound of another is resampled to the next."""
OWN_VOICE = "default"
"""Name of the voice of a model that has no choice."""


class SpeechRequest(ApiRequest):
    """Body of ``/v1/audio/speech``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/audio/speech",)
    model: Annotated[ModelName, honoured("a name in `/v1/models`, another one is 404; without it, the served one")] = ""
    input: Annotated[str, honoured("the text")]
    voice: Annotated[
        str | dict[str, Any] | None, honoured("`default`, or the number of one of the model's speakers")
    ] = None
    response_format: Annotated[
        Literal["mp3", "wav", "flac", "opus", "pcm"] | None,
        honoured("`mp3` by default; `pcm` is int16, little-endian, at the model's rate, which a header says"),
    ] = None
    speed: Annotated[float | None, honoured("0.25 to 4, times the model's own rate of speaking; 1 by default")] = None
    seed: Annotated[int | None, honoured("of the noise in the voice; a new one by default")] = None
    instructions: Annotated[Any, refused("expected none; the model takes no instructions", "")] = None
    stream_format: Annotated[Any, refused("expected audio; the answer is sent when it is complete", "audio")] = None
    stream: Annotated[Any, refused("expected false; the answer is sent when it is complete", False)] = None
    user: Annotated[str | None, no_effect("who asks is told by the API key")] = None


async def speech(request: Request) -> Response:
    """Returns a text as speech."""
    service, body = await read_for_model(request, SpeechRequest, "speak")
    service.settle_name(body, request.state.key)
    model: Any = service.model
    check_text_size(body.input, context_of(request).options.request, "input")
    if body.speed is not None and not 0.25 <= body.speed <= 4:
        raise bad_request(f"speed: expected a number from 0.25 to 4, got {body.speed}", "speed", "invalid_value")
    own = float(getattr(model.config, "speaking_rate", 1.0) or 1.0)
    options = {
        "speaker": _speaker(body.voice, model.num_speakers),
        "seed": body.seed,
        "speaking_rate": None if body.speed is None else body.speed * own,
    }
    spoken = await results(request, model.aspeak, body.input, **options)
    data, rate = await service.run(_encoded, spoken.samples, spoken.sampling_rate, body.response_format or "mp3")
    kind, _, _ = _TYPES[body.response_format or "mp3"]
    return Response(data, media_type=kind, headers={"X-Sample-Rate": str(rate)})


def _speaker(voice: Any, num_speakers: int) -> int | None:
    """Returns the number of a voice; None: the model's own."""
    name = voice.get("id") if isinstance(voice, dict) else voice
    if name in (None, OWN_VOICE):
        return None
    if isinstance(name, str) and name.isdecimal() and len(name) < 6 and int(name) < num_speakers:
        return int(name)
    raise bad_request(
        f"voice: expected {OWN_VOICE}, or a number from 0 to {num_speakers - 1}, got {str(name)[:40]!r}",
        "voice",
        "invalid_value",
    )


def _encoded(samples: np.ndarray, rate: int, form: str) -> tuple[bytes, int]:
    """Returns a file of samples, and their rate in it (Hz)."""
    if form == "pcm":
        return (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes(), rate
    require_packages("soundfile")
    import soundfile

    if form == "opus" and rate not in _OPUS_RATES:
        wanted = next((each for each in _OPUS_RATES if each > rate), _OPUS_RATES[-1])
        samples, rate = resampled(samples, rate, wanted), wanted
    _, kind, subtype = _TYPES[form]
    file = io.BytesIO()
    soundfile.write(file, np.clip(samples, -1, 1), rate, format=kind, subtype=subtype)
    return file.getvalue(), rate
