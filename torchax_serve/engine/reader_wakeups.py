"""Wake-ups of asynchronous readers: at once for a first or last output, else for all that came in a short time."""

from __future__ import annotations

import asyncio
import collections
import weakref
from collections.abc import Iterable

from torchax_serve.engine.request_handle import RequestHandle

WAKE_INTERVAL_S = 0.02
"""Seconds for which tokens of a request that has begun may wait for later ones, so that they are read together.

A reader that is woken for each token of a small model takes longer for it than the model.
"""


class ReaderWakeups:
    """Pending wake-ups of the readers in one event loop. The engine's thread calls `request`, the loop all else."""

    def __init__(self) -> None:
        self._pending: collections.deque[weakref.ref[RequestHandle]] = collections.deque()
        self._is_requested = False  # a call in the loop will wake what is pending
        self._woken_s = 0.0  # on the loop's clock

    def request(self, loop: asyncio.AbstractEventLoop, handles: Iterable[RequestHandle], *, at_once: bool) -> None:
        """Has `loop` wake the readers of `handles`.

        Raises:
            RuntimeError: The loop has been closed.
        """
        self._pending.extend(map(weakref.ref, handles))
        if at_once:
            loop.call_soon_threadsafe(self._wake)
        elif not self._is_requested:
            self._is_requested = True
            loop.call_soon_threadsafe(self._wake_later)

    def _wake_later(self) -> None:
        loop = asyncio.get_running_loop()
        rest_s = self._woken_s + WAKE_INTERVAL_S - loop.time()
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
