"""``/tokenize``, ``/detokenize`` and ``/v1/chat/completions/render``."""

from __future__ import annotations

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchax_serve.server.chat import max_tokens_of, read_prompt, read_variables, with_files
from torchax_serve.server.context import context_of
from torchax_serve.server.errors import bad_request
from torchax_serve.server.json_lists import list_response
from torchax_serve.server.model_requests import read_for_model
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.pooling_schemas import DetokenizeRequest, TokenizeRequest
from torchax_serve.server.request_checks import check_text_size
from torchax_serve.server.schemas import ChatRequest
from torchax_serve.server.sse import until_disconnect
from torchax_serve.server.tools import plan_tools
from torchax_serve.text.chat_template import ChatOptions
from torchax_serve.validation.argument_checks import short_repr

MAX_DETOKENIZED = 1 << 18
"""Most token ids of ``/detokenize``: their text takes 0.1 s."""


async def tokenize(request: Request) -> Response:
    """Returns the token ids of a text or of a conversation."""
    service, body = await _read(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt: expected one of prompt and messages, got both or neither", "prompt", "invalid_value")
    if body.messages is not None and "chat" not in service.tasks:
        message = f"messages: expected prompt in their place, since {service.name} has no chat template"
        raise bad_request(message, "messages", "invalid_value")
    if body.prompt is not None:
        check_text_size(body.prompt, context_of(request).options.request, "prompt")
    ids = await until_disconnect(request.receive, service.run(_token_ids, service, body))
    others: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_model_len}
    if body.return_token_strs:
        tokenizer: Any = service.model.text_tokenizer
        others["token_strs"] = await service.run(tokenizer.convert_ids_to_tokens, ids)
    return await list_response(service, "tokens", ids, others, are_short=True)


def _token_ids(service: ModelService, body: TokenizeRequest) -> list[int]:
    tokenizer: Any = service.model.text_tokenizer
    if body.prompt is not None:
        return list(tokenizer(body.prompt, add_special_tokens=body.add_special_tokens is not False)["input_ids"])
    variables = read_variables(service, body.chat_template_kwargs)
    options = ChatOptions.of(body.tools, None, variables, bool(body.continue_final_message))
    options = dataclasses.replace(options, may_follow_assistant=True)
    return service.chat_prompt(body.messages or [], options).token_ids


async def detokenize(request: Request) -> Response:
    """Returns the text of token ids."""
    service, body = await _read(request, DetokenizeRequest)
    tokenizer: Any = service.model.text_tokenizer
    if len(body.tokens) > MAX_DETOKENIZED:
        message = f"tokens: expected at most {MAX_DETOKENIZED} token ids, got {len(body.tokens)}; split them"
        raise bad_request(message, "tokens", "invalid_value")
    num_ids = len(tokenizer)
    beyond = next((each for each in body.tokens if not 0 <= each < num_ids), None)
    if beyond is not None:
        raise bad_request(
            f"tokens: expected token ids from 0 to {num_ids - 1}, got {short_repr(beyond)}",
            "tokens",
            "invalid_value",
        )
    return JSONResponse({"prompt": await service.run(tokenizer.decode, body.tokens)})


async def render(request: Request) -> Response:
    """Returns the prompt that a chat's request would have."""
    context = context_of(request)
    service, body = await read_for_model(request, ChatRequest, "chat")
    service.settle_name(body, request.state.key, may_be_adapter=True)
    body = await with_files(body, context.options)
    ids = await until_disconnect(request.receive, service.run(_rendered, service, body))
    tokenizer: Any = service.model.text_tokenizer
    text = await service.run(tokenizer.decode, ids)
    others = {"object": "chat.completion.render", "model": body.model, "prompt": text}
    return await list_response(service, "prompt_token_ids", ids, others, are_short=True)


def _rendered(service: ModelService, body: ChatRequest) -> list[int]:
    plan = plan_tools(body, service.family, service.special_ids, template=service.template)
    return read_prompt(service, body, plan, max_tokens_of(body)).token_ids


async def _read(request: Request, kind: type[Any]) -> tuple[ModelService, Any]:
    service, body = await read_for_model(request, kind, None)
    if body.model is not None:
        service.check_name(body.model, request.state.key, may_be_adapter=True)
    return service, body
