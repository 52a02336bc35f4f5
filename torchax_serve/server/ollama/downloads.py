"""``/api/pull`` and ``/api/delete``: models of the hub on this machine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from model_adapters.errors import ModelNotFoundError, TorchaxServeError
from model_adapters.loading.downloads import delete_download, find_download
from model_adapters.loading.gguf_names import split_tag
from model_adapters.loading.model_source import parse_name, resolve
from model_adapters.loading.progress import Advance, Unit
from torchax_serve.server.auth import check_for_all_models
from torchax_serve.server.body import read_request
from torchax_serve.server.context import ServerContext, context_of
from torchax_serve.server.dialect_requests import note_unknown
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.ollama.answer import NDJSON, failed, line
from torchax_serve.server.ollama.schemas import LATEST, DeleteRequest, PullRequest
from torchax_serve.server.ollama.translation import own_name
from torchax_serve.server.sse import EventStream, until_disconnect

INTERVAL_S = 0.1
"""Least seconds between two lines about the same file."""
SUCCESS = {"status": "success"}
MAX_PULLS = 2
"""Most downloads at once; each has a thread."""
_POOL = concurrent.futures.ThreadPoolExecutor(MAX_PULLS, thread_name_prefix="pull")
_running: set[concurrent.futures.Future[None]] = set()


async def pull(request: Request) -> Response:
    """Downloads a model of the hub, with a line for each progress."""
    context = context_of(request)
    context.only_service()  # raises unless requests are answered
    body = await read_request(request, context.options, PullRequest)
    note_unknown(body, "/api/pull")
    name = body.model or body.name or ""
    if own_name(name, context.model_names) in context.model_names:
        steps = _served()
    else:
        _check_allowed(request)
        _hub_id(name)  # raises for other names
        _check_room()
        steps = _pulled(name.removesuffix(LATEST))
    if body.stream is False:
        return JSONResponse(await until_disconnect(request.receive, _last(steps)))
    return EventStream(_lines(steps), sign=None, failed=failed, media_type=NDJSON)


async def delete(request: Request) -> Response:
    """Deletes a downloaded model of the hub."""
    context = context_of(request)
    context.only_service()  # raises unless requests are answered
    body = await read_request(request, context.options, DeleteRequest)
    note_unknown(body, "/api/delete")
    name = body.model or body.name or ""
    _check_allowed(request)
    served = f"expected a model that is not served, got {name[:100]!r}; end the server first"
    if own_name(name, context.model_names).strip().lower() in {each.lower() for each in context.model_names}:
        raise ApiError(409, served)
    hub_id = _hub_id(name)
    if split_tag(name.removesuffix(LATEST))[1] is not None:
        message = f"model: expected a hub id, all of whose files are deleted, got {name[:100]!r}; leave the tag out"
        raise bad_request(message, "model", "invalid_value")
    if hub_id.lower() in _hub_ids_in_use(context):
        raise ApiError(409, served)
    await asyncio.to_thread(_delete, hub_id)
    return Response(status_code=200)


def _hub_ids_in_use(context: ServerContext) -> set[str]:
    """Returns the hub ids of the served models and of their draft models, in lower case."""
    names: list[Any] = [] if context.pool is None else [each.spec.source for each in context.pool.models]
    for service in context.loaded:
        # Not asked by name: an attribute that a recorded model has not loads its torch module.
        options = vars(service.model).get("_engine_options")
        draft = None if options is None or options.speculative is None else options.speculative.model
        names += [service.model.name, getattr(draft, "name", draft)]
    found = set()
    for name in names:
        with contextlib.suppress(TorchaxServeError):
            hub_id = parse_name(name) if name is not None else None
            if isinstance(hub_id, str):
                found.add(hub_id.lower())
    return found


def _check_allowed(request: Request) -> None:
    """Raises ApiError, 403, unless the server's options and the request's key allow downloads."""
    if not context_of(request).options.allow_model_downloads:
        raise ApiError(403, "expected a server that downloads models, got one started without --allow-model-downloads")
    check_for_all_models(request.state.key)


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


def _check_room() -> None:
    """Raises ApiError, 429, while as many downloads as there may be go on."""
    if len(_running) >= MAX_PULLS:
        raise ApiError(429, f"expected at most {MAX_PULLS} downloads at once; send the request again later")


async def _pulled(name: str) -> AsyncGenerator[dict[str, Any]]:
    """Yields the progress of a download, which ends when nobody reads it any more.

    Raises:
        ApiError: 404 if the hub has no such model, or cannot be reached; 400 if it lacks what a model needs; 429 if too
            many downloads go on.
    """
    progress = _QueuedProgress(asyncio.get_running_loop())
    yield {"status": "pulling manifest"}
    _check_room()
    started = _POOL.submit(_resolve, name, progress)
    _running.add(started)
    started.add_done_callback(_running.discard)
    work = asyncio.wrap_future(started)

    def end(future: asyncio.Future[None]) -> None:
        if not future.cancelled():
            future.exception()  # read, also where nobody waits for it any more
        progress.queue.put_nowait(None)

    work.add_done_callback(end)
    try:
        while (each := await progress.queue.get()) is not None:
            yield each
        await work
    finally:
        progress.is_cancelled.set()
    yield SUCCESS


def _resolve(name: str, progress: _QueuedProgress) -> None:
    try:
        resolve(name, progress=progress, local_files_only=False)
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
