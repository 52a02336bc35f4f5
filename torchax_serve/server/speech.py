"""``/v1/audio/speech``: spoken texts."""

from __future__ import annotations

import base64
import contextlib
import io
import re
import struct
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from torchax_serve.multimodal.audio import resampled
from torchax_serve.server import require_packages
from torchax_serve.server.context import context_of
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.media_inputs import results
from torchax_serve.server.model_requests import read_for_model
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.request_checks import check_text_size
from torchax_serve.server.request_fields import ApiRequest, ModelName, honoured, no_effect, refused
from torchax_serve.server.sse import EventStream, event

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
_STREAMED = ("pcm", "wav", "opus")
"""Forms that can be sent before their end is known; mp3 and flac files begin with numbers about all of them."""
_UNKNOWN_LEN = (1 << 32) - 1
"""Length in the head of a wav file whose end is not known yet."""
_SENTENCE_END = re.compile(r"(?<=[.!?;:…])\s+|(?<=[\u3002\uff01\uff1f\uff1b])|\n+")
_MIN_CHARS = 16
"""Fewest characters of a sentence: shorter ones, such as "Dr.", belong to the next one."""
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
    speaker_embedding: Annotated[
        list[float] | None, honoured("an x-vector of the voice, which SpeechT5 needs; others take none")
    ] = None
    instructions: Annotated[Any, refused("expected none; the model takes no instructions", "")] = None
    stream_format: Annotated[
        Literal["audio", "sse"] | None,
        honoured("`audio`: the sound as it comes, sentence by sentence, if its form can be cut; `sse`: in events"),
    ] = None
    stream: Annotated[
        bool | None, honoured("with `pcm`, `wav` and `opus`: each sentence is sent when it is spoken")
    ] = None
    user: Annotated[str | None, no_effect("who asks is told by the API key")] = None


async def speech(request: Request) -> Response:
    """Returns a text as speech."""
    service, body = await read_for_model(request, SpeechRequest, "speak")
    service.settle_name(body, request.state.key)
    model: Any = service.model
    check_text_size(body.input, context_of(request).options.request, "input")
    if body.speed is not None and not 0.25 <= body.speed <= 4:
        raise bad_request(f"speed: expected a number from 0.25 to 4, got {body.speed}", "speed", "invalid_value")
    form, as_events = body.response_format or "mp3", body.stream_format == "sse"
    is_streamed = bool(body.stream) or as_events or (body.stream_format == "audio" and form in _STREAMED)
    if is_streamed and form not in _STREAMED:
        raise bad_request(
            f"response_format: expected {', '.join(_STREAMED)} with a stream, got {form}",
            "response_format",
            "invalid_value",
        )
    own = float(getattr(model.config, "speaking_rate", None) or 0.0)
    if body.speed not in (None, 1) and not own:
        raise bad_request(f"speed: expected 1 for {service.name}, which has one rate, got {body.speed}", "speed")
    options: dict[str, Any] = {
        "speaker": _speaker(body.voice, model.num_speakers),
        "seed": body.seed,
        "speaking_rate": None if body.speed in (None, 1) else body.speed * own,
        "speaker_embedding": body.speaker_embedding,
    }
    kind, _, _ = _TYPES[form]
    if is_streamed:
        return await _streamed(request, service, sentences(body.input), form, options, as_events=as_events)
    spoken = await results(request, model.aspeak, body.input, **options)
    data, rate = await service.run(_encoded, spoken.samples, spoken.sampling_rate, form)
    return Response(data, media_type=kind, headers={"X-Sample-Rate": str(rate)})


async def _streamed(
    request: Request,
    service: ModelService,
    texts: Sequence[str],
    form: str,
    options: Mapping[str, Any],
    *,
    as_events: bool,
) -> Any:
    """Returns the answer that sends each text when it is spoken.

    An error of the first is one of the request.
    """
    model: Any = service.model
    first = await results(request, model.aspeak, texts[0], **options)
    writer = _StreamWriter(form, first.sampling_rate)
    limits = context_of(request).options

    async def sounds() -> AsyncGenerator[bytes]:
        yield await service.run(writer.write, first.samples)
        for text in texts[1:]:
            timeouts = {"timeout_s": limits.request_timeout_s, "queue_timeout_s": limits.queue_timeout_s}
            spoken = await model.aspeak(text, **timeouts, **options)
            yield await service.run(writer.write, spoken.samples)
        if rest := writer.close():
            yield rest

    async def events() -> AsyncGenerator[bytes]:
        async with contextlib.aclosing(sounds()) as pieces:
            async for piece in pieces:
                yield event({"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()})
        num_tokens = sum(len(model.tokenizer(text)["input_ids"]) for text in texts)
        usage = {"input_tokens": num_tokens, "output_tokens": 0, "total_tokens": num_tokens}
        yield event({"type": "speech.audio.done", "usage": usage})

    headers = [(b"x-sample-rate", str(writer.rate).encode())]
    if as_events:
        return EventStream(events(), limits.keep_alive_s, headers=headers)
    return EventStream(sounds(), 0, None, _cut, _TYPES[form][0].encode(), headers)


def sentences(text: str) -> list[str]:
    """Returns the sentences of a text, short ones together with the next."""
    found, begun = [], ""
    for part in _SENTENCE_END.split(text):
        begun = f"{begun} {part}".strip()
        if len(begun) >= _MIN_CHARS:
            found.append(begun)
            begun = ""
    if begun and found:
        found[-1] = f"{found[-1]} {begun}"
    elif not found:
        found.append(text)
    return found


def _cut(error: ApiError) -> bytes:
    """Raises an error in the middle of a file, which the end of the connection shows."""
    raise error


class _StreamWriter:
    """Writes a file of sound piece by piece.

    Args:
        form: Of `_STREAMED`.
        rate: Of the samples (Hz).

    Attributes:
        rate: Of the file.
    """

    def __init__(self, form: str, rate: int) -> None:
        self._form, self._own_rate = form, rate
        self.rate = _opus_rate(rate) if form == "opus" else rate
        self._buffer, self._num_sent = io.BytesIO(), 0
        self._file: Any = None
        if form == "wav":
            head = struct.pack(
                "<4sI4s4sIHHIIHH", b"RIFF", _UNKNOWN_LEN, b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16
            )
            self._buffer.write(head + struct.pack("<4sI", b"data", _UNKNOWN_LEN))
        elif form == "opus":
            require_packages("soundfile")
            import soundfile

            _, kind, subtype = _TYPES[form]
            self._file = soundfile.SoundFile(self._buffer, "w", self.rate, 1, subtype, format=kind)

    def write(self, samples: np.ndarray) -> bytes:
        """Returns the bytes that samples add."""
        if self._file is None:
            self._buffer.write(_encoded(samples, self.rate, "pcm")[0])
        else:
            samples = samples if self.rate == self._own_rate else resampled(samples, self._own_rate, self.rate)
            self._file.write(np.clip(samples, -1, 1))
            self._file.flush()
        return self._taken()

    def close(self) -> bytes:
        """Returns the bytes of the end."""
        if self._file is not None:
            self._file.close()
        return self._taken()

    def _taken(self) -> bytes:
        found = self._buffer.getvalue()[self._num_sent :]
        self._num_sent += len(found)
        return found


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


def _opus_rate(rate: int) -> int:
    return next((each for each in _OPUS_RATES if each >= rate), _OPUS_RATES[-1])


def _encoded(samples: np.ndarray, rate: int, form: str) -> tuple[bytes, int]:
    """Returns a file of samples, and their rate in it (Hz)."""
    if form == "pcm":
        return (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes(), rate
    require_packages("soundfile")
    import soundfile

    if form == "opus" and (wanted := _opus_rate(rate)) != rate:
        samples, rate = resampled(samples, rate, wanted), wanted
    _, kind, subtype = _TYPES[form]
    file = io.BytesIO()
    soundfile.write(file, np.clip(samples, -1, 1), rate, format=kind, subtype=subtype)
    return file.getvalue(), rate
