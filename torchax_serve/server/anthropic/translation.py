"""Requests of the Messages interface as requests for chats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torchax_serve.server.anthropic.schemas import (
    ID_PREFIX,
    CountTokensRequest,
    DocumentBlock,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    MessagesTool,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from torchax_serve.server.dialect_requests import with_passed_on, without_none
from torchax_serve.server.errors import bad_request
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.notes import note_once
from torchax_serve.server.schemas import ChatRequest
from torchax_serve.server.template_roles import joined
from torchax_serve.validation.argument_checks import short_repr

ATTRIBUTION = re.compile(r"\s*x-anthropic-billing-header:[^\n]*(?:\n+|\Z)", re.IGNORECASE)
"""A line that clients write in front of the system prompt, with a number of the request in it."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(body: CountTokensRequest, service: ModelService) -> ChatRequest:
    """Returns the chat that a request is answered as.

    Raises:
        ApiError: 400 for content that no chat has.
    """
    messages = [*_system(body.system), *_messages(body.messages)]
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(_functions(body.tools or ()))]
    fields: dict[str, Any] = {"model": body.model, "messages": messages, "tools": tools or None}
    if messages and messages[-1]["role"] == "assistant":
        fields["continue_final_message"] = True
    choice = body.tool_choice
    if choice is not None and (tools or choice.type in ("any", "tool")):
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
        fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    if body.context_management:
        note_once("/v1/messages: context_management has no effect; the conversation is answered as it comes")
    fields |= _thinking(body, service) | _output(body)
    if isinstance(body, MessagesRequest):
        if body.max_tokens < 1:
            raise bad_request(f"max_tokens: expected a whole number >= 1, got {body.max_tokens}", "max_tokens")
        fields |= {"stop": body.stop_sequences} | {
            name: getattr(body, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")
        }
    return ChatRequest.parse(with_passed_on(fields, body))


def _system(blocks: Sequence[TextBlock] | None) -> list[dict[str, Any]]:
    """Returns the system message, without an attribution header.

    With the header no two prompts would begin alike.
    """
    texts = [block.text for block in blocks or ()]
    if texts and (found := ATTRIBUTION.match(texts[0])):
        note_once("/v1/messages: the attribution header in front of the system prompt is left out")
        texts[0] = texts[0][found.end() :]
    texts = [text for text in texts if text]
    return [{"role": "system", "content": "\n\n".join(texts)}] if texts else []


def _messages(messages: Sequence[InputMessage]) -> list[dict[str, Any]]:
    """Returns the messages of the chat.

    Consecutive ones of the user or of the assistant are one turn.
    """
    groups: list[list[dict[str, Any]]] = []
    for index, message in enumerate(messages):
        for each in _turn(message, f"messages[{index}]"):
            if groups and _is_one_turn(groups[-1][-1], each):
                groups[-1].append(each)
            else:
                groups.append([each])
    return [_joined(group) for group in groups]


def _is_one_turn(first: dict[str, Any], second: dict[str, Any]) -> bool:
    is_answer = first["role"] == "assistant" and not first.get("tool_calls")
    return first["role"] == second["role"] and (is_answer or first["role"] == "user")


def _joined(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns messages of one turn as one.

    A text alone is a string, which all templates read.
    """
    found = dict(joined(group))
    content = found["content"]
    if isinstance(content, list) and len(content) == 1 and content[0]["type"] == "text":
        found["content"] = content[0]["text"]
    if found["role"] == "assistant":
        found |= {key: value for key, value in group[-1].items() if key == "tool_calls"}
        if reasoning := "\n\n".join(each["reasoning_content"] for each in group if "reasoning_content" in each):
            found["reasoning_content"] = reasoning
    return found


def _turn(message: InputMessage, where: str) -> Iterator[dict[str, Any]]:
    """Yields the chat's messages for one message.

    Results of tools come first, as the calls are in front of them.
    """
    if message.role == "assistant":
        yield _assistant(message, where)
        return
    results = [block for block in message.content if isinstance(block, ToolResultBlock)]
    parts: list[dict[str, Any]] = []
    for result in results:
        yield _result(result, parts, where)
    for index, block in enumerate(message.content):
        if not isinstance(block, ToolResultBlock):
            parts.append(_part(block, f"{where}.content[{index}]"))
    if message.role == "system":
        wrong = next((part["type"] for part in parts if part["type"] != "text"), None)
        if wrong is not None:
            text = f"{where}.content: expected texts of a system message, got {wrong}; move it to a message of the user"
            raise bad_request(text, f"{where}.content", "invalid_value")
        yield {"role": "system", "content": "\n\n".join(part["text"] for part in parts)}
    elif parts or not results:
        yield {"role": "user", "content": parts or ""}


def _assistant(message: InputMessage, where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": _own_id(block.id), "type": "function", "function": function})
        elif not isinstance(block, RedactedThinkingBlock):
            field = f"{where}.content[{index}]"
            message_text = f"{field}.type: expected text, thinking or tool_use of the assistant, got {block.type}"
            raise bad_request(message_text, field, "invalid_value")
    found: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        found["reasoning_content"] = "\n\n".join(filter(None, thoughts))
    return found | ({"tool_calls": calls} if calls else {})


def _result(block: ToolResultBlock, images: list[dict[str, Any]], where: str) -> dict[str, Any]:
    """Returns a tool's message.

    Its images go to the user's message behind it, as few templates have a place for them in a tool's.
    """
    texts = []
    for each in block.content:
        part = _part(each, where)
        if part["type"] == "text":
            texts.append(part["text"])
        else:
            images.append(part)
            texts.append("[image: in the message below]")
    text = "\n".join(texts)
    content = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": _own_id(block.tool_use_id), "content": content}


def _own_id(given: str) -> str:
    """Returns the id of a call as the model wrote it; a prefix alone is an id."""
    return given.removeprefix(ID_PREFIX) or given


def _part(block: Any, where: str) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    if isinstance(block, SearchResultBlock):
        texts = [block.title, block.source, *(each.text for each in block.content)]
        return {"type": "text", "text": "\n".join(texts)}
    if isinstance(block, DocumentBlock) and block.source.type == "text":
        return {"type": "text", "text": "\n".join(filter(None, (block.title, block.context, block.source.data)))}
    if isinstance(block, ImageBlock) and block.source.type == "base64":
        return {"type": "image_url", "image_url": {"url": f"data:{block.source.media_type};base64,{block.source.data}"}}
    if isinstance(block, ImageBlock) and block.source.type == "url":
        return {"type": "image_url", "image_url": {"url": block.source.url}}
    expected = "expected a text, an image (base64 or url), a document of text, or a tool's result"
    got = f"{block.type}{f' of {block.source.type}' if isinstance(block, ImageBlock | DocumentBlock) else ''}"
    raise bad_request(f"{where}.type: {expected}, got {got}", where, "invalid_value")


def _functions(tools: Sequence[MessagesTool]) -> list[MessagesTool]:
    for tool in tools:
        if not tool.is_function:
            note_once(f"/v1/messages: tools of type {short_repr(tool.type)} are left out, as nobody here runs them")
    return [tool for tool in tools if tool.is_function]


def _tool(tool: MessagesTool, where: str) -> dict[str, Any]:
    if tool.input_schema is None:
        raise bad_request(f"{where}.input_schema: expected a JSON schema, got none", where, "invalid_value")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": without_none(function | {"strict": tool.strict or None})}


def _thinking(body: CountTokensRequest, service: ModelService) -> dict[str, Any]:
    """Returns fields about reasoning, of which there is none unless it is asked for."""
    thinking, found = body.thinking, dict[str, Any]()
    is_on = thinking is not None and thinking.type != "disabled"
    if thinking is not None and thinking.budget_tokens is not None:
        if thinking.budget_tokens < 0:
            message = f"thinking.budget_tokens: expected a whole number >= 0, got {thinking.budget_tokens}"
            raise bad_request(message, "thinking", "invalid_value")
        if service.family is not None and service.family.reasoning_markers is not None:
            found["thinking_token_budget"] = thinking.budget_tokens if is_on else None
        else:  # clients send it to all models
            note_once("/v1/messages: thinking.budget_tokens has no effect, as the model's reasoning has no markers")
    if "enable_thinking" in service.template:
        found["chat_template_kwargs"] = {"enable_thinking": is_on}
    return found


def _output(body: CountTokensRequest) -> dict[str, Any]:
    config = body.output_config
    form = body.output_format or (config and config.format)
    found: dict[str, Any] = {"reasoning_effort": config and config.effort}
    if form:
        found["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}}
    return found
