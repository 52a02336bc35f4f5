"""Terminal output: dim notes on stderr, hidden keys, answers without control characters."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

# Model output may contain escape sequences; on a terminal they would move the cursor, set the title or worse.
_CONTROL_CODES = ({*range(0x20), 0x7F, *range(0x80, 0xA0)}) - {ord("\n"), ord("\t")}
_CONTROL_CHARACTERS = dict.fromkeys(_CONTROL_CODES, "\N{REPLACEMENT CHARACTER}")


def is_terminal(stream: Any) -> bool:
    """Returns whether `stream` is a terminal.

    None is a stream that was closed before the program began.
    """
    try:
        return stream is not None and bool(stream.isatty())
    except ValueError:  # closed
        return False


def may_style(stream: Any) -> bool:
    """Returns whether `stream` shows styles.

    It is a terminal, not a dumb one, without NO_COLOR (https://no-color.org).
    """
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_note(text: str) -> None:
    """Writes one dim line to stderr."""
    print(f"\x1b[2m{text}\x1b[0m" if may_style(sys.stderr) else text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def passing_note(text: str) -> Iterator[Callable[[], None]]:
    """Shows `text` on the cursor's line of a terminal until the yielded function is called."""
    shown = may_style(sys.stderr)
    if shown:
        print(f"\x1b[2m{_on_one_line(text)}\x1b[0m", end="", file=sys.stderr, flush=True)

    def take_away() -> None:
        nonlocal shown
        if shown:
            shown = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    try:
        yield take_away
    finally:
        take_away()


def _on_one_line(text: str) -> str:
    """Cuts `text` to the width of the terminal: only one line can be erased again."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        return text
    return text if not columns or len(text) < columns else text[: max(0, columns - 4)] + "..."


@contextlib.contextmanager
def activity(*, only_at_terminal: bool = False) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the current activity on stderr.

    At a terminal this is one line with the elapsed seconds; elsewhere one line for each activity, or none.
    """
    if not may_style(sys.stderr):
        yield (lambda text: None) if only_at_terminal else print_note
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("[dim]{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as lines:
        task = lines.add_task("", total=None)
        yield lambda text: lines.update(task, description=text)


_SHOWN_AGAIN: dict[int, list[Any]] = {}  # settings of the terminal before keys were hidden, by descriptor


@contextlib.contextmanager
def hidden_keys() -> Iterator[None]:
    """Hides typed keys in this context; they stay for the next read, and Ctrl-C still works."""
    if not (is_terminal(sys.stdin) and _hide_keys(sys.stdin.fileno())):
        yield
        return
    try:
        yield
    finally:
        show_keys()


def _hide_keys(descriptor: int) -> bool:
    """Hides keys; returns False if the terminal did not show them or belongs to another program."""
    try:
        import termios
    except ImportError:  # no terminal of that kind on this system
        return False
    if descriptor in _SHOWN_AGAIN or not _in_foreground(descriptor):
        return False
    try:
        before = termios.tcgetattr(descriptor)
        hidden = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
        termios.tcsetattr(descriptor, termios.TCSANOW, hidden)
    except termios.error:
        return False
    _SHOWN_AGAIN[descriptor] = before
    return True


def show_keys() -> None:
    """Restores the terminal to its state before `hidden_keys`.

    It is also called before an immediate exit.
    """
    while _SHOWN_AGAIN:
        import termios

        descriptor, before = _SHOWN_AGAIN.popitem()
        if _in_foreground(descriptor):
            with contextlib.suppress(termios.error):
                termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _in_foreground(descriptor: int) -> bool:
    """Returns whether this process is in the foreground.

    In the background, changing the terminal raises SIGTTOU.
    """
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False


def strip_control_chars(text: str) -> str:
    """Returns `text` without control characters other than line ends and tabs."""
    return text.translate(_CONTROL_CHARACTERS)
