"""The steps in flight, in the order of their dispatch, and when the next one is due."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator

from torchax_serve.engine.model_runner import InFlightStep

REFILL_FRACTION = 0.25
"""Fraction of a multi-step dispatch still running when the next is sent.

A request that arrives before that is scheduled first.
"""

LOOKS_PER_WAIT, SHORTEST_WAIT_S, LONGEST_WAIT_S = 32, 0.0005, 0.002
"""How often a wait for the device looks whether it is done already, and least and most seconds between two looks."""


class DispatchQueue:
    """First-in, first-out queue of the steps in flight."""

    def __init__(self) -> None:
        self._queue: collections.deque[InFlightStep] = collections.deque()
        self._completed_s = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[InFlightStep]:
        return iter(self._queue)

    @property
    def is_timed(self) -> bool:
        """Whether no program was compiled or loaded for the newest step, if there is one."""
        return not self._queue or self._queue[-1].is_timed

    def push(self, step: InFlightStep) -> None:
        """Adds the step that was sent last."""
        self._queue.append(step)

    def pop(self) -> InFlightStep:
        """Removes and returns the oldest step, which is read next."""
        return self._queue.popleft()

    def completed(self, oldest: InFlightStep, now: float) -> float | None:
        """Records that `oldest` is complete and returns its device seconds.

        None if they are not those of such steps.
        """
        busy_since, self._completed_s = max(oldest.sent_s, self._completed_s), now
        return now - busy_since if oldest.is_timed else None

    def clear(self) -> None:
        """Removes all steps."""
        self._queue.clear()

    def wait_until_due(self, wake: threading.Condition, is_wanted: Callable[[], bool]) -> bool:
        """Waits until the next plan is due, the device is idle, or `is_wanted`; False if so now.

        A device that is quicker than expected is noticed by looking, while `wake`, which is held, is waited for: all of
        the expected time would be measured as the device's own.
        """
        wait_s = self._seconds_until_next()
        if wait_s <= 0:
            return False
        until, look_s = time.monotonic() + wait_s, min(max(wait_s / LOOKS_PER_WAIT, SHORTEST_WAIT_S), LONGEST_WAIT_S)
        while wait_s > 0 and not is_wanted() and not self._queue[-1].is_complete():
            wake.wait(min(wait_s, look_s))
            wait_s = until - time.monotonic()
        return True

    def _seconds_until_next(self) -> float:
        """Returns the seconds until the next plan is due.

        They count from the last completion, not from its expected time: dispatches that are paced too slowly, after a
        time in which the device was slower, would be measured as the device's own speed and never become faster.
        """
        if not self._queue or not self._queue[-1].expected_s:
            return 0.0
        busy_since = max(self._queue[0].sent_s, self._completed_s)
        expected_s = sum(each.expected_s for each in self._queue) - REFILL_FRACTION * self._queue[-1].expected_s
        return busy_since + expected_s - time.monotonic()
