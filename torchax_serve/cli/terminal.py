"""What a person sees beside the answer: dim notes on stderr, and text of a model made harmless for a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

# A model may say escape sequences; on a terminal they would move the cursor, set the title or worse.
_CONTROL_CODES = ({*range(0x20), 0x7F, *range(0x80, 0xA0)}) - {ord("\n"), ord("\t")}
_CONTROL_CHARACTERS = dict.fromkeys(_CONTROL_CODES, "\N{REPLACEMENT CHARACTER}")


def is_terminal(stream: Any) -> bool:
    """Whether a person sits at the other end of `stream`."""
    try:
        return bool(stream.isatty())
    except ValueError:  # closed
        return False


def may_style(stream: Any) -> bool:
    """Whether `stream` shows styles: a terminal, not a dumb one, and nobody asked for none (https://no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def note(text: str) -> None:
    """Writes one dim line to stderr."""
    print(f"\x1b[2m{text}\x1b[0m" if may_style(sys.stderr) else text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def passing_note(text: str) -> Iterator[Callable[[], None]]:
    """Shows `text` on the line of the cursor, where a person watches, until the function it yields is called."""
    shown = may_style(sys.stderr)
    if shown:
        print(f"\x1b[2m{text}\x1b[0m", end="", file=sys.stderr, flush=True)

    def take_away() -> None:
        nonlocal shown
        if shown:
            shown = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    try:
        yield take_away
    finally:
        take_away()


def harmless(text: str) -> str:
    """`text` without control characters other than line ends and tabs."""
    return text.translate(_CONTROL_CHARACTERS)
