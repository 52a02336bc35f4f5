"""Ctrl-C while the main thread is inside a library that does not look at signals, such as XLA compiling a program.

Python raises ``KeyboardInterrupt`` when the interpreter runs again, which may be many seconds later. The signal number
is written to a pipe at once, though (``signal.set_wakeup_fd``), and a thread that reads the pipe can end the program.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

from torchax_serve.cli.reporting import EXIT_INTERRUPTED
from torchax_serve.cli.terminal import is_terminal, note

_GRACE_S = 1.0  # what the interpreter gets to raise KeyboardInterrupt by itself
_SHOW_CURSOR = "\x1b[?25h"  # progress bars hide it


@contextlib.contextmanager
def prompt_interrupts(*, leave_at: int) -> Iterator[None]:
    """Within it, Ctrl-C is obeyed in about a second, also inside compiled code.

    Args:
        leave_at: the how manieth Ctrl-C ends the program, where the ones before had no effect yet. 1: the first; 2: the
            first says what is going on.

    Raises:
        KeyboardInterrupt: also in place of the error that a library made of an interruption.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread alone
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    done = threading.Event()
    pressed = threading.Event()
    watcher = threading.Thread(target=_watch, args=(reader, done, pressed, leave_at), daemon=True)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher.start()
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    finally:
        signal.set_wakeup_fd(previous, warn_on_full_buffer=False)
        done.set()
        os.close(writer)  # the watcher reads on to the end of the pipe
        watcher.join()
        os.close(reader)
    if failure is not None and pressed.is_set():
        raise KeyboardInterrupt from failure
    if failure is not None:
        raise failure


def _watch(reader: int, done: threading.Event, pressed: threading.Event, leave_at: int) -> None:
    presses = 0
    while byte := os.read(reader, 1):
        if byte[0] != signal.SIGINT:
            continue
        pressed.set()
        presses += 1
        if done.wait(_GRACE_S):
            return
        if presses >= leave_at:
            _leave()
        note("waiting for a compilation to end; Ctrl-C once more leaves the program")


def _leave() -> None:
    if is_terminal(sys.stderr):
        print(_SHOW_CURSOR, end="", file=sys.stderr)
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)
