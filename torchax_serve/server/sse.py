"""Server-sent events, and the end of work whose client has gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from torchax_serve.server.errors import ApiError

Result = TypeVar("Result")

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
EVENTS = b"text/event-stream; charset=utf-8"
_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(content: Any) -> bytes:
    """Returns an event with `content` as JSON.

    Halves of surrogate pairs, which have no bytes, are question marks.
    """
    return b"data: " + _ENCODER.encode(content).encode("utf-8", "replace") + b"\n\n"


def named_event(content: Mapping[str, Any]) -> bytes:
    """Returns an event with `content` as JSON, named by its `type`."""
    return f"event: {content['type']}\n".encode() + event(content)


def _error_event(error: ApiError) -> bytes:
    return event(error.content())


class EventStream:
    """ASGI response of events as they come, with a sign of life per `keep_alive_s` of silence.

    A client that goes ends the iterator within the step that runs. An error after the first event is an event of its
    own, after which the stream ends.

    Args:
        events: Encoded events.
        keep_alive_s: Seconds of silence after which a sign of life is sent.
        sign: That sign: a comment, or an event without a meaning; None where the form has none.
        failed: Returns the events of an error.
        media_type: Header Content-Type.
        headers: Further headers.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        keep_alive_s: float = 0.0,
        sign: bytes | None = COMMENT,
        failed: Callable[[ApiError], bytes] = _error_event,
        media_type: bytes = EVENTS,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self._events, self._keep_alive_s, self._sign, self._failed = events, keep_alive_s, sign, failed
        self._headers = [(b"content-type", media_type), *_HEADERS, *headers]
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        with contextlib.suppress(ClientDisconnect):
            await until_disconnect(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(self._headers)})
        self._sent_s = time.monotonic()
        comments = asyncio.create_task(self._send_comments(send))
        try:
            async with contextlib.aclosing(self._events) as events:
                async for each in events:
                    self._sent_s = time.monotonic()
                    await send({"type": "http.response.body", "body": each, "more_body": True})
        except Exception as error:
            scope["state"]["error"] = error
            body = self._failed(scope["app"].context.error_of(error))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            comments.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_comments(self, send: Send) -> None:
        while self._sign is not None:
            rest_s = self._sent_s + self._keep_alive_s - time.monotonic()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
                continue
            self._sent_s = time.monotonic()
            await send({"type": "http.response.body", "body": self._sign, "more_body": True})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`, which is cancelled when the client disconnects.

    The body must have been read.

    Raises:
        ClientDisconnect: It did.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, watcher):
            if not each.done():
                each.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
