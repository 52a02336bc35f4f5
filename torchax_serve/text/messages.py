"""Checks the messages of a conversation and converts them to JSON values for chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.validation.argument_checks import MAX_PROMPT_CHARS, check_text, is_list, short_repr

Message = Mapping[str, Any]
"""``{"role": "system" | "user" | "assistant" | "tool" | …, "content": …}``, as in transformers."""

MAX_MESSAGES = 100_000
_MAX_DEPTH = 64  # of lists and dicts in each other
_MEDIA_KEYS: Mapping[str, frozenset[str]] = {
    "image": frozenset({"image", "url", "path", "base64"}),
    "audio": frozenset({"audio", "url", "path", "base64", "sampling_rate"}),
    "video": frozenset({"video", "fps"}),
}
_INSTEAD: Mapping[str, str] = {
    "image_url": 'write {"type": "image", "url": ...}',
    "input_image": 'write {"type": "image", "url": ...}',
    "input_audio": 'write {"type": "audio", "audio": samples, "sampling_rate": ...}',
    "audio_url": 'write {"type": "audio", "url": ...}',
    "input_text": 'write {"type": "text", "text": ...}',
    "output_text": 'write {"type": "text", "text": ...}',
    "video_url": 'write {"type": "video", "video": frames, "fps": ...}',
    "tool_result": 'write a message {"role": "tool", "content": ...}',
    "tool_use": 'write {"role": "assistant", "tool_calls": [...]}',
}


def has_media(messages: Any) -> bool:
    """Returns whether a message of a conversation has an image, a video or audio."""
    return not isinstance(messages, str) and next(media_parts(messages), None) is not None


def media_parts(messages: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the image, video and audio parts of a conversation."""
    for message in messages if isinstance(messages, Sequence) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, (list, tuple)) else ()
        yield from (part for part in parts if isinstance(part, Mapping) and part.get("type") in _MEDIA_KEYS)


def checked_conversation(messages: str | Sequence[Message], system: str | None) -> list[dict[str, Any]]:
    """Returns the messages as dicts of JSON values, with `system` as the first message.

    Images and audio are unchanged. Keys whose value is None or empty are left out, and arguments of tool calls that are
    JSON text are parsed.

    Raises:
        InvalidArgumentError: no message, something else than a message, text that is not Unicode, or a second system
            prompt.
        UnsupportedArgumentError: a content part of an unsupported kind or with an unknown key.
    """
    if isinstance(messages, str):
        if not messages:
            raise InvalidArgumentError("messages: expected some text, got an empty string")
        messages = [{"role": "user", "content": messages}]
    if not is_list(messages) or not messages:
        raise InvalidArgumentError(
            f"messages: expected a string or a non-empty list of messages, got {short_repr(messages)}"
        )
    if len(messages) > MAX_MESSAGES:
        raise InvalidArgumentError(f"messages: expected at most {MAX_MESSAGES}, got {len(messages)}; drop old ones")
    conversation = [_checked_message(f"messages[{index}]", message) for index, message in enumerate(messages)]
    if system is None:
        return conversation
    if not isinstance(system, str):
        raise InvalidArgumentError(f"system: expected a string or None, got {short_repr(system)}")
    check_text("system", system, MAX_PROMPT_CHARS)
    if conversation[0]["role"] == "system":
        raise InvalidArgumentError("system: the messages already begin with a system prompt; give only one of the two")
    return [{"role": "system", "content": system}, *conversation]


def _checked_message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidArgumentError(
            f'messages: expected dicts like {{"role": "user", "content": "Hi"}}, got {short_repr(message)}'
        )
    check_text(f"{name}.role", message["role"])
    checked: dict[str, Any] = {"role": str(message["role"])}
    for key, value in message.items():
        if key == "role" or value is None or (key != "content" and _is_empty(value)):
            continue
        if not isinstance(key, str):
            raise InvalidArgumentError(f"{name}: expected names of keys, got {short_repr(key)}")
        where = f"{name}.{key}"
        checked[key] = {"content": _checked_content, "tool_calls": _checked_calls}.get(key, plain)(where, value)
    if "content" not in checked and set(checked) == {"role"}:
        raise InvalidArgumentError(
            f"{name}.content: expected a text or a list of parts, got none; a message with tool_calls may have none"
        )
    return checked


def _is_empty(value: Any) -> bool:
    return isinstance(value, str | list | tuple | dict) and not value


def _checked_content(name: str, content: Any) -> Any:
    if isinstance(content, str):
        check_text(name, content, MAX_PROMPT_CHARS)
        return str(content)
    if not is_list(content):
        raise InvalidArgumentError(f"{name}: expected a text or a list of parts, got {short_repr(content)}")
    return [_checked_part(f"{name}[{index}]", part) for index, part in enumerate(content)]


def _checked_part(name: str, part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidArgumentError(
            f'{name}: expected a part like {{"type": "text", "text": "Hi"}}, got {short_repr(part)}'
        )
    if kind != "text" and kind not in _MEDIA_KEYS:
        raise UnsupportedArgumentError(
            f"{name}: expected a part of type text, image, audio or video, got {short_repr(kind)}, which no model is "
            f"shown; {_INSTEAD.get(kind, 'leave it out')}"
        )
    known = {"type", *_MEDIA_KEYS.get(kind, ("text",))}
    if unknown := [key for key in part if key not in known and part[key] is not None]:
        raise UnsupportedArgumentError(
            f"{name}: expected keys out of {', '.join(sorted(known))} in a part of type {kind}, got "
            f"{', '.join(map(short_repr, unknown))}; leave them out"
        )
    if kind != "text":
        return dict(part)
    if not isinstance(part.get("text"), str):
        raise InvalidArgumentError(f"{name}.text: expected a string, got {short_repr(part.get('text'))}")
    check_text(f"{name}.text", part["text"], MAX_PROMPT_CHARS)
    return {"type": "text", "text": str(part["text"])}


def _checked_calls(name: str, calls: Any) -> list[dict[str, Any]]:
    """Returns tool calls with arguments as values, as templates read them.

    OpenAI's interface has JSON text.
    """
    expected = 'a list of {"type": "function", "function": {"name": ..., "arguments": {...}}}'
    if not is_list(calls):
        raise InvalidArgumentError(f"{name}: expected {expected}, got {short_repr(calls)}")
    checked = []
    for index, call in enumerate(plain(name, calls)):
        where = f"{name}[{index}]"
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidArgumentError(f"{where}: expected one of {expected}, got {short_repr(call)}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            function["arguments"] = _read_json(f"{where}.arguments", arguments) if arguments.strip() else {}
        checked.append(call)
    return checked


def _read_json(name: str, text: str) -> Any:
    try:
        return plain(name, json.loads(text))
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{name}: expected JSON, got {short_repr(text)} ({error})") from error


def plain(name: str, value: Any, depth: int = 0) -> Any:
    """Returns `value` as JSON values.

    These are dicts with string keys, lists, strings, numbers, True, False and None.

    Raises:
        InvalidArgumentError: another type, too deep nesting, or text that is not Unicode.
    """
    if depth > _MAX_DEPTH:
        raise InvalidArgumentError(f"{name}: expected at most {_MAX_DEPTH} lists and dicts in each other, got more")
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        check_text(name, value, MAX_PROMPT_CHARS)
        return str.__str__(value)
    if isinstance(value, np.generic):
        return plain(name, value.item(), depth + 1)
    if isinstance(value, Mapping):
        if (key := next((key for key in value if not isinstance(key, str)), None)) is not None:
            raise InvalidArgumentError(f"{name}: expected strings as keys, got {short_repr(key)}")
        return {plain(name, key): plain(name, each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(name, each, depth + 1) for each in value]
    if callable(dump := getattr(value, "model_dump", None)) and not isinstance(value, type):  # pydantic's models
        return plain(name, dump(), depth + 1)
    raise InvalidArgumentError(f"{name}: expected values of JSON, got {short_repr(value)}")


def text_of(content: Any) -> str:
    """Returns the text of a message's content, a string or a list of parts."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or () if isinstance(part, Mapping))


def map_contents(conversation: Sequence[dict[str, Any]], change: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Returns the conversation with `change` applied to each content."""
    return [
        {**message, "content": change(message["content"])} if "content" in message else dict(message)
        for message in conversation
    ]


def as_parts(content: Any) -> Any:
    """Returns a content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def as_text(content: Any) -> Any:
    """Returns a text-only content as one string with a line per part; any other unchanged."""
    if isinstance(content, str) or any(part["type"] != "text" for part in content):
        return content
    return "\n".join(part["text"] for part in content)


def without_media(content: Any) -> Any:
    """Returns a content with a word in place of each image and audio.

    Templates do not read their values.
    """
    if isinstance(content, str):
        return content
    return [
        part if part["type"] == "text" else {key: value if key == "type" else f"<{key}>" for key, value in part.items()}
        for part in content
    ]
