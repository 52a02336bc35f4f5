"""Plans on the device, in the order in which they were sent, and when the next one is to be."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from typing import NamedTuple

from torchax_serve.engine.model_runner import InFlightStep

REFILL_FRACTION = 0.25
"""Part of a dispatch of several steps that is still to come when the next one is sent. Requests that come earlier go
first."""


class QueuedStep(NamedTuple):
    """A plan on the device."""

    step: InFlightStep
    sent_s: float
    expected_s: float  # that the device should take, by plans before it; 0 where that is not known
    has_compiled: bool


class DispatchQueue:
    """A queue of them; times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._queue: collections.deque[QueuedStep] = collections.deque()
        self._landed_s = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[InFlightStep]:
        return (each.step for each in self._queue)

    def push(self, step: InFlightStep, expected_s: float, has_compiled: bool) -> None:
        """Notes that a plan has been sent."""
        self._queue.append(QueuedStep(step, time.monotonic(), expected_s, has_compiled))

    def pop(self) -> QueuedStep:
        """The oldest, which is waited for next."""
        return self._queue.popleft()

    def completed(self, oldest: QueuedStep, now: float) -> float | None:
        """Notes that what `pop` gave has landed; seconds the device was busy with it, None if that says nothing."""
        busy_since, self._landed_s = max(oldest.sent_s, self._landed_s), now
        return None if oldest.has_compiled else now - busy_since

    def clear(self) -> None:
        """Forgets all."""
        self._queue.clear()

    def seconds_until_next(self) -> float:
        """Seconds until the next plan is to be made.

        They count from what has landed last, not from when it was expected to: a pace that was kept too slow, after a
        time in which the device was slower, would be measured as the device's own, and kept for good.
        """
        if not self._queue or not self._queue[-1].expected_s:
            return 0.0
        busy_since = max(self._queue[0].sent_s, self._landed_s)
        expected_s = sum(each.expected_s for each in self._queue) - REFILL_FRACTION * self._queue[-1].expected_s
        return busy_since + expected_s - time.monotonic()
