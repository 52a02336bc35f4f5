"""``/v1/responses``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from torchax_serve.server.chat import StartedChat, start_chat
from torchax_serve.server.context import context_of
from torchax_serve.server.dialect_requests import names_of_fields, note_unknown
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.model_requests import read_for_model
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.notes import note_once
from torchax_serve.server.request_checks import check_num_messages
from torchax_serve.server.responses.answer import ResponseAnswer
from torchax_serve.server.responses.schemas import ITEMS, ItemReference, ResponsesRequest
from torchax_serve.server.responses.store import ResponseStore
from torchax_serve.server.responses.translation import chat_of
from torchax_serve.server.responses.truncation import TOO_LONG, last_items
from torchax_serve.server.schemas import ChatRequest
from torchax_serve.server.sse import COMMENT, EventStream, until_disconnect

_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
"""Fields by their names in chats."""


async def responses(request: Request) -> Any:
    """Answers a conversation of OpenAI's Responses interface."""
    context = context_of(request)
    service, body = await read_for_model(request, ResponsesRequest, "chat")
    service.settle_name(body, request.state.key, may_be_adapter=True)
    if body.store and not context.responses.is_on:
        note_once("/v1/responses: responses are not stored without --max-stored-responses")
    items = _conversation(context.responses, request.state.key_name, body)
    check_num_messages(len(items), context.options.request, "input")
    with names_of_fields(_NAMES):
        started = await _started(request, service, body, items)
    answer = ResponseAnswer(context, service, body, started, request.state.key_name, items)
    if body.stream:
        return EventStream(answer.events(), context.options.keep_alive_s, COMMENT, answer.failed)
    return JSONResponse(await until_disconnect(request.receive, answer.complete()))


async def _started(request: Request, service: ModelService, body: ResponsesRequest, items: list[Any]) -> StartedChat:
    """Returns the answer to a conversation, whose first items may be left out."""
    try:
        return await _start(request, service, body, items)
    except ApiError as error:
        if body.truncation != "auto" or error.code != TOO_LONG:
            raise
    kept = await until_disconnect(request.receive, service.run(last_items, body, items, service))
    return await _start(request, service, body, kept)


async def _start(request: Request, service: ModelService, body: ResponsesRequest, items: list[Any]) -> StartedChat:
    chat = await service.run(_chat_of, body.model_copy(update={"input": items}), service)
    return await start_chat(request, service, chat, bounds_answer=True)


def _chat_of(body: ResponsesRequest, service: ModelService) -> ChatRequest:
    note_unknown(body, "/v1/responses")
    return chat_of(body, service)


def _conversation(store: ResponseStore, key: str | None, body: ResponsesRequest) -> list[Any]:
    """Returns the items of a conversation, those of earlier responses in front.

    Raises:
        ApiError: 400 for a response, or an item, that is not stored.
    """
    previous = body.previous_response_id
    given = [_resolved(store, key, item, f"input[{index}]") for index, item in enumerate(body.input)]
    if previous is None:
        return given
    field = "previous_response_id"
    if not store.is_on:
        message = "expected null, as responses are not stored; send all of the input, or start the server with"
        raise bad_request(f"{field}: {message} --max-stored-responses", field, "unsupported_parameter")
    try:
        return [*ITEMS.validate_python(store.get(key, previous).conversation), *given]
    except ApiError as error:
        message = error.message.removeprefix("response_id: ")
        raise bad_request(f"{field}: {message}", field, "previous_response_not_found") from error


def _resolved(store: ResponseStore, key: str | None, item: Any, where: str) -> Any:
    """Returns an item, or the stored one that it refers to."""
    if not isinstance(item, ItemReference):
        return item
    found = store.item(key, item.id)
    if found is None:
        remedy = "send the item itself" + ("" if store.is_on else ", or start the server with --max-stored-responses")
        message = f"{where}.id: expected the id of an item of a stored response, got another; {remedy}"
        raise bad_request(message, where, "invalid_value")
    return ITEMS.validate_python([found])[0]
