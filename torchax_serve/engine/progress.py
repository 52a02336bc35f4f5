"""Progress of an engine, for a watchdog.

It is read from any thread, also while a step hangs or compiles.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torchax_serve.compilation.compile_lock import num_compiling


class EngineProgress(NamedTuple):
    """Progress of an engine at one time.

    Attributes:
        num_moves: Rounds of the engine's thread so far; each plans, sends or reads a step.
        still_s: Seconds since the last of them, or since there is something to do again.
        is_due: Whether there is anything to do: a request, a command, or a step in flight.
        is_compiling: Whether a program is being compiled or loaded, which may take minutes.
        is_alive: Whether the engine's thread runs.
    """

    num_moves: int
    still_s: float
    is_due: bool
    is_compiling: bool
    is_alive: bool


class ProgressClock:
    """Counts the rounds of an engine's thread; calling it returns `EngineProgress`.

    Args:
        is_due: Returns whether the engine has anything to do; it may be called from any thread.
        clock: Seconds.
    """

    def __init__(self, is_due: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._is_due, self._clock = is_due, clock
        self._num_moves, self._moved_s = 0, clock()
        self._thread: threading.Thread | None = None

    def watch(self, thread: threading.Thread) -> None:
        """Sets the thread that `is_alive` observes."""
        self._thread = thread

    def moved(self) -> None:
        """Records a round; the engine's thread calls it, also when it wakes up for new work."""
        self._num_moves, self._moved_s = self._num_moves + 1, self._clock()

    def will_be_due(self) -> None:
        """Starts `still_s` anew if the engine was idle; called before there is something to do."""
        if not self._is_due():
            self._moved_s = self._clock()

    def __call__(self) -> EngineProgress:
        """Returns the progress so far."""
        is_alive = self._thread is not None and self._thread.is_alive()
        is_due = self._is_due()  # before the time: an engine that has become due is still from then on
        still_s = self._clock() - self._moved_s
        return EngineProgress(self._num_moves, still_s, is_due, num_compiling() > 0, is_alive)
