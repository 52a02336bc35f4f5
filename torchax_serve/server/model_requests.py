"""Reads requests that name a model, and finds or loads it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from torchax_serve.server.body import read_request
from torchax_serve.server.context import context_of
from torchax_serve.server.dialect_requests import OpenRequest
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.options import ServerOptions
from torchax_serve.server.request_fields import ApiRequest
from torchax_serve.validation.argument_checks import short_repr

Body = TypeVar("Body", bound=ApiRequest)
_PRIORITY = re.compile("-?[0-9]{1,18}")


async def read_for_model(
    request: Request,
    kind: type[Body],
    task: str | Sequence[str] | None,
    name_of: Callable[[Body], str | None] | None = None,
    read: Callable[[Request, ServerOptions, type[Body]], Awaitable[Body]] = read_request,
) -> tuple[ModelService, Body]:
    """Returns the model that a request names, loaded, and the request's body.

    A name is not compared with that of a server's only model: `ModelService.settle_name` does.

    Args:
        request: The request.
        kind: Its body.
        task: What the model has to do, or one of several; None: have a tokenizer.
        name_of: Returns the name that a body has; None: its field `model`.
        read: Reads the body.

    Raises:
        ApiError: The body is not valid, or the model cannot be used.
        ClientDisconnect: The client has gone.
    """
    context = context_of(request)
    only = context.only_service()
    if only is not None:
        _check_task(request, only, task)
    body = await read(request, context.options, kind)
    if (priority := request.headers.get("x-vllm-priority")) is not None:
        body = _with_priority(body, priority)
    if only is not None:
        return only, body
    named: Any = body
    service = await context.take(request, (named.model if name_of is None else name_of(body)) or "")
    _check_task(request, service, task)
    return service, body


def _with_priority(body: Body, given: str) -> Body:
    """Returns a body whose priority is that of the header ``X-Vllm-Priority``.

    Raises:
        ApiError: 400 if the header is no whole number.
    """
    if not ("priority" in type(body).model_fields or isinstance(body, OpenRequest)):
        return body
    if not _PRIORITY.fullmatch(given):
        raise bad_request(f"X-Vllm-Priority: expected a whole number of at most 18 digits, got {short_repr(given)}")
    return body.model_copy(update={"priority": int(given)})


def _check_task(request: Request, service: ModelService, task: str | Sequence[str] | None) -> None:
    route = request.scope["path"]
    if task is not None:
        service.require(task, route)
    elif service.model.text_tokenizer is None:
        raise ApiError(404, f"{route}: {service.name} has no tokenizer")
