"""Tool calls of models whose format is not known: common forms, and tools in the prompt."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_serve.server.call_forms import CallForm
from torchax_serve.server.notes import note_once
from torchax_serve.server.response_families import HERMES_CALL, MISTRAL_CALLS, NAMED_JSON, XML_CALL, XML_END
from torchax_serve.server.response_family import CALLS, MARKER, OBJECT, ResponseFamily, at_start, fields
from torchax_serve.text.messages import text_of

FORM = CallForm('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", quotes_name=True)
"""Calls that answers are held to."""
_OBJECT = r'\{\s*"(?:name|function|type|id|tool_calls|arguments|parameters)"'
_JSON = rf"(?={_OBJECT}|\[\s*{_OBJECT})"
_COMMON: Sequence[Mapping[str, Any]] = [
    HERMES_CALL,
    XML_CALL,
    NAMED_JSON,
    *MISTRAL_CALLS,
    {"open_pattern": at_start(r"(?:<\|python_tag\|>)?" + _JSON), "content": "json", "transform": OBJECT},
    {"open_pattern": rf"```\w*\s*{_JSON}", "close": "```", "content": "json", "transform": OBJECT},
]


def with_common_calls(family: ResponseFamily | None, *, is_strict: bool) -> ResponseFamily:
    """Returns a family whose calls are read in the common forms, besides its own.

    Args:
        family: Family of the model; None for one that is not known.
        is_strict: Whether calls are read in the form `FORM` only, which answers are held to.
    """
    found = family or ResponseFamily("common", (), {"start_anchor_pattern": r"(?!)", "fields": fields([])})
    own: Mapping[str, Any] = found.template["fields"]
    added = fields([HERMES_CALL] if is_strict else _COMMON, markers=() if is_strict else (XML_END,))
    common = {f"{CALLS}_common_{name}": field for name, field in added.items() if name.startswith(CALLS)} | {
        f"{name}_common": field for name, field in added.items() if name.startswith(MARKER)
    }
    note_once(
        "tools: the format of the model's calls is not known; calls are read in the common forms of JSON, and forced "
        "ones follow their schemas (--response-template sets another format)",
    )
    return dataclasses.replace(found, template={**found.template, "fields": {**own, **common}}, call=FORM)


def reads_tools(template: str) -> bool:
    """Returns whether a chat template shows tools to the model."""
    return re.search(r"\btools\b", template) is not None


def has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether a conversation has calls or their results."""
    return any(message.get("tool_calls") or message.get("role") in ("tool", "function") for message in messages)


def with_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], template: str
) -> list[list[dict[str, Any]]]:
    """Returns conversations that show tools in their text, the better one first.

    For chat templates that have no place for tools. The first has them in the system prompt, the second in the first
    message of the user, for templates without a system prompt.

    Args:
        messages: Of the request.
        tools: Functions that may be called; without any, only earlier calls and their results become text.
        template: Source of the chat template.
    """
    plain = [_as_text(message, template) for message in messages]
    if not tools:
        return [plain]
    note_once("tools: the chat template has no place for them; they are written into the system prompt")
    shown = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        "You can call functions. Their schemas are:\n"
        f"{shown}\n"
        'To call one, write:\n<tool_call>\n{"name": "FUNCTION", "arguments": {...}}\n</tool_call>'
    )
    is_system = bool(plain) and plain[0].get("role") in ("system", "developer")
    system = [_behind(plain[0], text), *plain[1:]] if is_system else [{"role": "system", "content": text}, *plain]
    first = next((index for index, message in enumerate(plain) if message.get("role") == "user"), None)
    if first is None or is_system:
        return [system]
    user = [*plain[:first], _in_front(plain[first], text), *plain[first + 1 :]]
    return [system, user]


def _as_text(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Returns a message whose calls or result are text where the template does not read them."""
    found = copy.copy(dict(message))
    if found.get("tool_calls") and "tool_calls" not in template:
        calls = [_call_text(call) for call in found.pop("tool_calls")]
        found["content"] = "\n".join([*filter(None, [_text_of(found.get("content"))]), *calls])
    if found.get("role") in ("tool", "function") and not re.search(r"""["']tool["']""", template):
        content = found.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        found = {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    return found


def _text_of(content: Any) -> str:
    return text_of(content) if isinstance(content, str | list) else ""


def _call_text(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {text}}}\n</tool_call>'


def _behind(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": f"\n\n{text}"}]}
    return {**message, "content": f"{content}\n\n{text}" if content else text}


def _in_front(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [{"type": "text", "text": f"{text}\n\n"}, *content]}
    return {**message, "content": f"{text}\n\n{content or ''}"}
