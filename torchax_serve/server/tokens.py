"""``/tokenize``, ``/detokenize`` and ``/v1/chat/completions/render``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchax_serve.server.body import read_json
from torchax_serve.server.chat import render_chat
from torchax_serve.server.context import context_of
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.pooling_schemas import DetokenizeRequest, TokenizeRequest
from torchax_serve.server.schemas import ChatRequest
from torchax_serve.server.sse import until_disconnect
from torchax_serve.server.tools import plan_tools
from torchax_serve.text.chat_template import ChatOptions
from torchax_serve.validation.argument_checks import short_repr


async def tokenize(request: Request) -> Response:
    """Returns the token ids of a text or of a conversation."""
    service, body = await _read(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt: expected one of prompt and messages, got both or neither", "prompt", "invalid_value")
    ids = await until_disconnect(request.receive, service.run(_token_ids, service, body))
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = service.model.tokenizer.convert_ids_to_tokens(ids)  # type: ignore[union-attr]
    return JSONResponse(answer)


def _token_ids(service: ModelService, body: TokenizeRequest) -> list[int]:
    tokenizer: Any = service.model.tokenizer
    if body.prompt is not None:
        return list(tokenizer(body.prompt, add_special_tokens=body.add_special_tokens is not False)["input_ids"])
    options = ChatOptions.of(body.tools, None, dict(body.chat_template_kwargs or {}), bool(body.continue_final_message))
    return service.chat_prompt(body.messages or [], options).token_ids


async def detokenize(request: Request) -> Response:
    """Returns the text of token ids."""
    service, body = await _read(request, DetokenizeRequest)
    tokenizer: Any = service.model.tokenizer
    beyond = next((each for each in body.tokens if not 0 <= each < len(tokenizer)), None)
    if beyond is not None:
        raise bad_request(
            f"tokens: expected token ids from 0 to {len(tokenizer) - 1}, got {short_repr(beyond)}",
            "tokens",
            "invalid_value",
        )
    return JSONResponse({"prompt": await service.run(tokenizer.decode, body.tokens)})


async def render(request: Request) -> Response:
    """Returns the prompt that a chat's request would have."""
    context = context_of(request)
    service = context.service()
    service.require("chat", "/v1/chat/completions/render")
    body = ChatRequest.parse(await read_json(request, context.options))
    service.check_name(body.model, request.state.key)
    plan = plan_tools(body, service.family)
    prompt = await until_disconnect(request.receive, service.run(render_chat, service, body, plan))
    ids = prompt.token_ids
    tokenizer: Any = service.model.tokenizer
    text = await service.run(tokenizer.decode, ids)
    return JSONResponse(
        {"object": "chat.completion.render", "model": body.model, "prompt": text, "prompt_token_ids": ids}
    )


async def _read(request: Request, kind: type[Any]) -> tuple[ModelService, Any]:
    context = context_of(request)
    service = context.service()
    if service.model.tokenizer is None:
        raise ApiError(404, f"{request.scope['path']}: {service.name} has no tokenizer")
    body = kind.parse(await read_json(request, context.options))
    if body.model is not None:
        service.check_name(body.model, request.state.key)
    return service, body
