"""Messages of OpenAI's chats in the form that the text layer takes."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_serve.multimodal.audio import resampled
from torchax_serve.server.audio_files import decode_audio
from torchax_serve.server.call_arguments import input_of
from torchax_serve.server.errors import bad_request
from torchax_serve.server.image_files import decode_image
from torchax_serve.server.notes import note_once
from torchax_serve.server.video_files import MAX_FRAMES, check_pixels, decode_animation
from torchax_serve.validation.argument_checks import short_repr

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REPLAYED = frozenset({"refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content", "id"})
"""Keys of answers that clients send back and that say nothing to a model."""
_FRAMES = "data:video/jpeg;base64,"
"""Begin of a URL with frames of a video, each a file in base64, separated by commas (vLLM)."""
_OWN_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id"})
_READ_BY_TEMPLATES = ("reasoning_content", "reasoning")


def plain_messages(
    messages: Sequence[Mapping[str, Any]],
    template: str,
    audio_rate: int | None = None,
    *,
    reads_names: bool = False,
) -> list[dict[str, Any]]:
    """Returns the messages of a chat request for `torchax_serve.text.chat`.

    The role ``developer`` becomes ``system`` unless the template names it; parts of all spellings become ``text``,
    ``image``, ``video`` and ``audio``; keys that the template does not read are left out; arguments of replayed tool
    calls that are not JSON stay text or, for templates that read their names, become what is complete of them.

    Args:
        messages: Of the request.
        template: Source of the model's chat template.
        audio_rate: Sampling rate of the model in Hz; None as in the files.
        reads_names: Whether the template writes the arguments of calls one by one.

    Raises:
        ApiError: 400 for something that is no message.
    """
    found = [_message(f"messages[{index}]", message, template, audio_rate) for index, message in enumerate(messages)]
    for message in found:
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_call(call, reads_names=reads_names) for call in message["tool_calls"]]
    return found


def _message(where: str, message: Mapping[str, Any], template: str, audio_rate: int | None) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise bad_request(f"{where}.role: expected a string, got {short_repr(role)}", f"{where}.role", "invalid_value")
    found = {key: value for key, value in message.items() if _is_shown(key, value, role, template)}
    content = found.get("content", None if role == "assistant" else "")  # which clients leave out of empty answers
    if content is None and not message.get("tool_calls"):
        found["content"] = ""
    if role == "developer" and "developer" not in template:
        found["role"] = "system"
    if role == "function":
        found["role"] = "tool"
    if isinstance(message.get("content"), list):
        found["content"] = [
            _part(f"{where}.content[{index}]", part, audio_rate) for index, part in enumerate(message["content"])
        ]
    return found


def _is_shown(key: str, value: Any, role: str, template: str) -> bool:
    """Returns whether the template gets a key of a message; others cannot change the prompt."""
    if key in _REPLAYED:
        return key in _READ_BY_TEMPLATES and key in template
    is_own = key in _OWN_KEYS or (key == "name" and role in ("tool", "function"))
    if is_own or value is None or re.search(rf"\b{re.escape(key)}\b", template):
        return True
    note_once(f"messages: the key {short_repr(key)} is not read by the chat template, and changes no answer")
    return False


def _part(where: str, part: Any, audio_rate: int | None) -> dict[str, Any]:
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
        return {"type": "image", "image": decode_image(_data_of(where, _url_of(url)), where)}
    if kind in ("input_audio", "audio_url"):
        samples, rate = decode_audio(_audio_bytes(where, part), where=where)
        wanted = audio_rate or rate
        return {"type": "audio", "audio": resampled(samples, rate, wanted), "sampling_rate": wanted}
    if kind == "video_url":
        frames, fps = _video(where, _url_of(part.get("video_url")))
        return {"type": "video", "video": frames, "fps": fps}
    raise bad_request(
        f"{where}.type: expected text, image_url, input_audio or video_url, got {short_repr(kind)}",
        where,
        "invalid_value",
    )


def _video(where: str, url: Any) -> tuple[list[Any], float | None]:
    """Returns frames of a video as PIL images, and how many there are for each second.

    None where the URL does not say it.
    """
    if not isinstance(url, str) or not url.startswith(_FRAMES):
        return decode_animation(_data_of(where, url), where)
    files = url.removeprefix(_FRAMES).split(",")
    if len(files) > MAX_FRAMES:
        raise bad_request(f"{where}: expected at most {MAX_FRAMES} frames, got {len(files)}", where, "invalid_value")
    frames = []
    for file in files:
        frames.append(decode_image(_decoded(where, file), where))
        check_pixels(frames[-1].size, len(files), where)
    return frames, None


def _audio_bytes(where: str, part: Mapping[str, Any]) -> bytes:
    inner = part.get("input_audio") or part.get("audio_url")
    if isinstance(inner, dict) and isinstance(inner.get("data"), str):
        return _decoded(where, inner["data"])
    return _data_of(where, _url_of(inner))


def _url_of(value: Any) -> Any:
    return value.get("url") if isinstance(value, dict) else value


def _data_of(where: str, url: Any) -> bytes:
    """Returns the bytes of a data URL; others are refused: those that may be fetched have been."""
    if isinstance(url, str) and url.startswith("data:"):
        head, comma, data = url.partition(",")
        if comma and head.endswith(";base64"):
            return _decoded(where, data)
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


def _call(call: Any, *, reads_names: bool) -> Any:
    """Returns a tool call whose arguments are JSON.

    Text that is none, as models write it, becomes a JSON string; with `reads_names` all arguments become an object.
    Arguments that are missing or null are none.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str | None):
        return call
    arguments = function.get("arguments") or "{}"
    try:
        is_read = isinstance(json.loads(arguments), dict) or not reads_names
    except (ValueError, RecursionError):
        is_read = False
    if not is_read:
        note_once("messages: arguments of a call that are no JSON object are shown to the model in another form")
        arguments = json.dumps(input_of(arguments) if reads_names else arguments)
    return {**call, "function": {**function, "arguments": arguments}}
