"""Asks a running server, for commands that show what it does."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError

TIMEOUT_S = 10.0
"""Seconds that the server may take."""

ServerUrl = Annotated[str, typer.Option("--url", envvar="TORCHAX_SERVE_URL", help="Address of the server.")]
ClientKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="TORCHAX_SERVE_CLIENT_KEY", show_default=False, help="Key of the server."),
]
DEFAULT_URL = "http://127.0.0.1:8000"


def is_there(url: str) -> bool:
    """Returns whether somebody answers at an address.

    Raises:
        InvalidArgumentError: It is none.
    """
    _check_url(url)
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/livez", timeout=TIMEOUT_S):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except (OSError, http.client.HTTPException):
        return False


def asked(url: str, path: str, api_key: str | None, field: str = "models") -> dict[str, Any]:
    """Returns a server's answer, an object with a list of models in `field`.

    Raises:
        InvalidArgumentError: Nobody answers there, another program does, or the key is wrong.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    _check_url(url)
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            found = json.loads(answer.read())
        if not isinstance(found, dict) or field not in found:
            raise ValueError("no list of models")
        return found
    except urllib.error.HTTPError as error:
        with error:
            remedy = "; give --api-key" if error.code == 401 else ""
            raise InvalidArgumentError(
                f"--url: expected the models of {url}, got status {error.code}{remedy}"
            ) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise InvalidArgumentError(
            f"--url: expected a server at {url}, got none ({error}); torchax-serve serve starts one"
        ) from error


def _check_url(url: str) -> None:
    """Raises InvalidArgumentError for an address that no server can have."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        is_url = False
    if not is_url:
        raise InvalidArgumentError(f"--url: expected http://HOST:PORT, got {url!r}")
