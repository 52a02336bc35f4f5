"""``/v1/models``, and ``/models/load`` and ``/models/unload`` of a server of several models."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchax_serve.server.body import read_request
from torchax_serve.server.context import context_of
from torchax_serve.server.errors import ApiError
from torchax_serve.server.key_limits import ApiKey
from torchax_serve.server.model_pool import PooledModel
from torchax_serve.server.model_service import ModelService, adapters_of, public_name
from torchax_serve.server.request_fields import ApiRequest, honoured


class ModelRequest(ApiRequest):
    """Body of ``/models/load`` and ``/models/unload``."""

    routes: ClassVar[tuple[str, ...]] = ("/models/load", "/models/unload")
    model: Annotated[str, honoured("name of the model")]


async def models(request: Request) -> Response:
    """Lists the models."""
    return JSONResponse({"object": "list", "data": _models(request)})


async def model(request: Request) -> Response:
    """Returns one model."""
    wanted = request.path_params["model"]
    for entry in _models(request):
        if entry["id"] == wanted:
            return JSONResponse(entry)
    raise ApiError(404, f"the model {wanted[:100]!r} does not exist", param="model", code="model_not_found")


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
    """Raises ApiError unless the server has several models, and the request's key may load and unload them."""
    context, key = context_of(request), request.state.key
    if context.pool is None:
        raise ApiError(404, "expected a server of several models, got one of a single model, which stays loaded")
    if not (context.options.is_loopback or context.options.api_keys or context.options.api_key_file):
        raise ApiError(403, "expected a server with API keys, or on an address of this machine alone, got neither")
    if key is not None and key.limits.models:
        raise ApiError(403, "expected a key for all models, got one that is limited to some; use another")


def _models(request: Request) -> list[dict[str, Any]]:
    context, key = context_of(request), request.state.key
    if (only := context.only_service()) is not None:
        return list(_entries(only, key))
    assert context.pool is not None
    return [entry for pooled in context.pool.models for entry in _pooled_entries(pooled, key)]


def _entries(service: ModelService, key: ApiKey | None) -> list[dict[str, Any]]:
    folders = {**dict.fromkeys(service.names), **adapters_of(service)}
    return [
        {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "torchax-serve",
            "root": service.root if folder is None else public_name(folder),
            "parent": None if folder is None else service.name,
            "max_model_len": service.max_model_len,
            "tasks": list(service.tasks),
        }
        for name, folder in folders.items()
        if key is None or key.allows(name)
    ]


def _pooled_entries(pooled: PooledModel, key: ApiKey | None) -> list[dict[str, Any]]:
    """Returns the entries of a model; what is known of a loaded one alone is null of another."""
    if pooled.service is not None:
        found = _entries(pooled.service, key)
    else:
        unknown = {"root": public_name(pooled.spec.source), "parent": None, "max_model_len": None, "tasks": None}
        entry = {"object": "model", "created": 0, "owned_by": "torchax-serve", **unknown}
        names = [name for name in pooled.spec.names if key is None or key.allows(name)]
        found = [{"id": name, **entry} for name in names]
    return [entry | {"status": {"value": pooled.status}, "size_bytes": pooled.num_bytes} for entry in found]
