"""Start and end of the process: Ctrl-C during imports, and closed standard streams.

This module is imported before all others by `torchax_serve.cli.main`, which calls `imports_done` behind its own
imports.
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
    """Makes Ctrl-C end the process with one line instead of a traceback."""
    if threading.current_thread() is threading.main_thread() and _is_default():
        signal.signal(signal.SIGINT, _leave)


def imports_done() -> None:
    """Makes Ctrl-C raise ``KeyboardInterrupt`` again."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_default() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def open_closed_streams() -> None:
    """Opens the null device for closed standard streams.

    No file opened later can take their descriptors then. A closed stdin is an empty one. Output to a closed stdout
    would be lost without a message, so the program ends with an error.
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
