"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.multimodal.audio import resampled
from torchax_serve.outputs import Transcript
from torchax_serve.server import transcripts
from torchax_serve.server.audio_files import decode_audio
from torchax_serve.server.body import check_scalars
from torchax_serve.server.context import ServerContext, context_of
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.forms import read_form
from torchax_serve.server.request_fields import ApiRequest, ModelName, honoured, no_effect, refused
from torchax_serve.server.sse import EventStream, until_disconnect

if TYPE_CHECKING:
    from torchax_serve.entrypoints.speech_model import SpeechModel  # imports torch, which a recorded start needs not

TIMED_FORMATS = ("verbose_json", "srt", "vtt")
_NUMBERS = frozenset({"temperature"})
_FLAGS = frozenset({"stream"})
_SPEAKERS = frozenset({"known_speaker_names", "known_speaker_references"})
_LISTS = frozenset({"include", "timestamp_granularities", "languages", "keywords"}) | _SPEAKERS


class TranscriptionRequest(ApiRequest):
    """Fields of ``/v1/audio/transcriptions``, besides the file."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/audio/transcriptions", "/v1/audio/translations")
    file: Annotated[Any, honoured("wav, flac, ogg or mp3, bounded in bytes and seconds")] = None
    model: Annotated[ModelName, honoured("a name in `/v1/models`, another one is 404; without it, the served one")] = ""
    language: Annotated[str | None, honoured("of the audio, as the model names it")] = None
    response_format: Annotated[
        Literal["json", "text", "verbose_json", "srt", "vtt"] | None,
        honoured("`json`, `text`; of models that write times also `verbose_json`, `srt`, `vtt`"),
    ] = None
    temperature: Annotated[float | None, honoured("0, by default, is greedy")] = None
    prompt: Annotated[Any, refused("expected none; the model is given no text in front", "")] = None
    stream: Annotated[bool | None, honoured("`transcript.text.delta` events; with `json` only")] = None
    timestamp_granularities: Annotated[
        list[Literal["segment", "word"]] | None,
        honoured("what has times in `verbose_json`; words need `alignment_heads` in the generation config"),
    ] = None
    include: Annotated[Any, refused("expected none; transcripts have no log-probabilities", [])] = None
    chunking_strategy: Annotated[str | None, no_effect("long audio is cut as the model does it")] = None
    languages: Annotated[Any, refused("expected none; write language", [])] = None
    keywords: Annotated[Any, refused("expected none", [])] = None
    user: Annotated[str | None, no_effect("who asks is told by the API key")] = None
    known_speaker_names: Annotated[Any, refused("expected none; speakers are not told apart", [])] = None
    known_speaker_references: Annotated[Any, refused("expected none; speakers are not told apart", [])] = None
    hotwords: Annotated[Any, refused("expected none; the model is given no text in front", "")] = None
    to_language: Annotated[Any, refused("expected none; /v1/audio/translations writes English", "")] = None
    stream_include_usage: Annotated[Any, refused("expected false; streams have no usage", "false")] = None
    stream_continuous_usage_stats: Annotated[Any, refused("expected false; streams have no usage", "false")] = None
    max_completion_tokens: Annotated[Any, refused("expected none; a window ends where the model ends it")] = None
    seed: Annotated[Any, refused("expected none; sampling has no seed here")] = None
    top_p: Annotated[Any, refused("expected 1; temperature is taken", "1", "1.0")] = None
    top_k: Annotated[Any, refused("expected 0; temperature is taken", "0", "-1")] = None
    min_p: Annotated[Any, refused("expected 0; temperature is taken", "0", "0.0")] = None
    repetition_penalty: Annotated[Any, refused("expected 1", "1", "1.0")] = None
    frequency_penalty: Annotated[Any, refused("expected 0", "0", "0.0")] = None
    presence_penalty: Annotated[Any, refused("expected 0", "0", "0.0")] = None
    use_beam_search: Annotated[Any, refused("expected false; transcripts have no beam search", "false")] = None
    n: Annotated[Any, refused("expected 1; transcripts have no beam search", "1")] = None
    length_penalty: Annotated[Any, refused("expected 1; transcripts have no beam search", "1", "1.0")] = None
    vllm_xargs: Annotated[Any, refused("expected none; there are no extensions", "{}")] = None

    @property
    def granularities(self) -> tuple[str, ...]:
        """What has times: ``segment`` by default."""
        return tuple(self.timestamp_granularities or ("segment",))


async def transcriptions(request: Request) -> Any:
    """Returns the words in an audio file."""
    return await _answer(request, "transcribe")


async def translations(request: Request) -> Any:
    """Returns the words in an audio file in English."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: str) -> Any:
    context = context_of(request)
    only = context.only_service()
    if only is not None:
        only.require("transcribe", request.scope["path"])
    fields, data = await _read_form(request, context)
    body = TranscriptionRequest.parse(fields)
    service = only or await context.take(request, body.model)
    service.require("transcribe", request.scope["path"])
    service.settle_name(body, request.state.key)
    assert service.model.transcribes
    model = cast("SpeechModel", service.model)
    options = _options(model, body, task) | _limits(context)
    _check_form(model, body)
    try:
        work = service.run(_samples, model, data, context.options.request.max_audio_s)
        samples, rate, duration_s = await until_disconnect(request.receive, work)
        options["sampling_rate"] = rate
        if body.stream:
            pieces = transcripts.events(model.astream_transcript(samples, **options))
            return EventStream(pieces, context.options.keep_alive_s)
        if body.response_format in TIMED_FORMATS:
            timed = model.atranscribe_with_times(samples, words="word" in body.granularities, **options)
            return _timed_answer(body, await until_disconnect(request.receive, timed), task)
        text = await until_disconnect(request.receive, model.atranscribe(samples, **options))
    except InvalidArgumentError as error:
        raise bad_request(str(error), "file", "invalid_value") from error
    if body.response_format == "text":
        return PlainTextResponse(f"{text}\n")
    return JSONResponse({"text": text, "usage": transcripts.usage_of(duration_s)})


def _timed_answer(body: TranscriptionRequest, transcript: Transcript, task: str) -> Response:
    if body.response_format == "srt":
        return PlainTextResponse(transcripts.srt(transcript))
    if body.response_format == "vtt":
        return PlainTextResponse(transcripts.vtt(transcript), media_type="text/vtt")
    temperature = body.temperature or 0.0
    return JSONResponse(transcripts.verbose_json(transcript, body.granularities, task=task, temperature=temperature))


def _limits(context: ServerContext) -> dict[str, Any]:
    return {"timeout_s": context.options.request_timeout_s, "queue_timeout_s": context.options.queue_timeout_s}


def _check_form(model: SpeechModel, body: TranscriptionRequest) -> None:
    """Checks that a model can answer in the form of a request.

    Raises:
        ApiError: 400.
    """
    if body.stream and body.response_format not in (None, "json"):
        message = f"stream: expected false with response_format {body.response_format}, got true; events are JSON"
        raise bad_request(message, "stream", "invalid_value")
    if body.timestamp_granularities and body.response_format != "verbose_json":
        name = "timestamp_granularities"
        raise bad_request(f"{name}: expected response_format verbose_json with it, got another", name, "invalid_value")
    if body.response_format in TIMED_FORMATS:
        from torchax_serve.generation.transcript_times import check_times  # imports torch

        has_words = "word" in body.granularities
        try:
            check_times(model.torch_model, model.tokenizer, words=has_words)
        except UnsupportedModelError as error:
            name = "timestamp_granularities" if has_words else "response_format"
            raise bad_request(f"{name}: {error}", name, "unsupported_parameter") from error


async def _read_form(request: Request, context: ServerContext) -> tuple[dict[str, Any], bytes]:
    """Returns the fields of a form, and the bytes of its file."""
    given, data = await read_form(request, context.options.connection, "file")
    fields: dict[str, Any] = {}
    for name, value in given:
        if name.removesuffix("[]") in _LISTS:
            fields.setdefault(name.removesuffix("[]"), []).append(value)
        else:
            fields[name] = _number(name, value) if name in _NUMBERS else _flag(value) if name in _FLAGS else value
    check_scalars(fields)
    if not data:
        raise bad_request("file: expected an audio file, got none", "file", "missing_required_parameter")
    return fields, data


def _flag(text: str) -> bool | str:
    """Returns a truth value, or the text where it is none."""
    return {"true": True, "false": False}.get(text.strip().lower(), text)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise bad_request(f"{name}: expected a number, got {text[:60]!r}", name, "invalid_value") from error


def _samples(model: SpeechModel, data: bytes, max_s: float) -> tuple[np.ndarray, int, float]:
    """Returns samples at the model's rate, float32[num_samples], the rate, and seconds."""
    samples, rate = decode_audio(data, max_s)
    wanted = getattr(model.feature_extractor, "sampling_rate", rate)
    return resampled(samples, rate, wanted), wanted, len(samples) / rate


def _options(model: SpeechModel, body: TranscriptionRequest, task: str) -> dict[str, Any]:
    """Returns the options of `SpeechModel.transcribe`."""
    options: dict[str, Any] = {}
    is_multilingual = bool(getattr(model.generation_config, "is_multilingual", False))
    if task == "translate" and not is_multilingual:
        raise ApiError(404, "/v1/audio/translations: expected a model of several languages, got one that is not")
    if is_multilingual:
        options["task"] = task
    if body.language:
        if not is_multilingual:
            raise bad_request("language: expected none, the model has one only", "language", "unsupported_parameter")
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        code = TO_LANGUAGE_CODE.get(body.language.lower(), body.language.lower())
        if f"<|{code}|>" not in getattr(model.generation_config, "lang_to_id", {f"<|{code}|>": 0}):
            message = f"language: expected one of the model's, such as en, got {body.language[:40]!r}"
            raise bad_request(message, "language", "invalid_value")
        options["language"] = code
    if body.temperature:
        if not 0 < body.temperature <= 1:
            raise bad_request(
                f"temperature: expected a number from 0 to 1, got {body.temperature}", "temperature", "invalid_value"
            )
        options |= {"do_sample": True, "temperature": body.temperature}
    return options
