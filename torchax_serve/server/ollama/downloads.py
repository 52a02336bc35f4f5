"""``/api/pull`` and ``/api/delete``: models of the hub on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from model_adapters.errors import ModelNotFoundError, TorchaxServeError
from model_adapters.loading.downloads import delete_download, find_download
from model_adapters.loading.model_source import parse_name, resolve
from model_adapters.loading.progress import Advance, Unit
from torchax_serve.server.body import read_request
from torchax_serve.server.context import context_of
from torchax_serve.server.dialect_requests import note_unknown
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.ollama.answer import NDJSON, failed, line
from torchax_serve.server.ollama.schemas import LATEST, DeleteRequest, PullRequest
from torchax_serve.server.ollama.translation import own_name
from torchax_serve.server.sse import EventStream, until_disconnect

INTERVAL_S = 0.1
"""Least seconds between two lines about the same file."""
SUCCESS = {"status": "success"}


async def pull(request: Request) -> Response:
    """Downloads a model of the hub, with a line for each progress."""
    context = context_of(request)
    service = context.service()
    body = await read_request(request, context.options, PullRequest)
    note_unknown(body, "/api/pull")
    name = body.model or body.name or ""
    if own_name(name, service) in service.names:
        steps = _served()
    else:
        _check_allowed(request)
        steps = _pulled(_hub_id(name))
    if body.stream is False:
        return JSONResponse(await until_disconnect(request.receive, _last(steps)))
    return EventStream(_lines(steps), sign=None, failed=failed, media_type=NDJSON)


async def delete(request: Request) -> Response:
    """Deletes a downloaded model of the hub."""
    context = context_of(request)
    service = context.service()
    body = await read_request(request, context.options, DeleteRequest)
    note_unknown(body, "/api/delete")
    name = body.model or body.name or ""
    _check_allowed(request)
    if own_name(name, service) in service.names or (hub_id := _hub_id(name)) == _hub_id_of(service):
        raise ApiError(409, f"expected a model that is not served, got {name[:100]!r}; end the server first")
    await service.run(_delete, hub_id)
    return Response(status_code=200)


def _hub_id_of(service: ModelService) -> str | None:
    """Returns the hub id of the served model; None for a folder, or the embedded model."""
    try:
        found = parse_name(service.model.name)
    except TorchaxServeError:
        return None
    return found if isinstance(found, str) else None


def _check_allowed(request: Request) -> None:
    """Raises ApiError, 403, unless the server's options and the request's key allow downloads."""
    key = request.state.key
    if not context_of(request).options.allow_model_downloads:
        raise ApiError(403, "expected a server that downloads models, got one started without --allow-model-downloads")
    if key is not None and key.limits.models:
        raise ApiError(403, "expected a key for all models, got one that is limited to some; use another")


def _hub_id(name: str) -> str:
    """Returns the hub id that a name stands for; raises ApiError for another name."""
    try:
        found = parse_name(name.removesuffix(LATEST)) if name else None
    except ModelNotFoundError:
        found = None
    except TorchaxServeError as error:
        raise bad_request(f"model: {error}", "model", "invalid_value") from error
    if not isinstance(found, str):
        message = f"model: expected a short name or a hub id, got {name[:100]!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return found


def _delete(hub_id: str) -> None:
    try:
        delete_download(find_download(hub_id), None)
    except ModelNotFoundError as error:
        message = f"the model {hub_id[:100]!r} is not on this machine"
        raise ApiError(404, message, param="model", code="model_not_found") from error


async def _served() -> AsyncGenerator[dict[str, Any]]:
    yield SUCCESS


async def _lines(steps: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[bytes]:
    async with contextlib.aclosing(steps):
        async for each in steps:
            yield line(each)


async def _last(steps: AsyncGenerator[dict[str, Any]]) -> dict[str, Any]:
    async with contextlib.aclosing(steps):
        return [each async for each in steps][-1]


async def _pulled(hub_id: str) -> AsyncGenerator[dict[str, Any]]:
    """Yields the progress of a download, which ends when nobody reads it any more.

    Raises:
        ApiError: 404 if the hub has no such model, 502 if it cannot be read.
    """
    progress = _QueuedProgress(asyncio.get_running_loop())
    yield {"status": "pulling manifest"}
    work = asyncio.create_task(asyncio.to_thread(_resolve, hub_id, progress))

    def end(task: asyncio.Task[None]) -> None:
        task.exception()  # read, also where nobody waits for it any more
        progress.queue.put_nowait(None)

    work.add_done_callback(end)
    try:
        while (each := await progress.queue.get()) is not None:
            yield each
        await work
    finally:
        progress.is_cancelled.set()
    yield SUCCESS


def _resolve(hub_id: str, progress: _QueuedProgress) -> None:
    try:
        resolve(hub_id, progress=progress, local_files_only=False)
    except ModelNotFoundError as error:
        raise ApiError(404, f"model: {error}", param="model", code="model_not_found") from error
    except TorchaxServeError as error:
        raise ApiError(400, f"model: {error}", param="model", code="invalid_value") from error


class _QueuedProgress:
    """Progress of loading (`model_adapters.loading.progress.Progress`) as the lines of a stream.

    Attributes:
        queue: The lines, and None at the end.
        is_cancelled: Whether nobody reads them any more, so that the download ends.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.is_cancelled = threading.Event()
        self._loop = loop

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None, unit: Unit = "bytes") -> Iterator[Advance]:
        """Sends a line at the begin and the end of a stage, and a few in between."""
        status, completed, sent_s = f"pulling {name}", 0, 0.0

        def send() -> None:
            nonlocal sent_s
            sent_s = time.monotonic()
            counts = {} if total is None or unit != "bytes" else {"total": total, "completed": min(completed, total)}
            self._loop.call_soon_threadsafe(self.queue.put_nowait, {"status": status, "digest": name, **counts})

        def advance(amount: int) -> None:
            nonlocal completed
            if self.is_cancelled.is_set():
                raise ApiError(400, "the client has gone")
            completed += amount
            if time.monotonic() - sent_s >= INTERVAL_S:
                send()

        send()
        yield advance
        send()
