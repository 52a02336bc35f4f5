"""Where tables are printed: as wide as the terminal, or wide enough for a row on a line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchax_serve.cli.shared.terminal import is_terminal

if TYPE_CHECKING:
    from rich.console import Console


def console(width: int = 160) -> Console:
    """A console of stdout. Without a terminal rich assumes 80 columns and folds; a file or a pipe gets `width`."""
    from rich.console import Console

    return Console(width=None if is_terminal(sys.stdout) else width, highlight=False)
