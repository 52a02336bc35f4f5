"""``/v1/responses``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from torchax_serve.server.body import read_request
from torchax_serve.server.chat import start_chat
from torchax_serve.server.context import context_of
from torchax_serve.server.dialect_requests import names_of_fields, note_unknown
from torchax_serve.server.responses.answer import ResponseAnswer
from torchax_serve.server.responses.schemas import ResponsesRequest
from torchax_serve.server.responses.translation import chat_of
from torchax_serve.server.sse import COMMENT, EventStream, until_disconnect

_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
"""Fields by their names in chats."""


async def responses(request: Request) -> Any:
    """Answers a conversation of OpenAI's Responses interface."""
    context = context_of(request)
    service = context.service()
    service.require("chat", "/v1/responses")
    body = await read_request(request, context.options, ResponsesRequest)
    service.check_name(body.model, request.state.key, may_be_adapter=True)
    note_unknown(body, "/v1/responses", service.notes)
    chat = await service.run(chat_of, body, service)
    with names_of_fields(_NAMES):
        started = await start_chat(request, service, chat, bounds_answer=True)
    answer = ResponseAnswer(context, service, body, started)
    if body.stream:
        return EventStream(answer.events(), context.options.keep_alive_s, COMMENT, answer.failed)
    return JSONResponse(await until_disconnect(request.receive, answer.complete()))
