"""``torchax-serve ps``: shows the models that a server has loaded."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.downloads import size_of
from torchax_serve.cli.shared.tables import console

TIMEOUT_S = 10.0
"""Seconds that the server may take."""


def ps(
    url: Annotated[
        str, typer.Option("--url", envvar="TORCHAX_SERVE_URL", help="Address of the server.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="TORCHAX_SERVE_CLIENT_KEY", show_default=False, help="Key of the server."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Show the models that a running server has loaded: sizes, and the tokens of a request.

    torchax-serve ps --url http://127.0.0.1:8000
    """
    found = _asked(url, api_key)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for heading, justify in (
        ("model", "left"),
        ("size", "right"),
        ("tokens of a request", "right"),
        ("weights", "left"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for each in found["models"]:
        length = str(each["context_length"] or "any")
        table.add_row(each["name"], size_of(each["size"]), length, each["details"]["quantization_level"])
    console(200).print(table)


def _asked(url: str, api_key: str | None) -> dict[str, Any]:
    """Returns the server's answer.

    Raises:
        InvalidArgumentError: Nobody answers there, another program does, or the key is wrong.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    if not url.startswith(("http://", "https://")):
        raise InvalidArgumentError(f"--url: expected http://HOST:PORT, got {url!r}")
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/api/ps", headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            found = json.loads(answer.read())
        if not isinstance(found, dict) or "models" not in found:
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


COMMAND = Command("ps", ps, position=82)
