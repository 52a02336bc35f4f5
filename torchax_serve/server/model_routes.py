"""``/models/load`` and ``/models/unload`` of a server of several models."""

from __future__ import annotations

from typing import Annotated, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchax_serve.server.auth import check_for_all_models
from torchax_serve.server.body import read_request
from torchax_serve.server.context import context_of
from torchax_serve.server.errors import ApiError
from torchax_serve.server.request_fields import ApiRequest, honoured


class ModelRequest(ApiRequest):
    """Body of ``/models/load`` and ``/models/unload``."""

    routes: ClassVar[tuple[str, ...]] = ("/models/load", "/models/unload")
    model: Annotated[str, honoured("name of the model")]


async def load(request: Request) -> Response:
    """Loads a model, and answers when requests for it would be answered."""
    context = context_of(request)
    _check_several(request)
    body = await read_request(request, context.options, ModelRequest)
    await context.take(request, body.model)  # which the end of the request lets go
    return JSONResponse({"success": True})


async def unload(request: Request) -> Response:
    """Unloads a model that no request uses."""
    context = context_of(request)
    _check_several(request)
    body = await read_request(request, context.options, ModelRequest)
    assert context.pool is not None
    await context.pool.unload(context.find(request, body.model))
    return JSONResponse({"success": True})


def _check_several(request: Request) -> None:
    """Raises ApiError unless there are several models, and the request's key is for all."""
    context = context_of(request)
    if context.pool is None:
        raise ApiError(404, "expected a server of several models, got one of a single model, which stays loaded")
    if not (context.options.is_loopback or context.options.api_keys or context.options.api_key_file):
        raise ApiError(403, "expected a server with API keys, or on an address of this machine alone, got neither")
    check_for_all_models(request.state.key)
