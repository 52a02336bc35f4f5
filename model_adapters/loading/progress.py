"""Display of long work: a protocol, a silent implementation and one with bars on stderr.

The protocol has one method.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn

Unit = Literal["bytes", "items"]
Advance = Callable[[int], None]
"""Called with the number of units done since the last call."""


class Progress(Protocol):
    """Receiver of the progress of loading. Stages follow each other; they do not nest."""

    def stage(self, name: str, total: int | None, unit: Unit = "bytes") -> AbstractContextManager[Advance]:
        """Opens the stage `name` of `total` units; the stage ends when it is closed.

        `total` is None if the number is not known ahead.
        """
        ...


class SilentProgress:
    """Shows nothing."""

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None, unit: Unit = "bytes") -> Iterator[Advance]:
        """Shows nothing."""
        yield lambda amount: None


class RichProgress:
    """Bars on stderr if it is a terminal; no output at all if it is a file or a pipe."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None, unit: Unit = "bytes") -> Iterator[Advance]:
        """Shows a bar until the stage ends, also by an exception or Ctrl-C."""
        from rich.console import Console  # takes long to import, and a start from a record shows nothing

        console = self._console or Console(file=sys.stderr)
        if not console.is_terminal:
            yield lambda amount: None
            return
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as RichBars

        counts: list[ProgressColumn] = (
            [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
        )
        bars = RichBars(
            TextColumn("{task.description}"),
            BarColumn(),
            *counts,
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        with bars:
            task = bars.add_task(name, total=total)
            yield lambda amount: bars.advance(task, amount)


def hub_bar_class(advance: Advance) -> type[Any]:
    """Returns a ``tqdm`` class that passes counts of huggingface_hub's downloads to `advance`.

    It draws nothing. The hub constructs it as it would construct ``tqdm``; only the methods that its download code
    calls are implemented.
    """

    class HubBar:
        def __init__(self, *args: Any, total: float | None = None, initial: float = 0, **options: Any) -> None:
            self.total = total
            self.n = initial
            if initial:  # the part of a file from an interrupted download
                advance(int(initial))

        def update(self, amount: float = 1) -> None:
            self.n += amount
            advance(int(amount))

        def refresh(self, *args: Any, **options: Any) -> None: ...

        def reset(self, total: float | None = None) -> None:
            advance(-int(self.n))
            self.n, self.total = 0, total

        def set_description(self, *args: Any, **options: Any) -> None: ...

        def set_postfix_str(self, *args: Any, **options: Any) -> None: ...

        def close(self) -> None: ...

        def __enter__(self) -> HubBar:
            return self

        def __exit__(self, *error: object) -> None:
            self.close()

    return HubBar
