"""Errors in Anthropic's form: ``{"type": "error", "error": {...}, "request_id": ...}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchax_serve.server.errors import ApiError

ROUTES = "/v1/messages"
"""Beginning of the paths whose errors have this form."""
HEADERS = ("anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access")
"""Headers of this interface, which browsers may send; none of them changes an answer."""
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_content(error: ApiError, request_id: str) -> dict[str, Any]:
    """Returns the body of an error."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.param and not message.startswith(error.param):
        message = f"{error.param}: {message}"
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {error.message}"  # by these words clients shorten the conversation
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def is_for(path: str) -> bool:
    """Returns whether errors of a path have this form."""
    return path == ROUTES or path.startswith(f"{ROUTES}/")
