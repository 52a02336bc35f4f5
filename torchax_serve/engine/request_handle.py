"""Handles of submitted requests: tokens as they arrive, for threads and event loops."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import queue
import time
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Self

from model_adapters.errors import RequestError
from torchax_serve.compilation.compile_lock import check_not_compiling
from torchax_serve.outputs import FinishReason, TokenLogprobs
from torchax_serve.scheduler import RequestId, RowResult
from torchax_serve.scheduler.request import RequestState
from torchax_serve.validation.owner_process import this_process


class RequestOutput(NamedTuple):
    """The output of a step for one request, or of several that a reader finds together."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each token, if they were asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # with the first tokens; None for the first one
    finish_reason: FinishReason | None = None  # None: more will come
    error: str | RequestError | None = None  # with the reason "error"


class RequestHandle:
    """Submitted request: an iterator (`for`, or `async for`) with a blocking `result`.

    A handle that is dropped before its end was read ends the request. One reader at a time.
    """

    def __init__(self, request_id: RequestId, prompt_len: int, cancel: Callable[[FinishReason], None]) -> None:
        self.request_id = request_id
        self.prompt_len = prompt_len
        self.submitted_s = time.monotonic()
        self.token_ids: list[int] = []  # so far read
        self.finish_reason: FinishReason | None = None  # once the end was read
        self.state: RequestState | None = None  # the scheduler's, once the request has entered; read-only
        self._cancel = cancel
        self._arrivals: queue.SimpleQueue[RequestOutput | RowResult] = queue.SimpleQueue()
        self._waiter: asyncio.Future[None] | None = None  # what an asynchronous reader waits for
        self.loop: asyncio.AbstractEventLoop | None = None  # of an asynchronous reader
        self.has_output = False  # whether one has arrived, read or not
        self._process = this_process()

    def __repr__(self) -> str:
        state = "running" if self.finish_reason is None else f"finish_reason={self.finish_reason!r}"
        return (
            f"<RequestHandle {self.request_id}: {self.prompt_len} prompt tokens, {len(self.token_ids)} tokens read, "
            f"{state}>"
        )

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache; 0 until the request runs."""
        return 0 if self.state is None else self.state.num_cached or 0

    @property
    def queued_s(self) -> float | None:
        """Seconds from its submission to its first step; None until then."""
        started_s = None if self.state is None else self.state.started_s
        return None if started_s is None else max(0.0, started_s - self.submitted_s)

    @property
    def num_preemptions(self) -> int:
        """How often the request made room for others."""
        return 0 if self.state is None else self.state.num_preemptions

    def __del__(self) -> None:
        """Cancels the request, whose output has no reader any more.

        Nothing else holds the handle: the output processor and the commands have weak references.
        """
        try:
            self.cancel()
        except Exception:  # the interpreter is being taken down
            return

    def put(self, new: RequestOutput | RowResult) -> None:
        """Stores an output, on the engine's thread, which then has `loop` call `wake`, if set.

        Most outputs are tokens and nothing else. Those come as the `RowResult` of the commit, and the reader's thread
        makes the `RequestOutput` (`_take`): the engine's is spared it.
        """
        self.has_output = True
        self._arrivals.put(new)

    def fail(self, error: str) -> None:
        """Gives the reader an error as its last output.

        Called from any thread, once the engine's own delivers nothing more.
        """
        self.put(RequestOutput((), finish_reason="error", error=error))
        loop = self.loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed, and its readers with it
                loop.call_soon_threadsafe(self.wake)

    def wake(self) -> None:
        """Lets the asynchronous reader look for arrivals; called in its event loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self, reason: FinishReason = "abort") -> None:
        """Ends the request; what it has computed stays readable.

        Cancelling twice, or after the end, does nothing.
        """
        if self.finish_reason is None:
            self._cancel(reason)

    def _take(self, new: RequestOutput | RowResult) -> RequestOutput:
        if isinstance(new, RowResult):
            new = RequestOutput(new.token_ids)
        self.token_ids += new.token_ids
        self.finish_reason = new.finish_reason
        if isinstance(new.error, RequestError):
            raise new.error
        if new.finish_reason == "error":
            raise RequestError(f"request {self.request_id}: {new.error}")
        return new

    def _take_all(self) -> tuple[list[RequestOutput], RequestError | None]:
        """Returns the outputs that have arrived, and the error that has ended the request, if any."""
        outputs: list[RequestOutput] = []
        try:
            while self.finish_reason is None:
                outputs.append(self._take(self._arrivals.get_nowait()))
        except queue.Empty:
            pass
        except RequestError as error:
            return outputs, error
        return outputs, None

    def __iter__(self) -> Iterator[RequestOutput]:
        """Blocks for each arrival; ends after the one with a finish reason.

        Raises:
            RequestError: the request failed.
        """
        while self.finish_reason is None:
            self._process.check("a request")
            check_not_compiling()  # the engine may wait for the same lock
            yield self._take(self._arrivals.get())

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Yields outputs without blocking the event loop; leaving early cancels the request.

        Outputs that have arrived since the last one come as one: a reader that is slower than the engine then has fewer
        of them to handle, and keeps up.

        Raises:
            RequestError: the request failed.
        """
        self._process.check("a request")
        self.loop = loop = asyncio.get_running_loop()
        try:
            while self.finish_reason is None:
                if self._arrivals.empty():
                    self._waiter = loop.create_future()
                    await self._waiter
                    continue
                outputs, failure = self._take_all()
                if outputs:
                    yield outputs[0] if len(outputs) == 1 else _joined(outputs)
                if failure is not None:
                    raise failure
        finally:
            self.loop = self._waiter = None
            self.cancel()

    def result(self) -> list[int]:
        """Returns all new token ids, once the request has ended."""
        for _ in self:
            pass
        return self.token_ids


def _joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Returns outputs of one request as one."""
    logprobs = None
    if any(output.logprobs is not None for output in outputs):
        logprobs = tuple(each for output in outputs for each in output.logprobs or ())
    return RequestOutput(
        tuple(token_id for output in outputs for token_id in output.token_ids),
        logprobs,
        next((output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None), None),
        outputs[-1].finish_reason,
    )


@contextlib.contextmanager
def cancel_on_error(handles: Collection[RequestHandle]) -> Iterator[None]:
    """Cancels `handles` if the block raises, also on an interrupt.

    Their outputs have no reader then.
    """
    try:
        yield
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise


class TokenStream(Iterator[int]):
    """Iterator over new token ids as they come, the one that ends the answer included.

    ``async for`` works, too. A context manager, also with ``async with``: leaving it, or closing it, ends the request.

    Attributes:
        logprobs: of the tokens yielded so far, where they were asked for.
        prompt_logprobs: of the prompt's tokens, None for the first one; with the first token, where they are asked for.
    """

    def __init__(self, handle: RequestHandle) -> None:
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._handle = handle
        self._arrivals = iter(handle)
        self._async_arrivals: AsyncIterator[RequestOutput] | None = None
        self._ready: collections.deque[int] = collections.deque()

    def __repr__(self) -> str:
        return f"<TokenStream of {self._handle!r}>"

    @property
    def handle(self) -> RequestHandle:
        """Handle of the request, for a reader that takes its tokens by step.

        Such a reader does not use this iterator.
        """
        return self._handle

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the request has ended, once its last token was yielded."""
        return None if self._ready else self._handle.finish_reason

    def _take(self, new: RequestOutput) -> None:
        self._ready.extend(new.token_ids)
        self.logprobs += new.logprobs or ()
        self.prompt_logprobs = self.prompt_logprobs or new.prompt_logprobs

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        while not self._ready:
            self._take(next(self._arrivals))
        return self._ready.popleft()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        if self._async_arrivals is None:
            self._async_arrivals = aiter(self._handle)
        while not self._ready:
            self._take(await anext(self._async_arrivals))
        return self._ready.popleft()

    def close(self) -> None:
        """Ends the request if it still runs."""
        self._handle.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()


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
