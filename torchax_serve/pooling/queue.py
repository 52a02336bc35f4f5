"""Queue of texts: what waits while a call runs goes into the next one, of all callers."""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextlib
import contextvars
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

from model_adapters.errors import DeadlineError, QueueDeadlineError, QueueFullError, RequestError
from torchax_serve.compilation.compile_lock import check_not_compiling
from torchax_serve.sampling_params import check_number

MAX_BATCH_TEXTS = 256
"""Most texts of one call; larger calls are not faster, and a request that comes meanwhile waits for its end."""
MAX_WAITING_TEXTS = 16384
"""Most texts that wait."""
CLOSE_TIMEOUT_S = 30.0
"""Time limit of `PoolingQueue.close`, in seconds: longer than any forward, unless it compiles."""

Call = Callable[[Sequence[Any]], Any]
"""Returns a sequence or an array with a result for each item."""

_CHECK: contextvars.ContextVar[Callable[[], None] | None] = contextvars.ContextVar("check of a call", default=None)


class CallAbandonedError(Exception):
    """Ends a call whose results nobody waits for any more."""


def check_wanted() -> None:
    """Raises CallAbandonedError if nobody waits for the call of this thread.

    Forwards are preceded by it.
    """
    if (check := _CHECK.get()) is not None:
        check()


@dataclasses.dataclass(eq=False)
class _Entry:
    key: Hashable
    call: Call
    items: Sequence[Any]
    deadline_s: float | None
    queue_deadline_s: float | None
    result: Future[list[Any]] = dataclasses.field(default_factory=Future)  # never running: it can always be cancelled

    def expire(self, now: float, *, has_begun: bool) -> None:
        """Ends the request with an error if one of its time limits has passed."""
        if self.deadline_s is not None and self.deadline_s <= now:
            self.settle(error=DeadlineError("expected its end within timeout_s, which has passed"))
        elif not has_begun and self.queue_deadline_s is not None and self.queue_deadline_s <= now:
            self.settle(error=QueueDeadlineError("expected its begin within queue_timeout_s, which has passed"))

    def settle(self, results: Sequence[Any] = (), error: BaseException | None = None) -> None:
        """Ends the request with results or an error; does nothing if it has ended."""
        with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
            if error is None:
                self.result.set_result(list(results))
            else:
                self.result.set_exception(error)


class PoolingQueue:
    """Queue of texts, and the thread that runs calls on them; all methods are thread-safe.

    Args:
        max_num_waiting: Texts that may wait; a request that finds none waiting is taken whatever its size.
    """

    def __init__(self, max_num_waiting: int = MAX_WAITING_TEXTS) -> None:
        self._most = max_num_waiting
        self._waiting: collections.deque[_Entry] = collections.deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed: str | None = None

    def submit(
        self,
        key: Hashable,
        call: Call,
        items: Sequence[Any],
        *,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> Future[list[Any]]:
        """Returns the future results of `call` for `items`.

        Requests with equal keys may share a call.

        Cancelling the future ends the request, and a call that runs for it alone before its next forward.

        Raises:
            InvalidArgumentError: a time limit is no number of seconds above 0.
            QueueFullError: too many texts are waiting.
            RequestError: the queue is closed.
        """
        check_number("timeout_s", timeout_s)
        check_number("queue_timeout_s", queue_timeout_s)
        now = time.monotonic()
        deadline_s = None if timeout_s is None else now + timeout_s
        queue_deadline_s = None if queue_timeout_s is None else now + queue_timeout_s
        entry = _Entry(key, call, items, deadline_s, queue_deadline_s)
        with self._changed:
            if self._closed is not None:
                raise RequestError(f"expected an open model, this one is closed ({self._closed})")
            num_waiting = sum(len(each.items) for each in self._waiting if not each.result.done())
            if num_waiting and num_waiting + len(items) > self._most:
                raise QueueFullError(
                    f"expected at most {self._most} texts that wait, got {len(items)} next to {num_waiting}; ask again "
                    "later"
                )
            self._waiting.append(entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="pooling", daemon=True)
                self._thread.start()
                atexit.register(self.close, "the process ends")  # no thread may be inside XLA then
            self._changed.notify()
        return entry.result

    def close(self, why: str) -> None:
        """Ends the thread, and all requests with an error.

        Returns after `CLOSE_TIMEOUT_S` at the latest.
        """
        with self._changed:
            self._closed = self._closed or why
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_TIMEOUT_S)
            atexit.unregister(self.close)

    def _work(self) -> None:
        while batch := self._next_batch():
            self._run(batch)

    def _next_batch(self) -> list[_Entry]:
        """Removes and returns the oldest open request and those that can go with it.

        None once the queue is closed.
        """
        with self._changed:
            while True:
                self._expire()
                if self._closed is not None:
                    for entry in self._waiting:
                        entry.settle(error=RequestError(f"the model was closed ({self._closed})"))
                    return []
                if self._waiting:
                    break
                self._changed.wait()
            batch: list[_Entry] = []
            others: list[_Entry] = []
            num_items = 0
            for entry in self._waiting:
                fits = entry.key == self._waiting[0].key and num_items + len(entry.items) <= MAX_BATCH_TEXTS
                (batch if fits or not batch else others).append(entry)
                num_items += len(entry.items) if batch[-1] is entry else 0
            self._waiting = collections.deque(others)
            return batch

    def _expire(self) -> None:
        """Ends waiting requests whose time has passed, and removes those that have ended."""
        now = time.monotonic()
        for entry in self._waiting:
            entry.expire(now, has_begun=False)
        self._waiting = collections.deque(entry for entry in self._waiting if not entry.result.done())

    def _run(self, batch: Sequence[_Entry]) -> None:
        try:
            with self._checked(batch):
                results = batch[0].call([item for entry in batch for item in entry.items])
        except CallAbandonedError:
            return
        except Exception as error:
            if len(batch) == 1:
                batch[0].settle(error=error)
                return
            for entry in batch:  # one by one: the fault is of one of them
                self._run([entry])
            return
        begin = 0
        for entry in batch:
            entry.settle(results[begin : begin + len(entry.items)])
            begin += len(entry.items)

    @contextlib.contextmanager
    def _checked(self, batch: Sequence[_Entry]) -> Iterator[None]:
        """Lets `check_wanted` end the call inside once none of the requests of `batch` is open."""

        def check() -> None:
            now = time.monotonic()
            for entry in batch:
                entry.expire(now, has_begun=True)
                if self._closed is not None:
                    entry.settle(error=RequestError(f"the model was closed ({self._closed})"))
            with self._changed:
                self._expire()
            if all(entry.result.done() for entry in batch):
                raise CallAbandonedError

        token = _CHECK.set(check)
        try:
            check()
            yield
        finally:
            _CHECK.reset(token)


class QueuedTexts:
    """Texts, and the call that is made for them on a queue.

    Args:
        queue: The queue.
        key: As of `PoolingQueue.submit`.
        call: As of `PoolingQueue.submit`.
        items: The texts, or pairs of texts.
    """

    def __init__(self, queue: PoolingQueue, key: Hashable, call: Call, items: Sequence[Any]) -> None:
        self._submit = functools.partial(queue.submit, key, call, items)

    def run(self, timeout_s: float | None = None, queue_timeout_s: float | None = None) -> list[Any]:
        """Returns the results, one for each item.

        Args:
            timeout_s: Seconds after which the call ends with an error, looked at before each forward; None: never.
            queue_timeout_s: The same for a call that has not begun by then.

        Raises:
            QueueFullError: too many texts are waiting.
            DeadlineError: a time limit has passed.
            Exception: what the call raises.
        """
        check_not_compiling()
        result = self._submit(timeout_s=timeout_s, queue_timeout_s=queue_timeout_s)
        try:
            return result.result()
        finally:
            result.cancel()  # if an interrupt has come

    async def run_async(self, timeout_s: float | None = None, queue_timeout_s: float | None = None) -> list[Any]:
        """Works as `run`, without blocking the event loop.

        Cancelling it ends the call before its next forward.
        """
        return await asyncio.wrap_future(self._submit(timeout_s=timeout_s, queue_timeout_s=queue_timeout_s))
