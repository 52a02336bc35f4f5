"""``torchax-serve list``: lists the models of the hub that are on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from torchax_serve.cli.models import print_downloaded
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.downloads import CacheDir


def list_downloaded(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    cache_dir: CacheDir = None,
) -> None:
    """List the models of the hub that are on this machine, as models --downloaded does.

    torchax-serve list
    """
    print_downloaded(cache_dir, as_json=as_json)


COMMAND = Command("list", list_downloaded, position=81)
