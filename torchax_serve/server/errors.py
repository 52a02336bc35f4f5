"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_adapters.errors import (
    ChatTemplateError,
    DeadlineError,
    InvalidArgumentError,
    NoTokenLeftError,
    OutOfMemoryError,
    QueueDeadlineError,
    QueueFullError,
    QueueTokensError,
    RequestError,
    TorchaxServeError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)

MAX_MESSAGE_CHARS = 2000
"""Longest message of an error, in characters."""

_BLAMES_REQUEST = (InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError, ChatTemplateError)

_FIELD = re.compile(r"[a-z_]+(\[\d+\]|\.[a-z_]+)*:")
"""The field that a message begins with."""

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_CODES: Mapping[int, str] = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "conflict",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    431: "headers_too_large",
    500: "internal_error",
    503: "service_unavailable",
    504: "deadline_exceeded",
}


class ApiError(Exception):
    """An answer with an error.

    Attributes:
        status: HTTP status.
        message: Text: expected, got, remedy.
        param: Field of the request with the error; None for none.
        code: Error code for programs, a string or None.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = " ".join(message.encode("utf-8", "backslashreplace").decode().split())[:MAX_MESSAGE_CHARS]
        self.param = param
        self.code = code or _CODES.get(status)
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", "1")

    @property
    def type(self) -> str:
        """OpenAI's kind of error, which follows from the status."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def content(self) -> dict[str, Any]:
        """Returns the body of the answer."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        """Returns the body of the answer as JSON."""
        return json.dumps(self.content()).encode()


_PHRASES: Mapping[str, str] = {
    "None leaves it unset": "leave it out",
    "for greedy decoding set do_sample=False (in SamplingParams: temperature=0)": "0 is greedy",
    "0 gives that of the sampled token only, -1 all, None none": "0 gives that of the sampled token only, -1 all",
    "0 gives those of the prompt's tokens only, -1 all, None none": "0 gives those of the prompt's tokens only, -1 all",
    "EngineOptions(max_logprobs=...) allows more": "--max-logprobs allows more",
    "pass truncate=True": "set truncate_prompt_tokens to -1",
}
"""Advice that only makes sense in Python, as requests have it."""


def in_words_of_requests(message: str) -> str:
    """Returns a message about a Python argument with advice about fields in its place."""
    for phrase, ours in _PHRASES.items():
        message = message.replace(phrase, ours)
    return message


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Returns an error with status 400."""
    return ApiError(400, message, param=param, code=code)


def api_error_of(error: BaseException) -> ApiError:
    """Returns the answer to an error of the model or the engine.

    Nothing of an unexpected error is shown.

    The `param` of an error about a Python argument is its text before the first colon.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueTokensError):
        return ApiError(
            429,
            "expected room for the prompt among the tokens that wait, found too little; send the request again later",
        )
    if isinstance(error, QueueFullError):
        return ApiError(429, "expected room in the queue of requests, found it full; send the request again later")
    if isinstance(error, OutOfMemoryError):
        return ApiError(503, "expected enough memory for the request, found too little; send it again later")
    if isinstance(error, ChatTemplateError):
        return bad_request(str(error), "messages", "invalid_value")
    if isinstance(error, _BLAMES_REQUEST):
        named = _FIELD.match(str(error))
        return bad_request(in_words_of_requests(str(error)), named and named[0].removesuffix(":"), "invalid_value")
    if isinstance(error, QueueDeadlineError):
        return ApiError(
            503,
            "expected the request to begin within the time limit for waiting, which has passed; send it again later",
            code="queue_deadline_exceeded",
        )
    if isinstance(error, DeadlineError):
        return ApiError(504, "expected an answer within the time limit of requests, which has passed; ask for less")
    if isinstance(error, NoTokenLeftError):
        return _no_token_left(error)
    if isinstance(error, RequestError):
        return ApiError(500, "the request failed while it ran; send it again")
    if isinstance(error, TorchaxServeError):
        return ApiError(
            503, "expected a model that takes requests, got one that does not; send the request again later"
        )
    return ApiError(500, "the server failed to answer; the log has the reason under the request's id")


_FIELDS: Mapping[str, str] = {
    "masks": "structured output",
    "bad_words_ids": "bad_words",
    "min_new_tokens": "min_tokens",
}
"""Names of options of the engine as requests spell them."""


def _no_token_left(error: NoTokenLeftError) -> ApiError:
    """Returns the answer to a request whose fields forbid every token."""
    names = [_FIELDS.get(name, name) for name in error.options]
    reason = "" if error.reason is None else f" ({error.reason})"
    return bad_request(
        f"{', '.join(names)}: expected a token that may follow {error.num_tokens} of the answer, and "
        f"{'they forbid all together' if len(names) > 1 else 'it allows none'}{reason}; leave one of them out, or "
        "allow more",
        next((name for name in names if name != _FIELDS["masks"]), None),
        "invalid_value",
    )


def body_limit(max_bytes: int) -> str:
    """Returns the message of a body with more bytes, status 413."""
    return f"expected a body of at most {max_bytes} bytes, got more; shorten it"


def where_of(error: BaseException) -> str:
    """Returns the type of an error and where it was raised, for the log.

    Its message may have parts of a prompt.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}" if frames else "no frame"
    cause = "" if error.__cause__ is None else f", from {where_of(error.__cause__)}"
    return f"{type(error).__name__} at {where}{cause}"
