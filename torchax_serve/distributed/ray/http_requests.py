"""Checks HTTP requests for the ingress, before they reach a replica.

Plain Python on ASGI, without Ray and jax. Errors have the form of OpenAI's interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from model_adapters.errors import (
    ChatTemplateError,
    InvalidArgumentError,
    QueueFullError,
    TorchaxServeError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from torchax_serve.distributed.ray import openai_fields
from torchax_serve.distributed.ray.openai_fields import CHAT, own_fields
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.validation.argument_hints import SAMPLING
from torchax_serve.validation.bounded_json import parse_json

KNOWN = frozenset({"prompt", "messages"}) | {field.name for field in dataclasses.fields(SamplingParams)}
"""Fields of a request; those of the server that are taken, too, are in `openai_fields`."""
BODY_TIMEOUT_S = 30.0
"""Time limit for the body of a request, in seconds."""
BLAMES_REQUEST = (InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError, ChatTemplateError)
"""Errors caused by the request: every replica would raise them."""
MAX_INTEGER = 2**64 - 1
"""Largest integer in a request: the largest seed."""


class BadHttpRequest(Exception):
    """Request that is refused.

    Attributes:
        status: HTTP status.
        message: Text: expected, got, remedy.
        code: Error code, for programs.
        param: Field of the body with the error; None for none.
        headers: Headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    def content(self) -> dict[str, Any]:
        """Returns the body of the answer, in the form of OpenAI's interface."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def check_head(scope: Mapping[str, Any], max_body_bytes: int) -> None:
    """Checks path, method and headers of a request.

    Args:
        scope: ASGI's.
        max_body_bytes: that a body may have.

    Raises:
        RequestError: 404, 405, 413, 415, or 400 for a length that is none.
    """
    path, root = scope["path"], scope.get("root_path", "").rstrip("/")
    if root and f"{path}/".startswith(f"{root}/"):
        path = path[len(root) :]
    if path.strip("/"):
        raise BadHttpRequest(404, f"expected the path {root or '/'}, got {scope['path'][:200]!r}", "unknown_url")
    if scope["method"] != "POST":
        raise BadHttpRequest(
            405, f"expected POST, got {scope['method'][:20]!r}", "method_not_allowed", headers={"Allow": "POST"}
        )
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    kind, _, parameters = headers.get("content-type", "none").partition(";")
    charset = parameters.partition("charset=")[2].strip(' "').lower()
    if kind.strip().lower() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise BadHttpRequest(
            415,
            f"expected the header Content-Type: application/json, got {headers.get('content-type', 'none')[:100]!r}",
            "unsupported_media_type",
        )
    if (coding := headers.get("content-encoding", "identity").lower()) != "identity":
        raise BadHttpRequest(
            415, f"expected a body as it is, got Content-Encoding: {coding[:40]}", "unsupported_media_type"
        )
    length = headers.get("content-length")
    if length is not None and not (length.isascii() and length.isdigit()):
        raise BadHttpRequest(400, f"expected a Content-Length in digits, got {length[:40]!r}", "invalid_header")
    if length is not None and (len(length) > 18 or int(length) > max_body_bytes):
        raise _too_large(max_body_bytes)


async def read_body(parts: AsyncIterator[bytes], max_body_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """Returns the body of a request, however it was cut.

    Raises:
        RequestError: 413 as soon as it is too long, 408 where it has not come within `timeout_s`.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in parts:
                body += part
                if len(body) > max_body_bytes:
                    raise _too_large(max_body_bytes)
    except TimeoutError as error:
        raise BadHttpRequest(408, f"expected the body within {timeout_s:g} s; send it at once", "timeout") from error
    return bytes(body)


def parse_request(body: bytes, max_body_bytes: int) -> dict[str, Any]:
    """Returns the request in a body, checked as far as this is possible without the model.

    Raises:
        RequestError: 400 for what is no JSON object of known fields with values that can be honoured.
    """
    try:
        request = parse_json(body, max_bytes=max_body_bytes)
        if not isinstance(request, dict):
            raise InvalidArgumentError(f"expected a JSON object, got {_json_kind(request)}")
        _check_fields(own_fields(request))
        _check_values(request)
        params_of(request)
    except BadHttpRequest:
        raise
    except (TorchaxServeError, TypeError, ValueError, OverflowError) as error:
        raise bad_request(error) from error
    return request


def params_of(request: Mapping[str, Any]) -> SamplingParams:
    """Returns the sampling parameters of a request.

    Raises:
        InvalidArgumentError: A field is unknown, not exactly one of ``prompt`` and ``messages`` is given, or a value
            cannot be honoured.
    """
    own = own_fields(request)
    _check_fields(own)
    options = {name: value for name, value in own.items() if name not in ("prompt", "messages", *CHAT)}
    return SamplingParams(**{name: _as_option(name, value) for name, value in options.items()})


def bad_request(error: Exception) -> BadHttpRequest:
    """Returns the answer to an error caused by the request, with status 400."""
    message = " ".join(str(error).split())[:2000]
    name = message.partition(":")[0]
    return BadHttpRequest(400, message, param=_known(name))


def answer_to(error: TorchaxServeError) -> BadHttpRequest:
    """Returns the answer to an error of a replica: its cause, and whether a retry may help."""
    message = " ".join(str(error).split())[:2000]
    if isinstance(error, QueueFullError):
        return BadHttpRequest(429, message, "rate_limit_exceeded", headers={"Retry-After": "1"})
    if isinstance(error, BLAMES_REQUEST):
        return bad_request(error)
    return BadHttpRequest(503, message, "unavailable")


async def within(pieces: AsyncIterator[str], timeout_s: float) -> AsyncIterator[str]:
    """Yields pieces of an answer; none may take longer than `timeout_s`.

    Raises:
        RequestError: 504, where one does.
    """
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                piece = await anext(pieces)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            with contextlib.suppress(Exception):
                await pieces.aclose()  # type: ignore[attr-defined]  # ends the request at the replica
            raise BadHttpRequest(
                504, f"expected a piece of the answer within {timeout_s:g} s, got none", "timeout"
            ) from error
        yield piece


def _too_large(max_body_bytes: int) -> BadHttpRequest:
    return BadHttpRequest(
        413,
        f"expected a body of at most {max_body_bytes} bytes, got more; shorten the prompt",
        "request_too_large",
        headers={"Connection": "close"},
    )


def _as_option(name: str, value: Any) -> Any:
    """Converts a field of JSON for `SamplingParams`.

    Token ids as keys of objects are text in JSON.
    """
    if name == "do_sample" and not (value is None or isinstance(value, bool)):
        raise InvalidArgumentError(f"do_sample: expected true or false, got {_json_kind(value)}")
    if name == "logit_bias" and isinstance(value, dict):
        return {int(key) if key.isascii() and key.isdigit() else key: bias for key, bias in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _check_fields(request: Mapping[str, Any]) -> None:
    if unknown := sorted(set(request) - KNOWN - set(CHAT)):
        names = ", ".join(name[:60] for name in unknown[:5])
        renamed = ", ".join(f"{SAMPLING[name]} for {name}" for name in unknown if SAMPLING.get(name) in KNOWN)
        remedy = f"write {renamed}" if renamed else "leave them out"
        raise InvalidArgumentError(f"expected fields out of {', '.join(sorted(KNOWN))}, got {names}; {remedy}")
    if ("prompt" in request) == ("messages" in request):
        raise InvalidArgumentError("expected one of prompt and messages, got both or neither; leave one out")


def _check_values(request: dict[str, Any]) -> None:
    """Checks prompt and messages, and every number and text in the request."""
    prompt, messages = request.get("prompt", ""), request.get("messages", [{}])
    is_ids = isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise InvalidArgumentError(f"prompt: expected a text or token ids, got {_json_kind(prompt)}")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise InvalidArgumentError("messages: expected a non-empty array of objects; such as {role, content}")
    for name, value in request.items():
        for each in _scalars(value):
            if isinstance(each, str):
                try:
                    each.encode()
                except UnicodeEncodeError as error:
                    raise BadHttpRequest(
                        400, f"{name[:60]!r}: expected text, got half of a surrogate pair", param=_known(name)
                    ) from error
            elif isinstance(each, int) and abs(each) > MAX_INTEGER:
                raise BadHttpRequest(
                    400, f"{name[:60]}: expected whole numbers of at most 64 bits, got a larger one", param=_known(name)
                )


def _known(name: str) -> str | None:
    return name if name in KNOWN or name in openai_fields.KNOWN else None


def _scalars(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += [*each, *each.values()]
        elif isinstance(each, list):
            waiting += each
        else:
            yield each


def _json_kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
