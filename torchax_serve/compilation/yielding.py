"""Threads that yield to requests: of low priority, and at rest between their units.

They rest while engines compute.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

Unit = TypeVar("Unit")

NICENESS = 10
"""Niceness of background threads: beside a busy thread they get a tenth of a core."""
MAX_REST_S = 0.5
"""Seconds that a thread rests at most after a unit."""

_computing: set[Hashable] = set()


def note_computing(owner: Hashable, computes: bool) -> None:
    """Notes whether an engine computes now; `owner` tells it from others."""
    (_computing.add if computes else _computing.discard)(owner)


def yield_to_requests() -> None:
    """Lowers the priority of this thread, and of those that it starts, such as XLA's.

    Linux has a priority for each thread. Elsewhere nothing happens. It stays free to run on any core: XLA divides the
    work of a program among the cores that the thread has which compiles it.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


def rested(units: Iterable[Unit]) -> Iterator[Unit]:
    """Yields `units`; while an engine computes, rests after each as long as it took."""
    began = time.monotonic()
    for unit in units:
        yield unit
        if _computing:
            time.sleep(min(time.monotonic() - began, MAX_REST_S))
        began = time.monotonic()


class WorkQueue:
    """Runs functions one after the other in a thread of low priority.

    The thread is there while there is work.

    Args:
        name: Name of the thread. It is no daemon: a process ends when the work is done.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._functions: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, function: Callable[[], object]) -> None:
        """Runs `function`, which raises nothing, after those that were added before."""
        with self._lock:
            self._functions.put(function)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name)
                self._thread.start()

    def wait(self) -> None:
        """Waits until there is nothing left to run."""
        while (thread := self._thread) is not None:
            thread.join()

    def _run(self) -> None:
        yield_to_requests()
        for function in rested(self._left()):
            function()

    def _left(self) -> Iterator[Callable[[], object]]:
        while True:
            with self._lock:
                if self._functions.empty():
                    self._thread = None
                    return
                function = self._functions.get()
            yield function
