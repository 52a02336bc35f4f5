"""``torchax-serve rm``: deletes a model that was downloaded."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.downloads import delete_download, find_download, find_revision
from model_adapters.loading.model_source import parse_name
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.downloads import CacheDir, ago, size_of
from torchax_serve.cli.shared.model_name import complete_downloaded
from torchax_serve.cli.shared.question import confirm
from torchax_serve.cli.shared.terminal import is_terminal, print_note


def rm(
    model: Annotated[
        str, typer.Argument(help="Short name or hub id of a model on this machine.", autocompletion=complete_downloaded)
    ],
    revision: Annotated[
        str | None,
        typer.Option("--revision", show_default=False, help="Branch, tag or commit to delete; all of them without it."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    cache_dir: CacheDir = None,
) -> int:
    """Delete a model of the hub from this machine.

    torchax-serve rm qwen3-0.6b --yes
    """
    source = parse_name(model)
    if not isinstance(source, str):
        raise InvalidArgumentError(
            f"MODEL: expected a short name or a hub id, got {model}, which is no download; delete it yourself"
        )
    download = find_download(source, cache_dir)
    chosen = None if revision is None else find_revision(download, revision)
    size = download.size_bytes if chosen is None else chosen.size_bytes
    what = download.hub_id if chosen is None else f"{download.hub_id} at {chosen.commit[:12]}"
    if not yes:
        if not is_terminal(sys.stdin):
            raise InvalidArgumentError("rm: expected --yes where nobody can be asked, got none; add it")
        question = f"delete {what}, {size_of(size)}, last used {ago(download.last_used)}?"
        if not confirm(question):
            print_note("nothing deleted")
            return 1
    delete_download(download, chosen, cache_dir)
    print_note(f"{what} deleted, {size_of(size)}")
    return 0


COMMAND = Command("rm", rm, position=90)
