"""Requests of Ollama's interface as requests for chats and completions."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torchax_serve.server.dialect_requests import with_passed_on, without_none
from torchax_serve.server.errors import bad_request
from torchax_serve.server.fim_prompts import fim_tokens_of
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.notes import note_once
from torchax_serve.server.ollama.schemas import (
    LATEST,
    GenerateRequest,
    OllamaChatRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)
from torchax_serve.server.schemas import ChatRequest, CompletionRequest
from torchax_serve.validation.argument_checks import short_repr

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
_OFF: Mapping[str, tuple[float, ...]] = {"typical_p": (0.0, 1.0), "tfs_z": (1.0,), "mirostat": (0,)}
"""Values that ask for nothing of options that are not honoured."""


def own_name(name: str, names: Collection[str]) -> str:
    """Returns the name of a model without the tag that clients write behind it."""
    return name.removesuffix(LATEST) if name not in names else name


def chat_of(body: OllamaChatRequest | GenerateRequest, service: ModelService) -> ChatRequest:
    """Returns the chat that a request is answered as.

    Raises:
        ApiError: 400 for content that no chat has, or an option that is not honoured.
    """
    if isinstance(body, OllamaChatRequest):
        messages, tools = _messages(body.messages or ()), body.tools
    else:
        asked = OllamaMessage(role="user", content=body.prompt, images=body.images)
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages, tools = [*system, *_messages([asked])], None
    fields = {**_fields(body, service), **_thinking(body, service), "messages": messages, "tools": tools or None}
    if messages and messages[-1]["role"] == "assistant":
        fields["continue_final_message"] = True
    fields |= {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    return ChatRequest.parse(with_passed_on(fields, body))


def completion_of(body: GenerateRequest, service: ModelService) -> CompletionRequest:
    """Returns the completion of a raw prompt, or of one with a gap.

    Its length is bounded by the model's.
    """
    if body.system or body.images or body.think:
        field = "suffix" if body.suffix else "raw"
        raise bad_request(f"{field}: expected none with system, images or think, which a template writes", field)
    fields = _fields(body, service)
    if body.suffix:
        ids = fim_tokens_of(service, "suffix").prompt_ids(service.model.text_tokenizer, body.prompt, body.suffix)
        given: dict[str, Any] = {"prompt": body.prompt, "suffix": body.suffix}
    else:
        ids = service.plain_prompt(body.prompt)
        given = {"prompt": list(ids)}
    asked, most = fields.pop("max_tokens", None), service.max_model_len
    room = None if most is None else max(1, most - len(ids))
    lengths = [each for each in (asked, room) if each is not None]
    fields["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    return CompletionRequest.parse(without_none({**fields, **given, "max_tokens": min(lengths, default=None)}))


def _fields(body: OllamaRequest, service: ModelService) -> dict[str, Any]:
    """Returns the fields that chats and completions share."""
    options = body.options or OllamaOptions()
    _check_options(options)
    fields: dict[str, Any] = {name: getattr(options, name) for name in _SAMPLING}
    fields |= {"model": own_name(body.model, service.names), "repetition_penalty": options.repeat_penalty}
    if options.num_predict is not None and options.num_predict >= 0:
        fields["max_tokens"] = options.num_predict
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        schema = {"name": "answer", "schema": body.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return without_none(fields)


def _check_options(options: OllamaOptions) -> None:
    """Raises ApiError, 400, for options that would change the answer elsewhere, and not here."""
    for name, harmless in _OFF.items():
        given = getattr(options, name)
        if given is not None and given not in harmless:
            message = f"options.{name}: expected {harmless[-1]}, which switches it off, got {short_repr(given)}; leave "
            raise bad_request(f"{message}it out", "options", "unsupported_parameter")
    is_penalized = options.repeat_penalty not in (None, 1.0)
    if is_penalized and options.repeat_last_n not in (None, -1):
        message = f"options.repeat_last_n: expected -1, as penalties look back on all, got {options.repeat_last_n}"
        raise bad_request(f"{message}; leave it out", "options", "unsupported_parameter")
    if options.num_ctx is not None:
        note_once("/api: num_ctx has no effect; --max-model-len of the server bounds prompt and answer")


def _thinking(body: OllamaRequest, service: ModelService) -> dict[str, Any]:
    """Returns the fields about reasoning.

    Raises:
        ApiError: 400 where reasoning is asked of a model without it.
    """
    think = body.think
    if think is None:
        return {}
    if think is False:
        return {"reasoning_effort": "none"}
    if not can_think(service):
        raise bad_request(f"think: expected a model with reasoning, got {service.name}; leave it out", "think")
    if think is not True:
        return {"reasoning_effort": think}
    return {"chat_template_kwargs": {"enable_thinking": True}} if "enable_thinking" in service.template else {}


def can_think(service: ModelService) -> bool:
    """Returns whether a model's answers may have reasoning that is told from them."""
    return service.family is not None and service.family.reasoning_markers is not None


def _messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Returns the messages of the chat, with ids for calls and their results."""
    found: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # names and ids of calls without a result
    for index, message in enumerate(messages):
        if message.role == "tool":
            found.append(_result(message, waiting, index))
            continue
        each: dict[str, Any] = {"role": message.role, "content": _content(message)}
        if message.thinking:
            each["reasoning_content"] = message.thinking
        if message.tool_calls:
            each["tool_calls"] = calls = []
            for number, call in enumerate(message.tool_calls):
                call_id = call.id or f"call_{index}_{number}"
                arguments = json.dumps(call.function.arguments or {}, ensure_ascii=False)
                function = {"name": call.function.name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
                waiting.append((call.function.name, call_id))
        found.append(each)
    return found


def _result(message: OllamaMessage, waiting: list[tuple[str, str]], index: int) -> dict[str, Any]:
    """Returns a tool's message, for the first call of its name that waits for a result."""
    names = [message.tool_name] if message.tool_name else [name for name, _ in waiting[:1]]
    of_call = next((each for each in waiting if each[0] in names), None)
    if message.tool_call_id is not None:
        of_call = next((each for each in waiting if each[1] == message.tool_call_id), of_call)
    if of_call is not None:
        waiting.remove(of_call)
    call_id = message.tool_call_id or (f"call_{index}" if of_call is None else of_call[1])
    name = message.tool_name or (None if of_call is None else of_call[0])
    return without_none({"role": "tool", "tool_call_id": call_id, "name": name, "content": message.content})


def _content(message: OllamaMessage) -> Any:
    """Returns a message's content; without images it is a string, which all templates read."""
    if not message.images:
        return message.content
    # The type in the URL is not read: files are told by their content.
    urls = [f"data:image/png;base64,{image}" for image in message.images]
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*images, *([{"type": "text", "text": message.content}] if message.content else [])]
