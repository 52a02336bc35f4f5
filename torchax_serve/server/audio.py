"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from model_adapters.errors import InvalidArgumentError
from torchax_serve.server.audio_files import decode_audio, resampled
from torchax_serve.server.body import check_scalars
from torchax_serve.server.context import ServerContext, context_of
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.request_fields import ApiRequest, honoured, no_effect, refused
from torchax_serve.server.sse import until_disconnect

if TYPE_CHECKING:
    from torchax_serve.entrypoints.speech_model import SpeechModel  # imports torch, which a recorded start needs not

MAX_FIELDS = 32
MAX_FIELD_BYTES = 65536
_NUMBERS = frozenset({"temperature"})
_LISTS = frozenset({"include", "timestamp_granularities", "languages", "keywords"})


class TranscriptionRequest(ApiRequest):
    """Fields of ``/v1/audio/transcriptions``, besides the file."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/audio/transcriptions", "/v1/audio/translations")
    file: Annotated[Any, honoured("wav, flac, ogg or mp3, bounded in bytes and seconds")] = None
    model: Annotated[str, honoured("a name in `/v1/models`; another one is 404")]
    language: Annotated[str | None, honoured("of the audio, as the model names it")] = None
    response_format: Annotated[Literal["json", "text"] | None, honoured("`json` or `text`")] = None
    temperature: Annotated[float | None, honoured("0, by default, is greedy")] = None
    prompt: Annotated[Any, refused("expected none; the model is given no text in front", "")] = None
    stream: Annotated[Any, refused("expected false; transcripts come at once", "false", "False")] = None
    timestamp_granularities: Annotated[Any, refused("expected none; transcripts have no times", [])] = None
    include: Annotated[Any, refused("expected none; transcripts have no log-probabilities", [])] = None
    chunking_strategy: Annotated[str | None, no_effect("long audio is cut as the model does it")] = None
    languages: Annotated[Any, refused("expected none; write language", [])] = None
    keywords: Annotated[Any, refused("expected none", [])] = None
    user: Annotated[str | None, no_effect("who asks is told by the API key")] = None


async def transcriptions(request: Request) -> Response:
    """Returns the words in an audio file."""
    return await _answer(request, "transcribe")


async def translations(request: Request) -> Response:
    """Returns the words in an audio file in English."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: str) -> Response:
    context = context_of(request)
    service = context.service()
    service.require("transcribe", request.scope["path"])
    fields, data = await _read_form(request, context)
    body = TranscriptionRequest.parse(fields)
    service.check_name(body.model, request.state.key)
    try:
        work = service.run(_transcribe, context, service, body, data, task)
        text, seconds = await until_disconnect(request.receive, work)
    except InvalidArgumentError as error:
        raise bad_request(str(error), "file", "invalid_value") from error
    if body.response_format == "text":
        return PlainTextResponse(text + "\n")
    return JSONResponse({"text": text, "usage": {"type": "duration", "seconds": max(1, round(seconds))}})


async def _read_form(request: Request, context: ServerContext) -> tuple[dict[str, Any], bytes]:
    """Returns the fields of a form, and the bytes of its file."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise ApiError(415, "expected the header Content-Type: multipart/form-data, got another")
    limits = context.options.connection
    parser = MultiPartParser(
        request.headers, request.stream(), max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES
    )
    parser.spool_max_size = limits.max_body_bytes  # in memory: nothing is written to disk
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            form = await parser.parse()
    except TimeoutError as error:
        raise ApiError(408, f"expected the body within {limits.body_timeout_s:g} s; send it at once") from error
    except (MultiPartException, KeyError, ValueError) as error:
        raise bad_request("expected a form of multipart/form-data with a file, got something else") from error
    try:
        fields, data = await _fields_of(form)
    finally:
        await form.close()
    check_scalars(fields)
    if not data:
        raise bad_request("file: expected an audio file, got none", "file", "missing_required_parameter")
    return fields, data


async def _fields_of(form: FormData) -> tuple[dict[str, Any], bytes | None]:
    """Returns the fields of a parsed form, and the bytes of its file if there is one."""
    data: bytes | None = None
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name != "file":
                raise bad_request(f"expected the file as field file, got {name[:60]!r}", "file", "invalid_value")
            data = await value.read()
        elif name.removesuffix("[]") in _LISTS:
            fields.setdefault(name.removesuffix("[]"), []).append(value)
        else:
            fields[name] = _number(name, value) if name in _NUMBERS else value
    return fields, data


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise bad_request(f"{name}: expected a number, got {text[:60]!r}", name, "invalid_value") from error


def _transcribe(
    context: ServerContext, service: ModelService, body: TranscriptionRequest, data: bytes, task: str
) -> tuple[str, float]:
    """Returns the transcript, and the seconds of the audio."""
    assert service.model.transcribes
    model = cast("SpeechModel", service.model)
    samples, rate = decode_audio(data, context.options.request.max_audio_s)
    wanted = getattr(model.feature_extractor, "sampling_rate", rate)
    text = model.transcribe(resampled(samples, rate, wanted), sampling_rate=wanted, **_options(model, body, task))
    assert isinstance(text, str)
    return text, len(samples) / rate


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
        options["language"] = body.language
    if body.temperature:
        if not 0 < body.temperature <= 1:
            raise bad_request(
                f"temperature: expected a number from 0 to 1, got {body.temperature}", "temperature", "invalid_value"
            )
        options |= {"do_sample": True, "temperature": body.temperature}
    return options
