"""Errors in the form of the interface that was asked."""

from __future__ import annotations

import json

from torchax_serve.server import inference_protocol
from torchax_serve.server.anthropic import errors as anthropic_errors
from torchax_serve.server.errors import ApiError
from torchax_serve.server.ollama import errors as ollama_errors


def error_body(error: ApiError, path: str, request_id: str) -> bytes:
    """Returns the body of an error in the form of the interface that was asked.

    Args:
        error: The error.
        path: Path of the request, without its query.
        request_id: Id of the request, which Anthropic's form has.
    """
    if anthropic_errors.is_for(path):
        return json.dumps(anthropic_errors.error_content(error, request_id)).encode()
    for form in (ollama_errors, inference_protocol):
        if form.is_for(path):
            return json.dumps(form.error_content(error)).encode()
    return error.body()
