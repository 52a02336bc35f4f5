"""Errors in Ollama's form: ``{"error": "..."}``."""

from __future__ import annotations

from typing import Any

from torchax_serve.server.errors import ApiError

ROUTES = "/api/"
"""Beginning of the paths whose errors have this form."""


def error_content(error: ApiError) -> dict[str, Any]:
    """Returns the body of an error."""
    return {"error": error.message}


def is_for(path: str) -> bool:
    """Returns whether errors of a path have this form."""
    return path.startswith(ROUTES)
