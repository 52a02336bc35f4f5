"""Messages of OpenAI's chats in the form that the text layer takes."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_serve.server.errors import bad_request
from torchax_serve.validation.argument_checks import short_repr

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REPLAYED = frozenset({"refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content", "id"})
"""Keys of answers that clients send back and that say nothing to a model."""
_READ_BY_TEMPLATES = ("reasoning_content", "reasoning")


def plain_messages(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Returns the messages of a chat request for `torchax_serve.text.chat`.

    The role ``developer`` becomes ``system`` unless the template names it; parts of all spellings become ``text``,
    ``image`` and ``audio``; arguments of replayed tool calls that are not JSON stay text.

    Args:
        messages: Of the request.
        template: Source of the model's chat template.

    Raises:
        ApiError: 400 for something that is no message.
    """
    return [_message(f"messages[{index}]", message, template) for index, message in enumerate(messages)]


def _message(where: str, message: Mapping[str, Any], template: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise bad_request(f"{where}.role: expected a string, got {short_repr(role)}", f"{where}.role", "invalid_value")
    found = {
        key: value
        for key, value in message.items()
        if key not in _REPLAYED or (key in _READ_BY_TEMPLATES and key in template)
    }
    if role == "developer" and "developer" not in template:
        found["role"] = "system"
    if role == "function":
        found["role"] = "tool"
    if isinstance(message.get("content"), list):
        found["content"] = [_part(f"{where}.content[{index}]", part) for index, part in enumerate(message["content"])]
    if isinstance(message.get("tool_calls"), list):
        found["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return found


def _part(where: str, part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_PARTS:
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise bad_request(f"{where}.text: expected a string, got {short_repr(text)}", where, "invalid_value")
        return {"type": "text", "text": text}
    if kind in ("image_url", "input_image"):
        url = part.get("image_url")
        return {"type": "image", "base64": _data_of(where, url.get("url") if isinstance(url, dict) else url)}
    if kind in ("input_audio", "audio_url"):
        from torchax_serve.server.audio_files import decode_audio

        samples, rate = decode_audio(_audio_bytes(where, part))
        return {"type": "audio", "audio": samples, "sampling_rate": rate}
    raise bad_request(
        f"{where}.type: expected text, image_url or input_audio, got {short_repr(kind)}", where, "invalid_value"
    )


def _audio_bytes(where: str, part: Mapping[str, Any]) -> bytes:
    inner = part.get("input_audio") or part.get("audio_url")
    if isinstance(inner, dict) and isinstance(inner.get("data"), str):
        return _decoded(where, inner["data"])
    return _decoded(where, _data_of(where, inner.get("url") if isinstance(inner, dict) else inner))


def _data_of(where: str, url: Any) -> str:
    """Returns the base64 text of a data URL; others are refused, so that a request makes no connection."""
    if isinstance(url, str) and url.startswith("data:"):
        head, comma, data = url.partition(",")
        if comma and head.endswith(";base64"):
            _decoded(where, data)
            return data
    raise bad_request(
        f"{where}: expected a URL data:...;base64,..., got {short_repr(url)}; remote files are not fetched",
        where,
        "invalid_value",
    )


def _decoded(where: str, data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"{where}: expected base64, got something else", where, "invalid_value") from error


def _call(call: Any) -> Any:
    """Returns a tool call whose arguments are JSON; text that is none, as models write it, becomes a JSON string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = function["arguments"]
    try:
        json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        arguments = json.dumps(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
