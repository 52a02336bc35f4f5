"""Console for tables: as wide as the terminal, or wide enough for one line per row."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchax_serve.cli.shared.terminal import is_terminal

if TYPE_CHECKING:
    from rich.console import Console


def console(width: int = 160) -> Console:
    """Returns a console for stdout.

    Files and pipes get `width` columns, where rich would fold at 80.
    """
    from rich.console import Console

    return Console(width=None if is_terminal(sys.stdout) else width, highlight=False)
