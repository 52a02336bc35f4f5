"""`CallPool`: calls of ``generate`` from event loops, on bounded threads and queue."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

from model_adapters.errors import DeadlineError, QueueFullError
from torchax_serve.generation.call_limits import CallLimits

Result = TypeVar("Result")


class CallPool:
    """Threads for calls that wait for an engine; they share its steps.

    Args:
        num_threads: Calls that run at once.
        max_num_waiting: Calls that may wait for a thread.
    """

    def __init__(self, num_threads: int, max_num_waiting: int) -> None:
        self._most, self._max_num_waiting = num_threads + max_num_waiting, max_num_waiting
        self._num_open, self._lock = 0, threading.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="generate")

    def submit(self, call: Callable[[], Result], limits: CallLimits) -> concurrent.futures.Future[Result]:
        """Returns the future result of `call`; see `run`.

        Args:
            call: Calls ``generate`` with `limits`.
            limits: Limits of the call.

        Raises:
            QueueFullError: too many calls are waiting.
        """
        with self._lock:
            if self._num_open >= self._most:
                raise QueueFullError(
                    f"expected at most {self._most} calls at a time, {self._max_num_waiting} of them waiting, got one "
                    "more; ask again later, or raise EngineOptions(max_num_waiting=...)"
                )
            self._num_open += 1
        future = self._pool.submit(self._run, call, limits)
        future.add_done_callback(self._has_ended)
        return future

    async def run(self, future: concurrent.futures.Future[Result], limits: CallLimits) -> Result:
        """Returns the result of a call that `submit` has returned.

        Cancelling this ends the call within a step.

        Raises:
            DeadlineError: a time limit has passed.
            Exception: what the call raises.
        """
        try:
            async with asyncio.timeout(limits.rest_s) as time_limit:
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            if time_limit.expired():
                raise DeadlineError("expected its end within timeout_s, which has passed") from error
            raise
        finally:
            limits.cancel()  # does nothing once the call has ended

    def _run(self, call: Callable[[], Result], limits: CallLimits) -> Result:
        limits.check()
        return call()

    def _has_ended(self, future: concurrent.futures.Future[Result]) -> None:
        with self._lock:
            self._num_open -= 1

    def close(self) -> None:
        """Lets the threads end; calls that wait are cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)
