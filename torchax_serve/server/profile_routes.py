"""``/start_profile`` and ``/stop_profile``, as vLLM names them; there with ``--profile-dir`` only."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from torchax_serve.server.context import context_of
from torchax_serve.server.errors import ApiError
from torchax_serve.server.profiler import Profiler


async def start_profile(request: Request) -> Response:
    """Starts a profile of the server."""
    await _profiler(request).start()
    return Response()


async def stop_profile(request: Request) -> Response:
    """Ends the profile and writes it."""
    await _profiler(request).stop()
    return Response()


def _profiler(request: Request) -> Profiler:
    found = context_of(request).profiler
    if found is None:
        raise ApiError(404, "expected a server that takes profiles, got one started without --profile-dir")
    return found
