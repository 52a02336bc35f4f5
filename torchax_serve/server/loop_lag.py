"""How late the event loop is: whatever blocks it holds up every client."""

from __future__ import annotations

import asyncio
import time

PERIOD_S = 0.02
"""Seconds between two looks; a block that is as short is not seen."""


class LoopLag:
    """Measures the event loop that `watch` runs on.

    Attributes:
        worst_s: Largest time, in seconds, by which the loop was late since the last call of `take`: blocked by its own
            work, or waiting for a processor or for Python's lock.
        worst_busy_s: Largest processor time, in seconds, that the loop's thread has used between two looks so far: of
            one block at most, and of what ran next to it in `PERIOD_S`.
    """

    def __init__(self) -> None:
        self.worst_s = self.worst_busy_s = 0.0

    async def watch(self) -> None:
        """Looks at the loop until it is cancelled."""
        while True:
            began_s, busy_s = time.monotonic(), time.thread_time()
            await asyncio.sleep(PERIOD_S)
            self.worst_s = max(self.worst_s, time.monotonic() - began_s - PERIOD_S)
            self.worst_busy_s = max(self.worst_busy_s, time.thread_time() - busy_s)

    def take(self) -> float:
        """Returns `worst_s` and begins anew."""
        found, self.worst_s = self.worst_s, 0.0
        return found
