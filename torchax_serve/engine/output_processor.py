"""Conversion of step results to outputs of requests, and delivery to their handles."""

from __future__ import annotations

import asyncio
import collections
import logging
import weakref
from collections.abc import Callable, Iterable

from model_adapters.errors import RequestError
from torchax_serve.engine.model_runner import InFlightStep, ModelRunner
from torchax_serve.engine.request_handle import ReaderWakeups, RequestHandle, RequestOutput
from torchax_serve.outputs import FinishReason, TokenLogprobs
from torchax_serve.sampling.forbidden_tokens import check_tokens_left
from torchax_serve.scheduler import Request, RequestId, RowResult
from torchax_serve.scheduler.request import RequestState

logger = logging.getLogger("torchax_serve")

_ByLoop = collections.defaultdict[asyncio.AbstractEventLoop, list[RequestHandle]]

NO_TOKEN = (
    "no token could be chosen: its logits were not finite numbers; weights may hold such, and float16 ends at 65504, "
    "so a model in float16 is better served in bfloat16 or float32"
)


class OutputProcessor:
    """The requests that have not ended, with their handles; used by the engine's thread only.

    Handles are held weakly: a handle that its reader has dropped ends its request.

    Args:
        runner: Reads log-probabilities.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._requests: dict[RequestId, tuple[Request, weakref.ref[RequestHandle]]] = {}
        # Handles of asynchronous readers with new outputs by event loop, and the loops of first and last ones.
        self._to_wake: _ByLoop = collections.defaultdict(list)
        self._urgent: set[asyncio.AbstractEventLoop] = set()
        self._wakeups: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ReaderWakeups] = weakref.WeakKeyDictionary()
        self._prompt_logprobs: dict[RequestId, dict[int, TokenLogprobs]] = {}  # log-probabilities by position, so far
        self._failed: list[RequestId] = []  # requests whose tokens could not be delivered

    def add(self, request_id: RequestId, request: Request, handle: RequestHandle) -> None:
        """Adds a request."""
        self._requests[request_id] = (request, weakref.ref(handle))

    def request(self, request_id: RequestId) -> Request:
        """Returns the request with this id."""
        return self._requests[request_id][0]

    def open_ids(self) -> list[RequestId]:
        """Returns the ids of all requests that have not ended."""
        return list(self._requests)

    def deliver(
        self,
        results: Iterable[RowResult],
        step: InFlightStep | None = None,
        error: str | RequestError | None = None,
    ) -> None:
        """Delivers results to their handles.

        `error` describes the failure of those with the reason "error". Readers in an event loop wait until
        `notify_async_readers`.
        """
        if step is not None and not step.has_logprobs:
            step = None
        for result in results:
            entry = self._requests.get(result.request_id)
            if entry is None:
                continue
            request, handle = entry[0], entry[1]()
            try:
                state = None if handle is None else handle.state
                new = self._make_output(result, request, state, step, error)
            except Exception as failure:  # what one reader's data does may not stop the others
                new = self._failure(result.request_id, failure)
            if handle is not None:
                self._put(handle, new)

    def deliver_failures(self, step: InFlightStep, abort: Callable[[RequestId, FinishReason], bool]) -> None:
        """Ends requests of a step with failures of their own, by `abort`.

        Their results are not read.
        """
        for row in step.plan.rows if step.failures else ():
            error = step.failures.get(row.slot)
            if error is not None and abort(row.request_id, "error"):
                own = error if isinstance(error, RequestError) else f"it could not be prepared ({describe(error)})"
                self.deliver([RowResult(row.request_id, None, (), "error")], error=own)

    def _put(self, handle: RequestHandle, new: RequestOutput | RowResult) -> None:
        is_first_or_last = not handle.has_output or new.finish_reason is not None
        handle.put(new)
        if handle.loop is not None:
            self._to_wake[handle.loop].append(handle)
            if is_first_or_last:
                self._urgent.add(handle.loop)

    def _failure(self, request_id: RequestId, error: Exception) -> RequestOutput:
        logger.error("request %s: its tokens could not be delivered", request_id, exc_info=error)
        self._remove(request_id)
        self._prompt_logprobs.pop(request_id, None)
        self._failed.append(request_id)
        return RequestOutput((), finish_reason="error", error=f"its tokens could not be delivered ({describe(error)})")

    def _remove(self, request_id: RequestId) -> None:
        entry = self._requests.pop(request_id, None)
        if entry is not None:
            entry[0].close()

    def cancel_steps(self) -> None:
        """Ends steps that block, such as calls of ``generate``; called from any thread."""
        for request, _ in list(self._requests.values()):
            request.cancel()

    def take_failed(self) -> list[RequestId]:
        """Returns, once each, the requests whose delivery failed.

        Their readers are informed; the caller ends the requests.
        """
        failed, self._failed = self._failed, []
        return failed

    def notify_async_readers(self) -> None:
        """Has the asynchronous readers with new outputs woken, with one call per event loop.

        One call per reader would take longer than many a step.
        """
        served, self._to_wake = self._to_wake, collections.defaultdict(list)
        urgent, self._urgent = self._urgent, set()
        for loop, handles in served.items():
            try:
                wakeups = self._wakeups.setdefault(loop, ReaderWakeups())
                wakeups.request(loop, handles, len(self._requests), at_once=loop in urgent)
            except RuntimeError:  # the loop has been closed, and its readers with it
                for handle in handles:
                    handle.cancel()

    def _make_output(
        self,
        result: RowResult,
        request: Request,
        state: RequestState | None,
        step: InFlightStep | None,
        error: str | RequestError | None,
    ) -> RequestOutput | RowResult:
        """Returns the output of a result; `step` is needed only for log-probabilities."""
        if result.finish_reason is None and step is None and not self._prompt_logprobs:
            return result  # tokens, and nothing else: nearly always
        if result.finish_reason is not None:
            self._remove(result.request_id)
        logprobs = prompt = None
        if step is not None and request.params.logprobs is not None and result.row is not None:
            num_tokens = len(result.token_ids)
            of_scores, num_top = request.params.scores_logprobs, request.params.logprobs
            logprobs = self._runner.logprobs(step, result.row, num_tokens, num_top, of_scores=of_scores)
        if self._prompt_logprobs and (result.token_ids or result.finish_reason is not None):
            by_position = self._prompt_logprobs.pop(result.request_id, None)
            if by_position is not None and result.token_ids:
                prompt = tuple(by_position.get(position) for position in range(len(request.prompt_ids)))
        if result.finish_reason == "error" and error is None:
            error = NO_TOKEN if state is None else _why_no_token(request, state, self._runner.vocab_size)
        return RequestOutput(result.token_ids, logprobs, prompt, result.finish_reason, error)

    def record_prompt_logprobs(self, step: InFlightStep) -> None:
        """Stores the log-probabilities of prompt tokens.

        They are delivered with the first new token.
        """
        if step.prompt_logprobs is None:
            return
        for index, row in enumerate(step.plan.rows):
            if row.is_decode or row.request_id not in self._requests:
                continue
            request, handle = self._requests[row.request_id][0], self._requests[row.request_id][1]()
            if request.params.prompt_logprobs is None:
                continue
            try:
                found = self._runner.prompt_logprobs(step, index, request)
            except Exception as failure:
                new = self._failure(row.request_id, failure)
                if handle is not None:
                    self._put(handle, new)
            else:
                self._prompt_logprobs.setdefault(row.request_id, {}).update(found)


def _why_no_token(request: Request, state: RequestState, vocab_size: int) -> str | RequestError:
    """Returns why no token could be chosen behind those of a request."""
    try:
        check_tokens_left(request.params, request.masks, state.tokens, state.prompt_len, vocab_size=vocab_size)
    except RequestError as error:
        return error
    return NO_TOKEN


def describe(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
