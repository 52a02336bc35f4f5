"""Tool calls of models whose format is not known: common forms, and tools in the prompt."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torchax_serve.server.call_fields import (
    HERMES_CALL,
    INLINE_CALL,
    MISTRAL_CALLS,
    NAMED_JSON,
    XML_CALL,
    XML_END,
    python_calls,
)
from torchax_serve.server.call_forms import CallForm
from torchax_serve.server.notes import note_once
from torchax_serve.server.response_family import CALLS, EACH, INLINE, MARKER, OBJECT, ResponseFamily, at_start, fields
from torchax_serve.text.messages import text_of

FORM = CallForm('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", quotes_name=True)
"""Calls that answers are held to."""
_OBJECT = r'\{\s*"(?:name|function|type|id|tool_calls|arguments|parameters)"'
_JSON = rf"(?={_OBJECT}|\[\s*{_OBJECT})"
_TAG = r"(?i:<\|?(?:[a-z]+[:_])?(?:tool|function)_?calls?(?:_(?:start|begin))?\|?>)"
"""Text in front of calls, as many families write it: ``<tool_calls>``, ``<TOOLCALL>``, ``<|tool_call|>``."""
_END = r"(?i:<\|?/?(?:[a-z]+[:_])?(?:tool|function)_?calls?(?:_end)?\|?>)"
"""Text behind them."""
_COMMON: Sequence[Mapping[str, Any]] = [
    HERMES_CALL,
    {
        "open_pattern": rf"(?:(?!<tool_call>){_TAG}|functools)\s*{_JSON}",
        "close_pattern": _END,
        "content": "json",
        "transform": OBJECT,
    },
    {
        "open_pattern": rf"{_TAG}(?=\s*\[?\s*[A-Za-z_][\w.-]*\()",
        "close_pattern": _END,
        "content": "python-call-list",
        "transform": EACH,
        "transform_each": True,
    },
    python_calls(at_start("")),
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
    common |= {} if is_strict else {INLINE: INLINE_CALL}
    note_once(
        "tools: the format of the model's calls is not known; calls are read in the common forms of JSON, and forced "
        "ones follow their schemas (--response-template sets another format)",
    )
    template = {**found.template, "fields": {**own, **common}}
    return dataclasses.replace(found, template=template, call=FORM, tags="" if is_strict else f"{_TAG}|{_END}")


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


def with_calls_as_text(messages: Sequence[Mapping[str, Any]], around: tuple[str, str] | None) -> list[dict[str, Any]]:
    """Returns a conversation whose calls are text.

    For templates that show tools and leave calls out.

    Args:
        messages: Of the conversation.
        around: Texts around a list of calls, as the model writes them; None for the common form.
    """
    found = []
    for message in messages:
        message = dict(message)
        if calls := message.pop("tool_calls", None):
            note_once("tools: the chat template leaves calls out; they are written into the messages")
            texts = [_call_text(call) if around is None else _call_object(call) for call in calls]
            text = "\n".join(texts) if around is None else f"{around[0]}{', '.join(texts)}{around[1]}"
            message["content"] = "\n".join(filter(None, [_text_of(message.get("content")), text]))
        found.append(message)
    return found


def texts_around_calls(family: ResponseFamily | None, template: str) -> tuple[str, str] | None:
    """Returns what a model writes around a list of calls; None for the common form.

    Its template leaves calls out. It is what its family says, or a tag that the template tells the model to write.
    """
    if family is not None and family.around_calls is not None:
        return family.around_calls
    tag = next((each[0] for each in re.finditer(_TAG, template) if each[0] != "<tool_call>"), None)
    if tag is None:
        return None
    ends = (each[0] for each in re.finditer(_END, template) if "/" in each[0])
    return f"{tag}[", f"]{next(ends, '')}"


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
    return f"<tool_call>\n{_call_object(call)}\n</tool_call>"


def _call_object(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function.get("name"), ensure_ascii=False)}, "arguments": {text}}}'


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
