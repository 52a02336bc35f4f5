"""Requests between Ray's proxy and a replica: limits of head and body, and prefixes.

Plain Python on ASGI, without Ray and jax. A replica runs the server's own application; what the server's protocol class
checks before a request reaches that is checked here, since connections are those of Ray's proxy.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.types import Receive, Scope

from torchax_serve.server.body import read_body
from torchax_serve.server.errors import ApiError, body_limit
from torchax_serve.server.options import ConnectionLimits, ServerOptions

Message = dict[str, Any]

_ONCE = (b"host", b"content-length", b"transfer-encoding", b"authorization", b"content-type")
"""Headers that a request may have once; two of them are read differently by different servers."""
_KEYS = (b"authorization", b"x-api-key")
_BEFORE = ("model", "instructions", "system", "tools")
"""Fields of a body that stand before its prompt in what the model reads, or keep prefixes of others away."""
_PROMPTS = ("messages", "prompt", "input", "query", "content")
THREAD_BYTES = 256 * 1024
"""Bytes of a body from which it is parsed off the event loop."""
MAX_PARSED_BYTES = 8 << 20
"""Bytes of a body up to which it is parsed for its prefix: longer ones are images, files and sound."""
GONE_S = 10.0
"""Seconds that a request has to end when its client has gone."""


def check_head(scope: Scope, limits: ConnectionLimits) -> None:
    """Checks the target and headers of a request.

    Raises:
        ApiError: 400, 413, 414 or 431.
    """
    headers: list[tuple[bytes, bytes]] = list(scope["headers"])
    target = scope.get("raw_path") or scope["path"].encode()
    url_bytes = len(target) + (1 + len(scope["query_string"]) if scope.get("query_string") else 0)
    if url_bytes > limits.max_url_bytes:
        raise ApiError(414, f"expected a URL of at most {limits.max_url_bytes} bytes, got more")
    if len(headers) > limits.max_headers:
        raise ApiError(431, f"expected at most {limits.max_headers} headers, got more")
    if url_bytes + sum(len(name) + len(value) + 4 for name, value in headers) > limits.max_header_bytes:
        raise ApiError(431, f"expected headers of at most {limits.max_header_bytes} bytes, got more")
    given = collections.Counter(name.lower() for name, _ in headers)
    for name in _ONCE:
        if given[name] > 1:
            raise ApiError(400, f"expected one header {name.decode()}, got {given[name]}")
    if given[b"content-length"] and given[b"transfer-encoding"]:
        raise ApiError(400, "expected one of Content-Length and Transfer-Encoding, got both")
    length = next((value for name, value in headers if name.lower() == b"content-length"), b"0")
    if not length.isdigit() or len(length) > 18:
        raise ApiError(400, "expected a Content-Length in digits, got another")
    if int(length) > limits.max_body_bytes:
        raise ApiError(413, body_limit(limits.max_body_bytes))


async def read_request(scope: Scope, receive: Receive, options: ServerOptions) -> dict[str, Any]:
    """Returns a request as it goes to a replica: its scope, body and prefix.

    Raises:
        ApiError: As `check_head`; 408 or 413 for a body that is late or too long.
        ClientDisconnect: The client has gone.
    """
    check_head(scope, options.connection)
    body = await read_body(Request(scope, receive), options)
    return made_request(scope, body, await prefix_of(scope["headers"], body))


def made_request(scope: Mapping[str, Any], body: bytes, prefix: str | None = None) -> dict[str, Any]:
    """Returns a request for a replica, below the application's own route."""
    path, root = scope["path"], scope.get("root_path", "").rstrip("/")
    if root and f"{path}/".startswith(f"{root}/"):
        path = path[len(root) :] or "/"
    kept = {name: scope[name] for name in ("type", "http_version", "method", "query_string") if name in scope}
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    kept |= {"path": path, "raw_path": path.encode(), "root_path": "", "headers": headers}
    kept |= {"scheme": scope.get("scheme", "http"), "client": scope.get("client"), "server": scope.get("server")}
    return {"scope": kept, "body": body, "prefix": prefix}


async def prefix_of(headers: Sequence[tuple[bytes, bytes]], body: bytes) -> str | None:
    """Returns the text by which requests share prefixes; None if there is none."""
    if not body or len(body) > MAX_PARSED_BYTES:
        return None
    if len(body) > THREAD_BYTES:
        return await asyncio.to_thread(prefix_text, headers, body)
    return prefix_text(headers, body)


def prefix_text(headers: Sequence[tuple[bytes, bytes]], body: bytes) -> str | None:
    """Returns key, model, tools and prompt of a body as one text; None of what has no prompt.

    Caches of two API keys share nothing, so that a digest of the key comes first.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return None  # a replica says what is wrong
    if not isinstance(content, dict):
        return None
    prompt = next((content[name] for name in _PROMPTS if content.get(name) is not None), None)
    if prompt is None:
        return None
    keys = [hashlib.sha256(value).hexdigest()[:16] for name, value in headers if name.lower() in _KEYS]
    parts = [*keys, *(content[name] for name in _BEFORE if content.get(name) is not None), prompt]
    return "\n".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts)


async def messages_of(app: Callable[..., Any], request: Mapping[str, Any]) -> AsyncIterator[Message]:
    """Yields the ASGI messages by which an application answers a request.

    Closed before the end, it tells the application that the client has gone, and waits for it.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    has_gone, is_read = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": request["body"], "more_body": False}
        await has_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        await messages.put(dict(message))

    async def run() -> None:
        try:
            await app(dict(request["scope"]), receive, send)
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await task
    finally:
        has_gone.set()
        if not task.done():
            await asyncio.wait({task}, timeout=GONE_S)
        if not task.done():
            task.cancel()


def error_messages(error: ApiError, body: bytes, request_id: str) -> list[Message]:
    """Returns the ASGI messages of an answer with an error."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    headers.append((b"x-request-id", request_id.encode()))
    start = {"type": "http.response.start", "status": error.status, "headers": headers}
    return [start, {"type": "http.response.body", "body": body, "more_body": False}]


def json_messages(content: Any) -> list[Message]:
    """Returns the ASGI messages of an answer that is JSON."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    start = {"type": "http.response.start", "status": 200, "headers": headers}
    return [start, {"type": "http.response.body", "body": body, "more_body": False}]


class _Joined(Collector):
    """Metrics of several replicas, each sample with a label of its replica."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> list[Any]:
        """Returns each metric once, with the samples of all replicas."""
        found: dict[str, Any] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                joined = found.setdefault(family.name, family)
                samples = [each._replace(labels={**each.labels, "replica": replica}) for each in family.samples]
                joined.samples = samples if joined is family else [*joined.samples, *samples]
        return list(found.values())


def joined_metrics(texts: Mapping[str, str]) -> bytes:
    """Returns the metrics of replicas by their name in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Joined(texts))
    return generate_latest(registry)
