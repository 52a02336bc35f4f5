"""Lines of a batch file: requests in OpenAI's format, and the lines that answer them."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from torchax_serve.validation.argument_checks import short_repr
from torchax_serve.validation.bounded_json import parse_json

KEYS = ("custom_id", "method", "url", "body")
NOT_IN_BATCHES = frozenset(
    {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/models/load", "/models/unload", "/api/pull"}
    | {"/start_profile", "/stop_profile", "/profile", "/v1/files", "/v1/batches"}
)
"""Routes that change or measure a running server."""
MAX_CUSTOM_ID_CHARS = 512


@dataclasses.dataclass(frozen=True)
class BatchRequest:
    """A request of a batch.

    Attributes:
        line: Number of its line, from 1.
        custom_id: The file's name for it, found again in its answer.
        url: Route of the server.
        body: Its JSON body.
    """

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]


def batch_urls(routes: Iterable[tuple[str, str, Any]]) -> tuple[str, ...]:
    """Returns the routes that a line may name, of those with method, path and function."""
    return tuple(
        path for method, path, _ in routes if method == "POST" and path not in NOT_IN_BATCHES and "{" not in path
    )


class LineError(Exception):
    """A line that is no request.

    Attributes:
        line: Its number.
        message: Text: expected, got, remedy.
        custom_id: Its `custom_id`, if it could be read.
    """

    def __init__(self, line: int, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.line, self.message, self.custom_id = line, message, custom_id


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yields number and content of each line that is not blank; None for a longer one."""
    number = 0
    while part := file.readline(max_bytes + 1):
        number += 1
        if len(part) <= max_bytes or part.endswith(b"\n"):
            if part.strip():
                yield number, part
            continue
        while part and not part.endswith(b"\n"):
            part = file.readline(max_bytes)
        yield number, None


def parse_line(
    number: int, content: bytes | None, *, max_bytes: int, max_depth: int, urls: Sequence[str]
) -> BatchRequest:
    """Returns the request in a line.

    Raises:
        LineError: It is none, or its route is none of `urls`.
    """
    if content is None:
        raise LineError(number, f"expected at most {max_bytes} bytes, got more; shorten the request")
    try:
        # One level more than a body may have.
        line = parse_json(content.removeprefix(b"\xef\xbb\xbf"), max_bytes=len(content), max_depth=max_depth + 1)
    except ValueError as error:
        raise LineError(number, f"expected a JSON object on a line of its own, {_lowered(error)}") from error
    if not isinstance(line, dict):
        raise LineError(number, f"expected a JSON object with {', '.join(KEYS)}, got {short_repr(line)}")
    given = line.get("custom_id")
    if not (isinstance(given, str) and 0 < len(given) <= MAX_CUSTOM_ID_CHARS):
        wanted = f"a text of 1 to {MAX_CUSTOM_ID_CHARS} characters"
        raise LineError(number, f"custom_id: expected {wanted}, got {_shown(line, 'custom_id')}")
    if unknown := [key for key in line if key not in KEYS]:
        raise LineError(
            number, f"expected the keys {', '.join(KEYS)}, got also {short_repr(unknown[0])}; leave it out", given
        )
    if line.get("method") != "POST":
        raise LineError(number, f"method: expected 'POST', got {_shown(line, 'method')}", given)
    if line.get("url") not in urls:
        wanted = urls[0] if len(urls) == 1 else f"one of {', '.join(urls)}"
        raise LineError(number, f"url: expected {wanted}, got {_shown(line, 'url')}", given)
    body = line.get("body")
    if not isinstance(body, dict):
        raise LineError(number, f"body: expected a JSON object, got {_shown(line, 'body')}", given)
    if body.get("stream"):
        message = "body.stream: expected false, got true; an answer is one object of the output: leave it out"
        raise LineError(number, message, given)
    return BatchRequest(number, given, line["url"], body)


def answer_line(
    request: BatchRequest, status: int, request_id: str, body: Any, line_id: str | None = None
) -> dict[str, Any]:
    """Returns the line of an answer of the server, which may be an error of it."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": line_id or _id(), "custom_id": request.custom_id, "response": response, "error": None}


def error_line(error: LineError) -> dict[str, Any]:
    """Returns the line that stands for a line without a request."""
    message = f"line {error.line}: {error.message}"
    return {
        "id": _id(),
        "custom_id": error.custom_id,
        "response": None,
        "error": {"code": "invalid_line", "message": message, "line": error.line},
    }


def encoded(line: dict[str, Any]) -> bytes:
    """Returns a line as it is written; half of a surrogate pair stays an escape."""
    text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def _shown(line: dict[str, Any], key: str) -> str:
    return short_repr(line[key]) if key in line else "none"


def _lowered(error: ValueError) -> str:
    """Returns what came in place of JSON, as `parse_json` says it."""
    return str(error).removeprefix("expected JSON, ").replace("at line 1, column", "at column")


class UsageCount:
    """Tokens of a batch's answers so far, as OpenAI's batch object counts them."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"), 0)

    def add(self, body: Any) -> None:
        """Counts the `usage` of an answer, of chat completions or of responses, if there is one."""
        usage = body.get("usage") if isinstance(body, dict) else None
        if not isinstance(usage, dict):
            return
        for name, other in (("input", "prompt"), ("output", "completion")):
            word = name if f"{name}_tokens" in usage else other
            self._counts[f"{name}_tokens"] += usage.get(f"{word}_tokens") or 0
            detail = {"input": "cached_tokens", "output": "reasoning_tokens"}[name]
            self._counts[detail] += (usage.get(f"{word}_tokens_details") or {}).get(detail) or 0

    def shown(self) -> dict[str, Any]:
        """Returns the field `usage` of a batch."""
        counts = self._counts
        return {
            "input_tokens": counts["input_tokens"],
            "input_tokens_details": {"cached_tokens": counts["cached_tokens"]},
            "output_tokens": counts["output_tokens"],
            "output_tokens_details": {"reasoning_tokens": counts["reasoning_tokens"]},
            "total_tokens": counts["input_tokens"] + counts["output_tokens"],
        }
