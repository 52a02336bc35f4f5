"""Functions that run on an engine's thread between two steps, or once it is idle."""

from __future__ import annotations

import collections
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from model_adapters.errors import TorchaxServeError
from torchax_serve.engine.model_runner import ModelRunner
from torchax_serve.scheduler import Scheduler

Result = TypeVar("Result")


class EngineCall(Generic[Result]):
    """A call that another thread waits for.

    Args:
        function: Returns the result; its exception is raised by `result`.
    """

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._future: Future[Result] = Future()

    def run(self) -> None:
        """Runs the call, unless its caller has been interrupted."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            self._future.set_result(self._function())
        except BaseException as error:  # its caller's, not the engine's
            self._future.set_exception(error)

    def fail(self, close_reason: str | None) -> None:
        """Ends the call with the error of a closed engine."""
        if self._future.set_running_or_notify_cancel():
            message = f"expected an open model, this one is closed ({close_reason}); call serve() again"
            self._future.set_exception(TorchaxServeError(message))

    def result(self) -> Result:
        """Waits for the result; an interrupt of the waiting thread drops a call that has not begun."""
        try:
            return self._future.result()
        finally:
            self._future.cancel()


class IdleCalls:
    """Calls that wait until the requests that have begun have ended.

    Used by the engine's thread.

    Args:
        scheduler: The engine's scheduler.
        runner: The engine's runner.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._waiting: collections.deque[EngineCall[Any]] = collections.deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def new(self, function: Callable[[Scheduler, ModelRunner], Result]) -> EngineCall[Result]:
        """Returns a call of `function`, to be added, or run by itself."""
        return EngineCall(lambda: function(self._scheduler, self._runner))

    def add(self, call: EngineCall[Any]) -> None:
        """Adds a call; no further request begins until it is done."""
        self._waiting.append(call)
        self._scheduler.hold_waiting(True)

    def run_if_idle(self) -> None:
        """Runs all calls if no request has begun; no step may be in flight."""
        if self._waiting and not self._scheduler.num_started:
            while self._waiting:
                self._waiting.popleft().run()
            self._scheduler.hold_waiting(False)

    def fail_all(self, close_reason: str | None) -> None:
        """Ends all calls with the error of a closed engine."""
        while self._waiting:
            self._waiting.popleft().fail(close_reason)
