"""``/livez``, ``/readyz``, ``/version``, ``/load``, ``/metrics`` and aliases."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchax_serve import __version__
from torchax_serve.server.context import Stage, context_of


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
