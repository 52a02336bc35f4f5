"""Requests of the Responses interface as requests for chats."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any

from torchax_serve.server.dialect_requests import with_passed_on, without_none
from torchax_serve.server.errors import bad_request
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.notes import note_once
from torchax_serve.server.responses.schemas import (
    CallOutputItem,
    CustomToolCallItem,
    FunctionCallItem,
    ItemPart,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    ResponsesTool,
)
from torchax_serve.server.schemas import ChatRequest
from torchax_serve.server.template_roles import with_users_joined
from torchax_serve.validation.argument_checks import short_repr

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
_SAME_NAME = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "parallel_tool_calls", "stream")
_CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Schema of a custom tool, which takes one text."""


def chat_of(body: ResponsesRequest, service: ModelService) -> ChatRequest:
    """Returns the chat that a request is answered as.

    Raises:
        ApiError: 400 for content that no chat has.
    """
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages += _messages(body.input)
    if not service.roles.takes_users_in_a_row:
        messages = with_users_joined(messages)
    functions = _functions(body.tools or ())
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(functions)]
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    fields |= {"model": body.model, "messages": messages, "tools": tools or None, "max_tokens": body.max_output_tokens}
    fields["reasoning_effort"] = body.reasoning and body.reasoning.effort
    if tools or body.tool_choice not in (None, "auto", "none"):
        fields["tool_choice"] = _choice(body.tool_choice)
    if LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.text is not None and body.text.format is not None and body.text.format.type != "text":
        form = body.text.format
        fields["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            if form.schema_ is None:
                raise bad_request("text.format.schema: expected a JSON schema, got none", "text", "invalid_value")
            fields["response_format"]["json_schema"] = {"name": form.name, "schema": form.schema_}
    return ChatRequest.parse(with_passed_on(fields, body))


def sealed(reasoning: str) -> str:
    """Returns reasoning in the form of `encrypted_content`.

    It is base64, since clients only send it back.
    """
    return base64.b64encode(reasoning.encode()).decode()


def _messages(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the messages of items; reasoning, text and calls of one answer are one message."""
    found: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        if isinstance(item, MessageItem) and item.role != "assistant":
            found.append({"role": item.role, "content": _content(item.content, f"input[{index}]")})
        elif isinstance(item, CallOutputItem):
            content = _content(item.output, f"input[{index}]")
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        else:
            _add_to_answer(_answer(found, item), item)
    return found


def _answer(found: list[dict[str, Any]], item: Any) -> dict[str, Any]:
    """Returns the assistant's message that an item is part of.

    It is the last one, unless the item begins another.
    """
    last = found[-1] if found else None
    begins = isinstance(item, ReasoningItem | MessageItem)
    if last is None or last["role"] != "assistant" or (begins and (last["content"] or "tool_calls" in last)):
        last = {"role": "assistant", "content": ""}
        found.append(last)
    return last


def _add_to_answer(message: dict[str, Any], item: Any) -> None:
    if isinstance(item, MessageItem):
        message["content"] = "".join(part.text or part.refusal or "" for part in item.content)
    elif isinstance(item, ReasoningItem):
        if text := _reasoning(item):
            message["reasoning_content"] = "\n\n".join(filter(None, (message.get("reasoning_content"), text)))
    else:
        assert isinstance(item, FunctionCallItem | CustomToolCallItem)
        if isinstance(item, CustomToolCallItem):
            arguments = json.dumps({"input": item.input}, ensure_ascii=False)
        else:
            arguments = item.arguments
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": arguments}}
        message.setdefault("tool_calls", []).append(call)


def _reasoning(item: ReasoningItem) -> str:
    """Returns the reasoning of an item: its text, what was sealed here, or its summary."""
    if text := "\n\n".join(part.text or "" for part in item.content or ()):
        return text
    try:
        return base64.b64decode(item.encrypted_content or "", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):  # of another server
        return "\n\n".join(part.text or "" for part in item.summary)


def _content(parts: Sequence[ItemPart], where: str) -> Any:
    """Returns a message's content; one text alone is a string, which all templates read."""
    found: list[dict[str, Any]] = []
    for index, part in enumerate(parts):
        field = f"{where}.content[{index}]"
        if part.type == "input_image":
            if part.image_url is None:
                raise bad_request(f"{field}.image_url: expected a URL, got none", field, "invalid_value")
            found.append({"type": "image_url", "image_url": {"url": part.image_url}})
            continue
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise bad_request(f"{field}.text: expected a string, got none", field, "invalid_value")
        found.append({"type": "text", "text": text})
    if all(part["type"] == "text" for part in found):
        return "\n".join(part["text"] for part in found)
    return found


def _functions(tools: Sequence[ResponsesTool]) -> list[ResponsesTool]:
    for tool in tools:
        if not tool.is_function:
            note_once(f"/v1/responses: tools of type {short_repr(tool.type)} are left out, as nobody here runs them")
    return [tool for tool in tools if tool.is_function]


def _tool(tool: ResponsesTool, where: str) -> dict[str, Any]:
    """Returns a function; a custom tool is one with a text, whose grammar the model is told."""
    if tool.name is None:
        raise bad_request(f"{where}.name: expected a string, got none", where, "invalid_value")
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if tool.type == "custom":
        if (tool.format or {}).get("type") == "grammar":
            note_once("/v1/responses: grammars of custom tools are told to the model, and not held")
            grammar = f"The input follows this grammar:\n{(tool.format or {}).get('definition')}"
            function["description"] = "\n\n".join(filter(None, (tool.description, grammar)))
        function["parameters"] = _CUSTOM
    else:
        function |= {"parameters": tool.parameters, "strict": tool.strict or None}
    return {"type": "function", "function": without_none(function)}


def _choice(choice: Any) -> Any:
    """Returns a choice of tools as chats have it."""
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom") and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice
