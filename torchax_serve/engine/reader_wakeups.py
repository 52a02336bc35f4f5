"""Wake-ups of asynchronous readers: at once for a first or last output, else grouped."""

from __future__ import annotations

import asyncio
import collections
import weakref
from collections.abc import Iterable

from torchax_serve.engine.request_handle import RequestHandle

WAKES_PER_S = 1000
"""Readers that are woken in a second: woken for each token of a small model, they would take longer than the model."""
MAX_INTERVAL_S = 0.05
"""Most seconds for which tokens of a request that has begun wait for later ones, so that they are read together."""


class ReaderWakeups:
    """Pending wake-ups of the readers in one event loop.

    The engine's thread calls `request`, the loop all else.
    """

    def __init__(self) -> None:
        self._pending: collections.deque[weakref.ref[RequestHandle]] = collections.deque()
        self._is_requested = False  # a call in the loop will wake what is pending
        self._interval_s = 0.0  # between two wake-ups
        self._woken_s = 0.0  # time of the last one, on the loop's clock

    def request(
        self, loop: asyncio.AbstractEventLoop, handles: Iterable[RequestHandle], num_readers: int, *, at_once: bool
    ) -> None:
        """Has `loop` wake the readers of `handles`.

        Args:
            loop: Event loop of the readers.
            handles: Handles with new outputs.
            num_readers: Number of requests that have not ended, which sets the interval between two wake-ups.
            at_once: Whether they are woken without regard to the interval.

        Raises:
            RuntimeError: The loop has been closed.
        """
        self._interval_s = min(MAX_INTERVAL_S, num_readers / WAKES_PER_S)
        self._pending.extend(map(weakref.ref, handles))
        if at_once:
            loop.call_soon_threadsafe(self._wake)
        elif not self._is_requested:
            self._is_requested = True
            loop.call_soon_threadsafe(self._wake_later)

    def _wake_later(self) -> None:
        loop = asyncio.get_running_loop()
        rest_s = self._woken_s + self._interval_s - loop.time()
        if rest_s > 0:
            loop.call_later(rest_s, self._wake)
        else:
            self._wake()

    def _wake(self) -> None:
        self._is_requested = False  # before the look at what is pending: what comes behind it is requested again
        self._woken_s = asyncio.get_running_loop().time()
        while self._pending:
            if (handle := self._pending.popleft()()) is not None:
                handle.wake()
