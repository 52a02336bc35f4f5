"""``torchax-serve top``: shows what a running server does, again and again."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.downloads import size_of
from torchax_serve.cli.shared.server_client import DEFAULT_URL, ClientKey, ServerUrl, asked
from torchax_serve.cli.shared.tables import console

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLUMNS = ("model", "status", "size", "running", "waiting", "tokens/s", "cache", "from the cache")


def top(
    url: ServerUrl = DEFAULT_URL,
    api_key: ClientKey = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, once.")] = False,
) -> None:
    """Show a running server's models, memory, queue and speed, until Ctrl-C.

    torchax-serve top --url http://127.0.0.1:8000
    """
    found = asked(url, "/stats", api_key)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    screen = console(200)
    if once or not screen.is_terminal:
        screen.print(_shown(found))
        return
    from rich.live import Live

    with Live(_shown(found), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(_shown(asked(url, "/stats", api_key)), refresh=True)


def _shown(found: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold")
    for index, heading in enumerate(_COLUMNS):
        table.add_column(heading, justify="left" if index < 2 else "right")
    for each in found["models"]:
        prompts = each["num_prompt_tokens"]
        table.add_row(
            each["name"],
            each["status"],
            size_of(each["size_bytes"]),
            str(each["num_running"]),
            str(each["num_waiting"]),
            f"{each['tokens_per_s']:.1f}",
            f"{each['cache_usage']:.0%}",
            f"{each['num_hit_tokens'] / prompts:.0%}" if prompts else "-",
        )
    memory = found["memory"]
    line = (
        f"torchax-serve {found['version']}   requests {found['num_requests']}   "
        f"process {size_of(memory['process_bytes'])}   "
        f"free {size_of(memory['available_bytes'])} of {size_of(memory['total_bytes'])}"
    )
    return Group(Text(line), Text(""), table)


COMMAND = Command("top", top, position=83)
