"""``/start_profile`` and ``/stop_profile``, as vLLM names them, and ``/profile``.

They exist with ``--profile-dir`` only.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from torchax_serve.server import profiler
from torchax_serve.server.body import read_request
from torchax_serve.server.context import context_of
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.request_fields import ApiRequest, honoured

DEFAULT_S = 3.0
"""Seconds of a profile without the field."""


class ProfileRequest(ApiRequest):
    """Body of ``/profile``."""

    routes: ClassVar[tuple[str, ...]] = ("/profile",)
    seconds: Annotated[float | None, honoured("length of the profile, above 0 and up to 60; 3 without it")] = None
    by: Annotated[
        Literal["module", "op", "kernel"] | None, honoured("`module`, `op` (primitive of JAX) or `kernel`")
    ] = None


async def start_profile(request: Request) -> Response:
    """Starts a profile of the server."""
    await _profiler(request).start(_model(request))
    return Response()


async def stop_profile(request: Request) -> Response:
    """Ends the profile and writes it."""
    await _profiler(request).stop()
    return Response()


async def profile(request: Request) -> Response:
    """Takes a profile of some seconds and returns where the time went, by the model's modules."""
    taken_by, context = _profiler(request), context_of(request)
    body = await read_request(request, context.options, ProfileRequest)
    seconds = DEFAULT_S if body.seconds is None else body.seconds
    if not 0 < seconds <= profiler.MAX_PROFILE_S:
        limit = f"{profiler.MAX_PROFILE_S:g}"
        raise bad_request(f"seconds: expected a number above 0 and up to {limit}, got {seconds!r}", "seconds")
    found = await taken_by.take(_model(request), seconds)
    return JSONResponse({"trace": found.file.parent.name, **found.as_dict(body.by or "module")})


def _model(request: Request) -> Any:
    """Returns the model whose programs get names; of several the one that is loaded alone."""
    context = context_of(request)
    if (only := context.only_service()) is not None:
        return only.model
    if len(context.loaded) != 1:
        message = f"expected one loaded model, got {len(context.loaded)}; POST /models/unload unloads others"
        raise ApiError(409, message, code="conflict")
    return context.loaded[0].model


def _profiler(request: Request) -> profiler.Profiler:
    found = context_of(request).profiler
    if found is None:
        raise ApiError(404, "expected a server that takes profiles, got one started without --profile-dir")
    return found
