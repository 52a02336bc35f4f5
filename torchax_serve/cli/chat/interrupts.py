"""Handling of Ctrl-C while the main thread is inside a library that ignores signals.

XLA is such a library while it compiles a program. Python raises ``KeyboardInterrupt`` when the interpreter runs again,
which may be many seconds later, and wherever it then happens to be: in a callback of the garbage collector or a
``__del__`` the exception is reported and lost. The signal number is written to a pipe at once, though
(``signal.set_wakeup_fd``), and a thread that reads the pipe can end the program.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from torchax_serve.cli.shared.errors import EXIT_INTERRUPTED
from torchax_serve.cli.shared.terminal import is_terminal, print_note, show_keys

_GRACE_S = 1.0  # seconds that the interpreter has to raise KeyboardInterrupt by itself
_SHOW_CURSOR = "\x1b[?25h"  # progress bars hide it


@contextlib.contextmanager
def prompt_interrupts(*, leave_at: int) -> Iterator[None]:
    """Makes Ctrl-C take effect within about a second in this context, also inside compiled code.

    Args:
        leave_at: Number of the Ctrl-C that ends the program if those before had no effect yet. 1: the first; 2: the
            first prints a note.

    Raises:
        KeyboardInterrupt: also at the end where the exception got lost, and in place of the error that a library made
            of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach only the main thread
        return
    watch = _Watch(leave_at)
    failure: Exception | None = None
    with watch.running():
        try:
            yield
        except Exception as error:
            failure = error
    if watch.pressed.is_set():
        raise KeyboardInterrupt from failure
    if failure is not None:
        raise failure


class _Watch:
    """Thread that sees every Ctrl-C at once."""

    def __init__(self, leave_at: int) -> None:
        self._leave_at = leave_at
        self._main_thread = threading.get_ident()
        self._done = threading.Event()
        self._lost = threading.Event()  # the exception of the last Ctrl-C went into a callback
        self.pressed = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        thread = threading.Thread(target=self._run, args=(reader,), daemon=True)
        previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        previous_hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._report = previous_hook
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(previous_fd, warn_on_full_buffer=False)
            sys.unraisablehook = previous_hook
            self._done.set()
            os.close(writer)  # the thread reads on to the end of the pipe
            thread.join()
            os.close(reader)

    def _unraisable(self, unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._lost.set()
        else:
            self._report(unraisable)

    def _run(self, reader: int) -> None:
        presses = 0
        while byte := os.read(reader, 1):
            if byte[0] != signal.SIGINT:
                continue
            self.pressed.set()
            if self._done.wait(_GRACE_S):
                continue
            if self._lost.is_set():
                # The exception was lost: send the signal again, not counted as the user's.
                self._lost.clear()
                signal.pthread_kill(self._main_thread, signal.SIGINT)
                continue
            presses += 1
            if presses >= self._leave_at:
                _leave()
            print_note("waiting for a compilation to end; Ctrl-C once more leaves the program")


def _leave() -> None:
    show_keys()
    if is_terminal(sys.stderr):
        print(_SHOW_CURSOR, end="", file=sys.stderr)
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)
