"""``torchax-serve ps``: shows the models that a server has loaded."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.downloads import size_of
from torchax_serve.cli.shared.server_client import DEFAULT_URL, ClientKey, ServerUrl, asked
from torchax_serve.cli.shared.tables import console


def ps(
    url: ServerUrl = DEFAULT_URL,
    api_key: ClientKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Show the models that a running server has loaded: sizes, and the tokens of a request.

    torchax-serve ps --url http://127.0.0.1:8000
    """
    found = asked(url, "/api/ps", api_key)
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


COMMAND = Command("ps", ps, position=82)
