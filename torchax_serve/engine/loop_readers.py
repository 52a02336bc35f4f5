"""Wake-ups of the asynchronous readers in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from torchax_serve.engine.request_handle import RequestHandle

WAKE_INTERVAL_S = 0.004
"""Shortest time between two wake-ups for tokens alone, in seconds.

Steps of small models are quicker. A wake-up for each of them would cost the loop, and the interpreter lock, more than
the step itself, and no reader could tell the difference.
"""
MAX_INTERVAL_S = 0.05
"""Longest time between two wake-ups because of slow readers, in seconds."""
REST_FACTOR = 4
"""Rest of the loop between two wake-ups, as a multiple of the time that its readers took."""


class LoopReaders:
    """Wakes the asynchronous readers in one event loop, in which it is called."""

    def __init__(self) -> None:
        self._late: list[RequestHandle] = []  # those that are woken next
        self._is_timed = False  # whether that is planned, or going on
        self._next_s = 0.0  # on the loop's clock

    def notify(self, at_once: Iterable[RequestHandle], soon: Iterable[RequestHandle]) -> None:
        """Wakes readers.

        Args:
            at_once: Handles with their first tokens, or their end.
            soon: Other handles with new tokens; woken together, with rests between.
        """
        for handle in at_once:
            handle.wake()
        self._late += soon
        if self._late and not self._is_timed:
            self._is_timed = True
            loop = asyncio.get_running_loop()
            loop.call_at(max(self._next_s, loop.time()), self._wake_late)

    def _wake_late(self) -> None:
        loop = asyncio.get_running_loop()
        late, self._late = self._late, []
        for handle in late:
            handle.wake()
        loop.call_soon(self._rest, loop.time())  # behind the readers' turns

    def _rest(self, began_s: float) -> None:
        now = asyncio.get_running_loop().time()
        rest_s = min(MAX_INTERVAL_S, REST_FACTOR * (now - began_s))
        self._next_s = max(now + rest_s, began_s + WAKE_INTERVAL_S)
        self._is_timed = False
        self.notify((), ())
