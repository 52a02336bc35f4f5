"""`CallLimits`: priority, time limits and cancellation of one call of ``generate``.

Such a call may submit requests several times, as for the windows of long audio; its limits are for all together.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from model_adapters.errors import DeadlineError, QueueDeadlineError, RequestError
from torchax_serve.engine.request_handle import RequestHandle, cancel_on_error
from torchax_serve.sampling_params import SamplingParams


class CallLimits:
    """Limits of one call, counted from now.

    Args:
        priority: Lower runs first.
        timeout_s: Seconds after which the call ends with an error; None: never.
        queue_timeout_s: The same for a call that has not begun by then.
        on_tokens: Called with the new token ids of each step, and with None at the end of each loop over tokens, on the
            thread that reads them; None: nobody asks. Only for calls with one row.

    Raises:
        InvalidArgumentError: a value is out of its range.
    """

    def __init__(
        self,
        priority: int = 0,
        timeout_s: float | None = None,
        queue_timeout_s: float | None = None,
        on_tokens: Callable[[Sequence[int] | None], None] | None = None,
    ) -> None:
        SamplingParams(priority=priority or None, timeout_s=timeout_s, queue_timeout_s=queue_timeout_s)
        now = time.monotonic()
        self._priority = priority
        self._deadline_s = None if timeout_s is None else now + timeout_s
        self._queue_deadline_s = None if queue_timeout_s is None else now + queue_timeout_s
        self.on_tokens = on_tokens
        self._is_cancelled, self._has_begun = False, False
        self._holds_tokens = False
        self._handles: set[RequestHandle] = set()
        self._lock = threading.Lock()

    @property
    def rest_s(self) -> float | None:
        """Seconds until the call ends; None: it may take any time."""
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()

    def check(self) -> None:
        """Checks that the call may go on.

        Raises:
            RequestError: it was cancelled.
            DeadlineError: a time limit has passed.
        """
        now = time.monotonic()
        if self._is_cancelled:
            raise RequestError("the call was cancelled")
        if self._deadline_s is not None and self._deadline_s <= now:
            raise DeadlineError("expected its end within timeout_s, which has passed")
        if not self._has_begun and self._queue_deadline_s is not None and self._queue_deadline_s <= now:
            raise QueueDeadlineError("expected its begin within queue_timeout_s, which has passed")

    @property
    def has_begun(self) -> bool:
        """Whether a request of the call has ended, or the call runs by itself."""
        return self._has_begun

    def put_tokens(self, token_ids: Sequence[int] | None) -> None:
        """Passes new tokens to `on_tokens`, unless they are held."""
        if self.on_tokens is not None and not self._holds_tokens:
            self.on_tokens(token_ids)

    @contextlib.contextmanager
    def holding_tokens(self) -> Iterator[None]:
        """Passes no tokens of loops inside the block on: they may be replaced."""
        self._holds_tokens = True
        try:
            yield
        finally:
            self._holds_tokens = False

    def begin(self) -> None:
        """Records that the call has begun, from which on the limit for waiting has no effect."""
        self._has_begun = True

    def params(self) -> SamplingParams:
        """Returns the options of a request of the call, with the time that is left.

        Raises:
            RequestError: as `check`.
        """
        self.check()
        now = time.monotonic()
        return SamplingParams(
            priority=self._priority or None,
            timeout_s=None if self._deadline_s is None else max(1e-6, self._deadline_s - now),
            queue_timeout_s=(
                None if self._queue_deadline_s is None or self._has_begun else max(1e-6, self._queue_deadline_s - now)
            ),
        )

    def cancel(self) -> None:
        """Ends the call within a step; from any thread."""
        with self._lock:
            self._is_cancelled = True
            handles = list(self._handles)
        for handle in handles:
            handle.cancel()

    @contextlib.contextmanager
    def cancelling(self, handles: Collection[RequestHandle]) -> Iterator[None]:
        """Lets `cancel`, or an error inside, end the requests of `handles`.

        Afterwards checks how they have ended.

        Raises:
            RequestError: one was cancelled.
            DeadlineError: one has passed a time limit.
        """
        with self._lock:
            self._handles.update(handles)
        try:
            with cancel_on_error(handles):
                self.check()
                yield
        finally:
            with self._lock:
                self._handles.difference_update(handles)
        for handle in handles:
            if handle.finish_reason == "queue_deadline":
                raise QueueDeadlineError("expected its begin within queue_timeout_s, which has passed")
            if handle.finish_reason == "deadline":
                raise DeadlineError("expected its end within timeout_s, which has passed")
            if handle.finish_reason == "abort":
                raise RequestError("the call was cancelled")
        self.begin()


_GENERATOR: contextvars.ContextVar[torch.Generator | None] = contextvars.ContextVar("seeds of a call", default=None)
_LIMITS: contextvars.ContextVar[CallLimits | None] = contextvars.ContextVar("limits of a call", default=None)


@contextlib.contextmanager
def call_limits(limits: CallLimits) -> Iterator[None]:
    """Submits rows of ``generate`` calls inside the block to the engine's queue, with `limits`."""
    token = _LIMITS.set(limits)
    try:
        yield
    finally:
        _LIMITS.reset(token)


@contextlib.contextmanager
def seeds_from(generator: torch.Generator) -> Iterator[None]:
    """Draws the seeds of rows inside the block from `generator`, not from torch's own."""
    token = _GENERATOR.set(generator)
    try:
        yield
    finally:
        _GENERATOR.reset(token)


def current_generator() -> torch.Generator | None:
    """Returns this thread's source of seeds; None: torch's global generator."""
    return _GENERATOR.get()


def draw_seed(seed: int | None = None, *, do_sample: bool | None) -> int:
    """Returns `seed`, or a new one if tokens are drawn.

    It is repeatable by ``torch.manual_seed`` as in transformers, or by the generator of `seeds_from`.
    """
    if seed is not None:
        return seed
    return int(torch.randint(2**63 - 1, (), generator=current_generator())) if do_sample else 0


def current_limits() -> CallLimits | None:
    """Returns the limits of the call on this thread; None for a ``generate`` of the user's own."""
    return _LIMITS.get()
