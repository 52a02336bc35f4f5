"""Option of commands about downloads, and how their sizes and ages are shown."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        "--download-dir",
        show_default=False,
        help="Folder for downloads, in place of the hub's default.",
    ),
]
"""Option of commands that read, add or delete downloads."""


def ago(seconds: float | None) -> str:
    """Formats a time in seconds since 1970 as ``3 days ago``."""
    if seconds is None:
        return "never"
    passed = max(0.0, time.time() - seconds)
    for size, unit in ((86400 * 30, "month"), (86400 * 7, "week"), (86400, "day"), (3600, "hour"), (60, "minute")):
        if passed >= size:
            number = int(passed // size)
            return f"{number} {unit}{'s' if number > 1 else ''} ago"
    return "just now"


def size_of(num_bytes: int) -> str:
    """Formats a number of bytes as ``1.23 GB`` (10^9 bytes), MB or kB."""
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"
