"""Questions that are answered with yes or no at the terminal."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import typer


def confirm(question: str) -> bool:
    """Asks `question` on stderr, and returns whether the line typed is yes.

    Ctrl-C takes effect whenever it comes. One that came in the moment before `input` reads would wait for a key.

    Raises:
        KeyboardInterrupt: Ctrl-C.
        typer.Abort: the input has ended.
    """
    while True:
        print(f"{question} [y/N]: ", end="", file=sys.stderr, flush=True)
        _wait_for_line(sys.stdin)
        line = sys.stdin.readline()
        if not line:
            raise typer.Abort
        answer = line.strip().lower()
        if answer in ("y", "yes"):
            return True
        if answer in ("", "n", "no"):
            return False
        print(f"expected y or n, got {answer[:20]!r}", file=sys.stderr)


def _wait_for_line(stream: Any) -> None:
    """Waits until a terminal has a line to read; handlers of signals run meanwhile."""
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:  # it was replaced by a text
        return
    with _wakeups() as wakeups:
        while descriptor not in select.select([descriptor, *wakeups], [], [])[0]:
            os.read(wakeups[0], 512)  # of a signal whose handler has returned


@contextlib.contextmanager
def _wakeups() -> Iterator[list[int]]:
    """Yields a descriptor readable after a signal; none in a thread that gets no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield [reader]
    finally:
        signal.set_wakeup_fd(previous)
        os.close(writer)
        os.close(reader)
