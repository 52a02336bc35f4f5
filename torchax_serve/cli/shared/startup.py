"""The first and the last moments of the process: Ctrl-C while modules are imported, and streams that are closed.

Imported before all others by `torchax_serve.cli.main`, which calls `imports_done` behind its own imports.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

_INTERRUPTED = 130


def _leave(number: int, frame: Any) -> None:
    os.write(2, b"interrupted\n")
    os._exit(_INTERRUPTED)


def leave_at_once_on_interrupt() -> None:
    """Has Ctrl-C end the process in one line from here on: Python would show where it was in its own code."""
    if threading.current_thread() is threading.main_thread() and _is_default():
        signal.signal(signal.SIGINT, _leave)


def imports_done() -> None:
    """Has Ctrl-C raise ``KeyboardInterrupt`` again."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_default() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def open_closed_streams() -> None:
    """Puts the null device in the place of standard streams that are closed, so that no file opened later takes it.

    A closed stdin is an empty one. What is written to a closed stdout would be lost without a word, so that the program
    ends with an error.
    """
    is_stdout_closed = sys.stdout is None
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  for the rest of the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  for the rest of the process
    if is_stdout_closed:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  for the rest of the process
        print("error: expected a stdout to write to, got a closed one; send it to a file or a pipe", file=sys.stderr)
        raise SystemExit(2)


leave_at_once_on_interrupt()
