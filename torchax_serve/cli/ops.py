"""``torchax-serve ops``: operators that model code is lowered to, and implementations."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from torchax_serve.cli.chat.interrupts import prompt_interrupts
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.tables import console


def ops(as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False) -> None:
    """List the operators that replace model code's, with implementations by platform.

    An implementation may refuse a call (a dtype, a shape, a missing compiler); the last one listed for a platform that
    does not is taken.
    """
    with prompt_interrupts(leave_at=1):
        from model_adapters.ops import list_ops
        from model_adapters.ops.registry import platform

        here = platform()
    found = [
        {
            "name": op.name,
            "summary": op.summary,
            "implementations": [
                {"name": each.name, "platforms": list(each.platforms), "here": here in each.platforms}
                for each in op.implementations
            ],
        }
        for op in list_ops()
    ]
    if as_json:
        print(json.dumps({"platform": here, "ops": found}, indent=1))
        return
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for heading in ("op", "implementation", "platforms", "what it computes"):
        table.add_column(heading, no_wrap=heading != "what it computes")
    for op in list_ops():
        for index, each in enumerate(op.implementations):
            mark = "*" if here in each.platforms else " "
            first = (op.name, op.summary) if index == 0 else ("", "")
            table.add_row(first[0], f"{mark} {each.name}", ", ".join(each.platforms), first[1])
    output = console()
    output.print(table)
    output.print(f"* for this machine ({here}); the last one that does not refuse a call is taken", style="dim")


COMMAND = Command("ops", ops, position=110)
