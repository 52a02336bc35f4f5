"""Requests to an ASGI application in the same process, without a socket."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from torchax_serve.server.auth import CALLER
from torchax_serve.server.errors import ApiError, bad_request
from torchax_serve.server.key_limits import ApiKey

JSON_TYPE = "application/json"


class InProcessAnswer(NamedTuple):
    """Answer of an application.

    Attributes:
        status: HTTP status.
        request_id: Its header X-Request-Id.
        body: JSON decoded; text of another type.
    """

    status: int
    request_id: str
    body: Any


async def post(
    app: ASGIApp,
    path: str,
    body: Mapping[str, Any],
    *,
    key: ApiKey | None = None,
    gone: asyncio.Event | None = None,
) -> InProcessAnswer:
    """Sends a POST request with a JSON body to `app` and returns the answer.

    The routes of audio get a form, as over HTTP: with the file of the data URL `file_url`.

    Args:
        app: The application.
        path: Route.
        body: Body.
        key: Key that the request is of.
        gone: Set when nobody waits for the answer any more: it is ended, and its status may be 0.
    """
    try:
        content, content_type = _form(body) if path.startswith("/v1/audio/") else (json.dumps(body).encode(), JSON_TYPE)
    except ApiError as error:
        return InProcessAnswer(error.status, "", error.content())
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(content)).encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
        CALLER: key,
    }
    is_read, gone = False, gone or asyncio.Event()
    answer = _Collected()

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await gone.wait()  # whoever waits for that is cancelled, as long as the client does not go
            return {"type": "http.disconnect"}
        is_read = True
        return {"type": "http.request", "body": content, "more_body": False}

    await app(scope, receive, answer.send)
    return answer.decoded()


class _Collected:
    """Messages that an application sends."""

    def __init__(self) -> None:
        self._status = 0
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        """Takes a message."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            self._parts.append(message.get("body", b""))

    def decoded(self) -> InProcessAnswer:
        """Returns the answer that was sent."""
        content = b"".join(self._parts)
        is_json = self._headers.get("content-type", "").startswith(JSON_TYPE)
        body = json.loads(content) if is_json else content.decode()
        return InProcessAnswer(self._status, self._headers.get("x-request-id", ""), body)


def _form(body: Mapping[str, Any]) -> tuple[bytes, str]:
    """Returns a request of audio as a form, and its type.

    Raises:
        ApiError: 400 without a data URL as `file_url`.
    """
    boundary = uuid.uuid4().hex
    parts: list[bytes] = []

    def add(name: str, value: bytes, further: str = "") -> None:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{further}\r\n\r\n'
        parts.extend((head.encode(), value, b"\r\n"))

    for name, value in body.items():
        if name == "file_url":
            continue
        if not (name.replace("_", "").isalnum() and name.isascii()) or name == "file":
            raise bad_request(f"body: expected fields of the route with file_url for file, got {name[:60]!r}")
        several = isinstance(value, list)
        for each in value if several else [value]:
            text = each if isinstance(each, str) else json.dumps(each)
            add(f"{name}[]" if several else name, text.encode("utf-8", "surrogatepass"))
    add("file", _file(body.get("file_url")), '; filename="audio"')
    return b"".join(parts) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def _file(url: Any) -> bytes:
    head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if comma and head.startswith("data:") and head.endswith(";base64"):
        try:
            return base64.b64decode(data, validate=True)
        except binascii.Error:
            pass
    raise bad_request("file_url: expected data:audio/...;base64,..., got another", "file_url", "invalid_value")
