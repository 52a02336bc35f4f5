"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchax_serve.server.anthropic.answer import PING, MessageAnswer
from torchax_serve.server.anthropic.errors import error_content
from torchax_serve.server.anthropic.schemas import CountTokensRequest, MessagesRequest
from torchax_serve.server.anthropic.translation import chat_of
from torchax_serve.server.chat import read_prompt, start_chat, with_files
from torchax_serve.server.context import ServerContext, context_of
from torchax_serve.server.dialect_requests import names_of_fields, note_unknown
from torchax_serve.server.errors import ApiError
from torchax_serve.server.model_requests import read_for_model
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.request_checks import check_num_messages
from torchax_serve.server.schemas import ChatRequest
from torchax_serve.server.sse import EventStream, named_event, until_disconnect
from torchax_serve.server.tools import plan_tools

_NAMES = {"messages": "messages", "stop": "stop_sequences", "response_format": "output_config.format"}
"""Fields by their names in chats."""
Body = TypeVar("Body", bound=CountTokensRequest)


async def messages(request: Request) -> Any:
    """Answers a conversation of Anthropic's Messages interface."""
    context, service, chat = await _read(request, MessagesRequest)
    with names_of_fields(_NAMES):
        started = await start_chat(request, service, chat, bounds_answer=True)
    answer = MessageAnswer(context, chat, started)
    if chat.stream:
        failed = partial(_error_event, request_id=request.state.request_id)
        return EventStream(answer.events(), context.options.keep_alive_s, PING, failed)
    return JSONResponse(await until_disconnect(request.receive, answer.complete()))


async def count_tokens(request: Request) -> Response:
    """Returns the number of tokens that a conversation's prompt has."""
    context, service, chat = await _read(request, CountTokensRequest)
    chat = await with_files(chat, context.options)
    with names_of_fields(_NAMES):
        plan = plan_tools(chat, service.family, service.special_ids, template=service.template)
        prompt = await until_disconnect(request.receive, service.run(read_prompt, service, chat, plan))
    return JSONResponse({"input_tokens": len(prompt.token_ids)})


async def _read(request: Request, kind: type[Body]) -> tuple[ServerContext, ModelService, ChatRequest]:
    context, route = context_of(request), request.scope["path"]
    service, body = await read_for_model(request, kind, "chat")
    service.check_name(body.model, request.state.key, may_be_adapter=True)
    check_num_messages(len(body.messages), context.options.request, "messages")
    return context, service, await service.run(_chat_of, body, service, route)


def _chat_of(body: CountTokensRequest, service: ModelService, route: str) -> ChatRequest:
    note_unknown(body, route)
    return chat_of(body, service)


def _error_event(error: ApiError, request_id: str) -> bytes:
    return named_event(error_content(error, request_id))
