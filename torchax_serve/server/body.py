"""Reads the bodies of requests: JSON, bounded in bytes, nesting and the size of numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from torchax_serve.server.errors import ApiError, bad_request, body_limit
from torchax_serve.server.options import ServerOptions
from torchax_serve.server.request_fields import ApiRequest
from torchax_serve.validation.argument_checks import short_repr
from torchax_serve.validation.bounded_json import parse_json

MAX_INTEGER = 2**64 - 1
"""Largest integer in a request: the largest seed."""
THREAD_BYTES = 256 * 1024
"""Bytes of a body from which it is parsed off the event loop."""

Body = TypeVar("Body", bound=ApiRequest)


async def read_request(request: Request, options: ServerOptions, kind: type[Body]) -> Body:
    """Returns the body of a request, which is JSON.

    Raises:
        ApiError: 415 for another type, 413, 408 or 400.
        ClientDisconnect: The client has gone.
    """
    check_type(request, "application/json")
    body = await read_body(request, options)
    if len(body) > THREAD_BYTES:
        return await asyncio.to_thread(lambda: kind.parse(parse_body(body, options)))
    return kind.parse(parse_body(body, options))


def check_type(request: Request, expected: str) -> None:
    """Raises ApiError, 415, unless a body has the type `expected` and comes as it is."""
    given = request.headers.get("content-type", "")
    kind, _, parameters = given.partition(";")
    charset = parameters.partition("charset=")[2].strip(' "').lower()
    if kind.strip().lower() != expected or (expected == "application/json" and charset not in ("", "utf-8", "utf8")):
        raise ApiError(415, f"expected the header Content-Type: {expected}, got {short_repr(given or 'none')}")
    coding = request.headers.get("content-encoding", "identity").lower()
    if coding != "identity":
        raise ApiError(415, f"expected a body as it is, got Content-Encoding: {coding[:40]}")


async def read_body(request: Request, options: ServerOptions) -> bytes:
    """Returns the body of a request.

    Raises:
        ApiError: 413 if it is too long, 408 if it has not come in time.
        ClientDisconnect: The client has gone.
    """
    limits = options.connection
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > limits.max_body_bytes:
                    raise too_large(limits.max_body_bytes)
    except TimeoutError as error:
        raise ApiError(
            408,
            f"expected the body within {limits.body_timeout_s:g} s; send it at once",
            headers={"Connection": "close"},
        ) from error
    return bytes(body)


def too_large(max_body_bytes: int) -> ApiError:
    """Returns the answer to a body that is too long."""
    return ApiError(413, body_limit(max_body_bytes), headers={"Connection": "close"})


def parse_body(body: bytes, options: ServerOptions) -> Any:
    _check_num_values(body, options.request.max_json_values)
    try:
        value = parse_json(body, max_bytes=options.connection.max_body_bytes, max_depth=options.request.max_json_depth)
    except ValueError as error:
        raise bad_request(str(error), code="invalid_json") from error
    check_scalars(value)
    return value


def _check_num_values(body: bytes, most: int) -> None:
    """Raises ApiError, 400, for a body with too many values.

    The parser holds Python's lock, and with it the event loop, for as long as it takes for all of them. A value needs a
    comma, which does not count inside of a text.
    """
    if body.count(b",") <= most:
        return
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    is_too_long = bare.count(b'"') > 2 * most
    if is_too_long or sum(part.count(b",") for part in bare.split(b'"')[::2]) > most:
        raise bad_request(f"expected JSON of at most {most} values, got more", code="invalid_json")


def check_scalars(value: Any) -> None:
    """Raises ApiError, 400, for integers of more than 64 bits and for text that is not Unicode."""
    for name, each in _scalars(value):
        if isinstance(each, str):
            try:
                each.encode()
            except UnicodeEncodeError as error:
                raise bad_request("expected text, got half of a surrogate pair", name, "invalid_value") from error
        elif isinstance(each, int) and abs(each) > MAX_INTEGER:
            raise bad_request("expected whole numbers of at most 64 bits, got a larger one", name, "invalid_value")


def _scalars(value: Any) -> Iterator[tuple[str | None, Any]]:
    """Yields texts and numbers, keys included, with the field of the body that has them."""
    waiting: list[tuple[str | None, Any]] = [(None, value)]
    while waiting:
        name, each = waiting.pop()
        if isinstance(each, dict):
            for key, inner in each.items():
                yield name, key
                waiting.append((name or _shown(key), inner))
        elif isinstance(each, list):
            waiting.extend((name, inner) for inner in each)
        else:
            yield name, each


def _shown(key: str) -> str:
    return key[:100].encode("utf-8", "replace").decode()


__all__ = ["ClientDisconnect", "check_scalars", "check_type", "read_body", "read_request", "too_large"]
