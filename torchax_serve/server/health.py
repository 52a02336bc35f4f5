"""``/livez``, ``/readyz``, ``/version``, ``/load``, ``/metrics``, ``/v1/models``."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from model_adapters.loading.model_source import public_name
from torchax_serve import __version__
from torchax_serve.server.context import Stage, context_of
from torchax_serve.server.errors import ApiError
from torchax_serve.server.key_limits import ApiKey
from torchax_serve.server.model_pool import PooledModel
from torchax_serve.server.model_service import ModelService, adapters_of


async def livez(request: Request) -> Response:
    """Returns 200 as long as the process is worth keeping."""
    stage = context_of(request).stage
    return JSONResponse({"status": stage.value}, status_code=503 if stage is Stage.DEAD else 200)


async def readyz(request: Request) -> Response:
    """Returns 200 while requests are answered; 503 before and after, with how far the server is."""
    stage, start = context_of(request).stage, context_of(request).start
    progress = start.shown() if stage in (Stage.LOADING, Stage.WARMING_UP) else {}
    # A start from a record reads the weights while it warms up, if a program has to be traced.
    shown = Stage.LOADING if progress and start.reads_weights else stage
    status: dict[str, Any] = {"status": shown.value, **({"progress": progress} if progress else {})}
    is_ready = stage is Stage.READY
    return JSONResponse(status, 200 if is_ready else 503, None if is_ready else {"Retry-After": "1"})


async def version(request: Request) -> Response:
    """Returns versions and the effective options, without secrets."""
    return JSONResponse({"version": __version__, "options": context_of(request).options.public()})


async def load(request: Request) -> Response:
    """Returns how many requests are in work, without this one, as vLLM's ``/load`` does."""
    return JSONResponse({"server_load": max(0, context_of(request).num_in_flight - 1)})


async def metrics(request: Request) -> Response:
    """Returns metrics in Prometheus' text format."""
    return Response(context_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


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
        own, base = public_name(pooled.spec.source), pooled.name
        names: list[tuple[str, str, str | None]] = [(name, own, None) for name in pooled.spec.names]
        names += [(name, public_name(folder), base) for name, folder in pooled.spec.adapters.items()]
        entry = {"object": "model", "created": 0, "owned_by": "torchax-serve"}
        unknown = {"max_model_len": None, "tasks": None}
        found = [
            {"id": name, **entry, "root": root, "parent": parent, **unknown}
            for name, root, parent in names
            if key is None or key.allows(name)
        ]
    return [entry | {"status": {"value": pooled.status}, "size_bytes": pooled.num_bytes} for entry in found]
