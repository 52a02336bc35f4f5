"""Images and sound in place of texts: bodies of ``/classify`` and ``/v1/embeddings``."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve.server.context import context_of
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.messages import plain_messages
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.remote_files import with_remote_files
from torchax_serve.server.sse import until_disconnect

if TYPE_CHECKING:  # it imports torch, which a recorded start needs not
    from torchax_serve.tasks.results import ScoredLabel

PLACEHOLDER = "<__media__>"
"""llama.cpp's word for the file in a text."""
_FORMS = '{"type": "image_url", ...}, {"content": [...]} or {"prompt_string": ..., "multimodal_data": [...]}'
_SOUND = (b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"\xff\xf3")
"""First bytes of files of sound; those of wav are ``RIFF``, as are webp's."""


def are_objects(given: Any) -> bool:
    """Returns whether a field has objects in place of texts."""
    return isinstance(given, dict) or (isinstance(given, list) and bool(given) and isinstance(given[0], dict))


def refuse_objects(given: Any, field: str, name: str) -> None:
    """Raises ApiError, 400, for objects in a field of a model of texts."""
    if are_objects(given):
        raise bad_request(
            f"{field}: expected texts for {name}, which reads no files, got objects", field, "invalid_value"
        )


async def files_of(request: Request, service: ModelService, given: Any, kind: str, field: str = "input") -> list[Any]:
    """Returns the images (PIL) or samples (float32[num_samples]) of a field.

    Args:
        request: Of the client.
        service: The model.
        given: The field's value.
        kind: ``image`` or ``audio``.
        field: Its name, for errors.

    Raises:
        ApiError: 400 for texts, for files of another kind, and for those that cannot be read.
    """
    messages = _as_messages(given, field)
    most = context_of(request).options.request.max_texts
    if len(messages) > most:
        raise bad_request(f"{field}: expected 1 to {most} files, got {len(messages)}", field, "invalid_value")
    model: Any = service.model
    rate = model.sampling_rate if kind == "audio" else None
    try:
        messages = await with_remote_files(messages, context_of(request).options.media_hosts)
        read = await service.run(plain_messages, messages, "", rate)
    except ApiError as error:
        message = error.message
        for index in range(len(messages)):
            message = message.replace(f"messages[{index}].content[0]", f"{field}[{index}]")
        raise bad_request(message.replace("messages", field), field, "invalid_value") from error
    parts = [message["content"][0] for message in read]
    if wrong := next((part["type"] for part in parts if part["type"] != kind), None):
        raise bad_request(f"{field}: expected files of type {kind}, got {wrong}", field, "invalid_value")
    return [part[kind] for part in parts]


async def labels_of(
    request: Request, service: ModelService, given: Any, labels: Sequence[str] | None
) -> list[list[ScoredLabel]]:
    """Returns all labels of each file, the best first."""
    model: Any = service.model
    if "classify_images" in model.methods:
        files = await files_of(request, service, given, "image")
        return await results(request, model.aclassify_images, files, labels=labels, top_k=None)
    if labels is not None:
        raise bad_request("labels: expected none for a model of sound, got some", "labels", "unsupported_parameter")
    files = await files_of(request, service, given, "audio")
    return await results(request, model.aclassify_audio, files, sampling_rate=model.sampling_rate, top_k=None)


async def results(
    request: Request, call: Any, items: Any, *, timeout_s: float | None = None, field: str = "input", **options: Any
) -> Any:
    """Returns what a method of the model returns, within the limits of the server.

    `timeout_s` is a further one of the request, whose items are in `field`.

    Raises:
        ApiError: 400 for what the method refuses.
    """
    limits = context_of(request).options
    most = [each for each in (timeout_s, limits.request_timeout_s) if each is not None]
    work = call(items, timeout_s=min(most, default=None), queue_timeout_s=limits.queue_timeout_s, **options)
    try:
        return await until_disconnect(request.receive, work)
    except (InvalidArgumentError, UnsupportedModelError) as error:
        name = str(error).partition(":")[0]
        known = name if name.isidentifier() and len(name) < 20 and name not in ("images", "audio", "queries") else field
        raise bad_request(str(error), known, "invalid_value") from error


def _as_messages(given: Any, field: str) -> list[dict[str, Any]]:
    """Returns the objects of a field, each as a message whose content is one part with a file."""
    if not are_objects(given):
        raise bad_request(f"{field}: expected files, as {_FORMS}, got texts or token ids", field, "invalid_value")
    objects = [given] if isinstance(given, dict) else given
    return [{"role": "user", "content": [_part(each, field, f"{field}[{i}]")]} for i, each in enumerate(objects)]


def _part(given: Any, field: str, where: str) -> dict[str, Any]:
    if isinstance(given, Mapping) and "multimodal_data" in given:
        data, text = given["multimodal_data"], given.get("prompt_string", PLACEHOLDER)
        if not isinstance(data, list) or len(data) != 1 or not isinstance(data[0], str) or text != PLACEHOLDER:
            raise bad_request(
                f'{where}: expected one file in multimodal_data, and prompt_string "{PLACEHOLDER}", got something else',
                field,
                "invalid_value",
            )
        return _of_bytes(data[0], field, where)
    content = given.get("content", [given]) if isinstance(given, Mapping) else None
    if not isinstance(content, list) or len(content) != 1 or not isinstance(content[0], dict):
        raise bad_request(f"{where}: expected one part with a file, as {_FORMS}, got others", field, "invalid_value")
    return dict(content[0])


def _of_bytes(data: str, field: str, where: str) -> dict[str, Any]:
    """Returns the part of a file in base64, whose kind its first bytes say."""
    try:
        begin = base64.b64decode(data[:16], validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"{where}: expected base64, got something else", field, "invalid_value") from error
    if begin.startswith(_SOUND) or (begin.startswith(b"RIFF") and begin[8:12] == b"WAVE"):
        return {"type": "input_audio", "input_audio": {"data": data}}
    return {"type": "image_url", "image_url": {"url": f"data:application/octet-stream;base64,{data}"}}
