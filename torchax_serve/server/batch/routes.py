"""``/v1/files`` and ``/v1/batches``, of a server with a folder for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any, BinaryIO, ClassVar

import pydantic
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from torchax_serve.server.auth import owner_of
from torchax_serve.server.batch.jobs import BatchJobs
from torchax_serve.server.batch.lines import batch_urls
from torchax_serve.server.batch.upload import checked_age, read_upload
from torchax_serve.server.body import read_request
from torchax_serve.server.context import context_of
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.paging import page_of
from torchax_serve.server.request_fields import ApiRequest, honoured

BLOCK_BYTES = 1 << 18
MAX_FILES_SHOWN = 10_000
MAX_PAIRS, MAX_NAME_CHARS, MAX_TEXT_CHARS = 16, 64, 512
"""Bounds of `metadata`."""


class BatchCreateRequest(ApiRequest):
    """Body of ``POST /v1/batches``."""

    routes: ClassVar[tuple[str, ...]] = ("/v1/batches",)
    input_file_id: Annotated[str, honoured("a file of requests, as POST /v1/files answers it")]
    endpoint: Annotated[str, honoured("the route that all lines name, such as `/v1/chat/completions`")]
    completion_window: Annotated[
        str, honoured("time in which it is to be done, such as `24h`; what is not done then is left out")
    ]
    metadata: Annotated[
        dict[str, str] | None,
        pydantic.Field(max_length=MAX_PAIRS),
        honoured("at most 16 texts by name, repeated in the batch"),
    ] = None
    output_expires_after: Annotated[
        dict[str, Any] | None,
        honoured("`anchor`: `created_at`; `seconds` after which its files are dropped, at most `--stored-file-ttl`"),
    ] = None


async def create_file(request: Request) -> Response:
    """Stores a file of requests."""
    jobs = _jobs(request)
    context = context_of(request)
    context.refuse_late()
    owner = owner_of(request.state.key)
    return JSONResponse((await read_upload(request, jobs.files, owner, context.options.connection)).shown())


async def list_files(request: Request) -> Response:
    """Lists the files of the request's key, the newest first."""
    purpose = request.query_params.get("purpose")
    if purpose not in (None, "batch", "batch_output"):
        raise bad_request("purpose: expected batch or batch_output, got another", "purpose", "invalid_value")
    found = await asyncio.to_thread(_jobs(request).files.list, owner_of(request.state.key))
    shown = [each.shown() for each in found if purpose in (None, each.purpose)]
    return JSONResponse(page_of(request, shown, default=MAX_FILES_SHOWN, most=MAX_FILES_SHOWN))


async def get_file(request: Request) -> Response:
    """Returns what is known of a file."""
    file = _jobs(request).files.get(owner_of(request.state.key), request.path_params["file_id"])
    return JSONResponse(file.shown())


async def delete_file(request: Request) -> Response:
    """Deletes a file that no batch reads."""
    file_id = request.path_params["file_id"]
    await asyncio.to_thread(_jobs(request).files.delete, owner_of(request.state.key), file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


async def get_file_content(request: Request) -> Response:
    """Returns the content of a file."""
    files, owner = _jobs(request).files, owner_of(request.state.key)
    file, content = await asyncio.to_thread(files.open, owner, request.path_params["file_id"])
    headers = {
        "Content-Length": str(file.num_bytes),
        "Content-Disposition": f'attachment; filename="{file.id}.jsonl"',
        "X-Content-Type-Options": "nosniff",
    }
    return StreamingResponse(_blocks(content), headers=headers, media_type="application/octet-stream")


async def create_batch(request: Request) -> Response:
    """Begins a batch: the requests of a file, answered when nothing else waits."""
    jobs = _jobs(request)
    context = context_of(request)
    context.refuse_late()
    body = await read_request(request, context.options, BatchCreateRequest)
    urls = batch_urls(request.scope["app"].routes)
    if body.endpoint not in urls:
        message = f"endpoint: expected one of {', '.join(urls)}, got {body.endpoint[:100]!r}"
        raise bad_request(message, "endpoint", "invalid_value")
    for name, text in (body.metadata or {}).items():
        if len(name) > MAX_NAME_CHARS or len(text) > MAX_TEXT_CHARS:
            message = f"metadata: expected names of at most {MAX_NAME_CHARS} characters and texts of at most "
            raise bad_request(f"{message}{MAX_TEXT_CHARS}, got longer ones", "metadata", "invalid_value")
    age_s, given = None, body.output_expires_after
    if given is not None:
        age_s = checked_age(given, "output_expires_after", jobs.files.limits.max_age_s)
    batch = await asyncio.to_thread(
        jobs.create,
        owner_of(request.state.key),
        body.endpoint,
        body.input_file_id,
        body.completion_window,
        body.metadata,
        age_s,
    )
    return JSONResponse(batch.shown())


async def list_batches(request: Request) -> Response:
    """Lists the batches of the request's key, the newest first."""
    found = _jobs(request).list(owner_of(request.state.key))
    return JSONResponse(page_of(request, [each.shown() for each in found]))


async def get_batch(request: Request) -> Response:
    """Returns a batch, with how far it is."""
    batch = _jobs(request).get(owner_of(request.state.key), request.path_params["batch_id"])
    return JSONResponse(batch.shown())


async def cancel_batch(request: Request) -> Response:
    """Ends a batch, whose answers so far stay."""
    jobs = _jobs(request)
    batch = await asyncio.to_thread(jobs.cancel, owner_of(request.state.key), request.path_params["batch_id"])
    return JSONResponse(batch.shown())


async def _blocks(content: BinaryIO) -> AsyncGenerator[bytes]:
    with content:
        while block := await asyncio.to_thread(content.read, BLOCK_BYTES):
            yield block


def _jobs(request: Request) -> BatchJobs:
    """Returns the batches; raises ApiError, 404, for a server that has none."""
    jobs = context_of(request).jobs
    if jobs is None:
        raise ApiError(
            404, "expected a server with a folder for files and batches; start it with --file-storage-path FOLDER"
        )
    return jobs
