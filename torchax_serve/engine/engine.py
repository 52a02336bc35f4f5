"""Engine: any mix of requests on one model. `Engine.step` is schedule, execute, commit.

Threads, and what each may do:

* **Callers**, any threads and event loops, make requests and check them (`InputProcessor.make`). What changes requests
  they send as a command to the engine's thread: an entry, a cancellation, a call. The lock of `Engine._wake` guards the
  commands, `Engine.close_reason` and `Admission`, and nothing else; it is reentrant, because a finalizer or a signal
  handler may cancel while its thread holds it.
* **The engine's thread** (`Engine._run`), one for each engine, alone uses the scheduler, the executor, the sampler and
  the output processor; others read counts of the scheduler and constants of the runner. Between two steps it runs the
  commands that have come, in their order: a cancellation is behind the entry of its request. It waits for no reader.
* **The device** runs dispatches in the order in which they were sent, `MAX_IN_FLIGHT` at most. Step n + 1 is planned
  and sent before the tokens of step n are read and committed.
* **Readers** take outputs from the queue of their `RequestHandle`. One that blocks in a thread is woken by the put; one
  in an event loop by `call_soon_threadsafe`, once for many readers (`ReaderWakeups`).
* **A compile thread** (`torchax_serve/compilation/background.py`), and more during `warm_up`, make programs ahead, and
  touch no request. What is missing when a step needs it, the engine's thread compiles.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from model_adapters.errors import InvalidArgumentError, RequestError, TorchaxServeError
from model_adapters.jax_settings import programs_run
from torchax_serve.compilation.yielding import note_computing
from torchax_serve.engine.admission import DRAINED, Admission, InputProcessor
from torchax_serve.engine.dispatch_queue import DispatchQueue
from torchax_serve.engine.model_runner import MaskedRequests, ModelRunner, warm_up
from torchax_serve.engine.options import MAX_NUM_WAITING, MAX_NUM_WAITING_TOKENS
from torchax_serve.engine.output_processor import OutputProcessor, describe
from torchax_serve.engine.progress import ProgressClock
from torchax_serve.engine.request_handle import RequestHandle
from torchax_serve.executors.request_input import SequenceEnded
from torchax_serve.outputs import EngineStats, SchedulerStats
from torchax_serve.scheduler import Request, RequestId, RowResult, Scheduler, StepPlan
from torchax_serve.validation.owner_process import OwnerProcess

if TYPE_CHECKING:
    from model_adapters.loading.progress import Progress
    from torchax_serve.engine.kv_events import KVEventPublisher


logger = logging.getLogger("torchax_serve")

MAX_IN_FLIGHT = 2
"""Maximum number of steps in flight: the device computes one while the host prepares the next."""

LEAST_PACED_S = 0.02
"""Expected seconds of a step from which on the host waits before it plans the next one, so that requests that arrive
meanwhile are in it."""

CLOSE_TIMEOUT_S = 30.0
"""Default time limit of `Engine.close`, in seconds: longer than any step, unless it hangs or compiles."""


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


RATE_S = 10.0
"""Seconds over which the rate of new tokens is taken."""


class StepCounts:
    """Counts since the start; written by the engine's thread, read by any.

    Attributes:
        num_steps: Steps whose tokens were read.
        wait_s: Seconds of the engine's thread in which it waited for the device.
        busy_s: Seconds of the engine's thread with something to do, waits included.
    """

    def __init__(self) -> None:
        self.num_steps, self.wait_s, self.busy_s = 0, 0.0, 0.0
        self._tokens: collections.deque[tuple[float, int]] = collections.deque(maxlen=512)

    def add(self, now: float, num_steps: int, num_tokens: int) -> None:
        """Counts steps that were read at `now` seconds, and their new tokens."""
        self.num_steps += num_steps
        self._tokens.append((now, num_tokens))

    def stats(self, scheduler: SchedulerStats, num_programs: int, cache_bytes: int) -> EngineStats:
        """Returns the statistics of the engine, with those of its scheduler."""
        now = time.monotonic()
        recent = [(when, count) for when, count in list(self._tokens) if now - when < RATE_S]
        span = now - recent[0][0] if recent else 0.0
        return EngineStats(
            scheduler=scheduler,
            num_programs=num_programs,
            num_steps=self.num_steps,
            tokens_per_s=sum(count for _, count in recent) / span if span > 0 else 0.0,
            host_s=max(0.0, self.busy_s - self.wait_s),
            busy_s=self.busy_s,
            cache_bytes=cache_bytes,
        )


class Engine:
    """Owner of a scheduler, a model runner and their thread. All methods are thread-safe.

    Args:
        scheduler: Scheduler, used by this engine only.
        runner: Runner of the model and its cache.
        description: The executor and the sizes of the cache in one line.
        ids: Ids of the requests to come; 0, 1, ... by default.
        max_num_waiting: Maximum number of requests that wait for a slot.
        max_num_waiting_tokens: Maximum number of tokens of their prompts.
        events: Publishes the scheduler's log of events, and ends with the engine; None: there is none.

    Attributes:
        max_model_len, vocab_size: Most tokens of a request, with its answer; columns of the logits.
        max_logprobs: Most top log-probabilities of a request; -1: those of the whole vocabulary.
        max_encoder_len, span_limits: Most tokens for an encoder, None without one; limits of tokens that see ahead.
        can_hold: Called with a number of tokens, returns whether a request may have as many, prompt and answer.
        admission, close_reason: Decides whether requests are taken; why none are for good, None as long as they are.
        progress: Called, returns `torchax_serve.engine.progress.EngineProgress`: whether the engine moves.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        description: str = "",
        ids: Iterator[RequestId] | None = None,
        max_num_waiting: int = MAX_NUM_WAITING,
        max_num_waiting_tokens: int = MAX_NUM_WAITING_TOKENS,
        events: KVEventPublisher | None = None,
    ) -> None:
        self.description = description
        self.max_model_len, self.vocab_size = scheduler.config.max_model_len, runner.vocab_size
        self.max_logprobs = runner.max_logprobs
        self.max_encoder_len, self.can_hold = runner.max_encoder_len, scheduler.config.can_hold
        self.span_limits = runner.span_limits(scheduler.config)
        self.admission = Admission(scheduler.config.max_num_seqs, max_num_waiting, max_num_waiting_tokens)
        self._process = OwnerProcess()
        self._scheduler, self._runner, self._events = scheduler, runner, events
        self._output_processor, self._masked = OutputProcessor(runner), MaskedRequests(runner.vocab_size)
        self._dispatched = DispatchQueue()
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._idle_calls = IdleCalls(scheduler, runner)
        self._handles: weakref.WeakSet[RequestHandle] = weakref.WeakSet()  # those with a reader, ended or not
        lock = threading.RLock()
        self._wake, self._idle = threading.Condition(lock), threading.Condition(lock)  # idle: nothing is left to do
        run, masked = self._run_on_engine_thread, self._masked
        request_ids = ids or itertools.count()
        self._input_processor = InputProcessor(request_ids, scheduler, runner, self._output_processor, masked, run)
        self.close_reason: str | None = None
        self._counts = StepCounts()
        self.check_integrity = False  # after every step: for tests
        admission, queued, calls, sent = self.admission, self._commands, self._idle_calls, self._dispatched
        self._has_work = lambda: bool(queued or calls or sent or len(scheduler))
        self._is_due = lambda: bool(admission.num_entering or self._has_work())
        self.progress = ProgressClock(self._is_due)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.progress.watch(self._thread)
        self._thread.start()
        # A thread that is inside XLA while the interpreter is taken down brings the process down with it.
        atexit.register(self.close, "the process ends")

    def __repr__(self) -> str:
        return f"<Engine: {self.description}; {f'closed ({self.close_reason})' if self.close_reason else self.stats()}>"

    def submit(self, request: Request) -> RequestHandle:
        """Submits a request; returns its handle at once. Errors are those of `submit_all`."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[Request]) -> list[RequestHandle]:
        """Submits requests that enter between the same two steps: all of them or, on an error, none.

        Raises:
            InvalidArgumentError: one can never run.
            QueueFullError: too many requests wait already, or (`QueueTokensError`) too many tokens of their prompts.
            TorchaxServeError: the engine is closed or drains, or this process was forked from the one that made it.
        """
        self._process.check("an engine")
        commands, handles = [], []
        for request in requests:
            enter, handle = self._input_processor.make(request)
            commands.append(enter)
            handles.append(handle)
        prompt_lens = [handle.prompt_len for handle in handles]

        def enter_all() -> None:
            with self._wake:  # or others could see that the requests are neither entering nor live
                self.admission.entered(prompt_lens)
                for enter in commands:
                    enter()

        with self._wake:
            self.progress.will_be_due()
            goes_on = all(request.is_continuation for request in requests)
            self.admission.admit(prompt_lens, self._scheduler, self.close_reason, is_continuation=goes_on)
            self._input_processor.send(enter_all, handles)
            self._handles.update(handles)
        return handles

    @contextlib.contextmanager
    def submitted_together(self) -> Iterator[None]:
        """Lets requests submitted in the block enter between the same two steps, at its end.

        Answers to one prompt then share its pages whatever the other threads do. None may be read before the end.
        """
        with self._input_processor.together(lambda: f"the engine was closed ({self.close_reason})"):
            yield

    def _run_on_engine_thread(self, command: Callable[[], None], abandon: Callable[[], None] = lambda: None) -> None:
        """Runs `command` on the engine's thread between two steps, or `abandon` without a thread.

        May be called from a signal handler or a finalizer: the lock is the thread's own if it holds it already.
        """
        if not self._process.is_current:
            abandon()
            return
        with self._wake:
            if self.close_reason is None:
                self.progress.will_be_due()
                self._commands.append(command)
                self._wake.notify()
                return
        abandon()

    def call(self, function: Callable[[Scheduler, ModelRunner], Result], *, when_idle: bool = False) -> Result:
        """Runs `function` on the engine's thread between two steps, and returns its result.

        With `when_idle` it waits until the requests that have begun have ended, and no other begins before the end.

        Raises:
            TorchaxServeError: the engine is closed, or closes before it.
        """
        self._process.check("an engine")
        call, calls = self._idle_calls.new(function), self._idle_calls
        command = functools.partial(calls.add, call) if when_idle else call.run
        self._run_on_engine_thread(command, lambda: call.fail(self.close_reason))
        return call.result()

    def warm_up(self, progress: Progress | None = None, *, wait: bool = True) -> None:
        """Compiles every program that traffic can need, in parallel; requests run meanwhile.

        It can be ended: an exception in the calling thread, such as Ctrl-C, drops what is not being compiled.

        Args:
            progress: shows the number of programs, as it shows loading for `serve`.
            wait: False: returns at once. A thread of low priority compiles, or reads what is stored; a request that
                needs a program before that makes it itself.

        Raises:
            TorchaxServeError: the engine is closed, or a program cannot be compiled.
        """
        self._process.check("an engine")
        if not wait:
            self._runner.compile_in_background()
            return
        warm_up(self._runner, self._run_on_engine_thread, lambda: self.close_reason, progress)

    def stats(self) -> EngineStats:
        """Counts; cheap, and right between two steps."""
        counts = self._counts.stats(self._scheduler.stats(), self._runner.num_programs, self._runner.cache_bytes)
        if self._events is None:
            return counts
        published, dropped = self._events.num_batches, self._events.num_dropped
        return dataclasses.replace(counts, num_event_batches=published, num_dropped_batches=dropped)

    def drain(self, timeout_s: float | None = None, refusal: str = DRAINED) -> bool:
        """Refuses new requests, waits for the others; returns whether all have ended.

        It refuses them for good; `close` ends what is left. It blocks: an event loop calls it in a thread.

        Args:
            timeout_s: Seconds to wait at most; None: as long as it takes.
            refusal: Error of requests that are refused.

        Raises:
            InvalidArgumentError: `timeout_s` is no number of seconds.
        """
        self._process.check("an engine")
        if timeout_s is not None and not 0 <= timeout_s <= threading.TIMEOUT_MAX:
            raise InvalidArgumentError(f"timeout_s: expected seconds >= 0 or None, got {timeout_s!r}")
        with self._wake:
            self.admission.refusal = refusal
            self._idle.wait_for(lambda: self.close_reason or not self._is_due(), timeout_s)
            return self.close_reason is None and not self._is_due()

    def close(self, why: str = "close() was called", timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Ends the thread, and all requests with an error, in at most `timeout_s` seconds.

        A step that has not ended by then, because it hangs or compiles, keeps the thread; readers get their error. Safe
        to call twice or in a forked child.
        """
        if not self._process.is_current:
            self.close_reason = why
            return
        with self._wake:
            if self.close_reason is None:
                self.close_reason = why
            self._wake.notify()
        self._runner.close()
        if threading.current_thread() is self._thread:
            return
        self._output_processor.cancel_steps()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            atexit.unregister(self.close)
            return
        logger.error("the engine was closed, and its step has not ended after %g s", timeout_s)
        for handle in list(self._handles):
            handle.fail(f"the engine was closed ({self.close_reason})")

    def _run(self) -> None:
        try:
            with programs_run():
                while self._wait_for_work():
                    self.step()
        except BaseException as error:  # a fault of ours: nobody may wait for a thread that has died
            logger.exception("the engine has stopped")
            self.close_reason = f"{type(error).__name__}: {error}"
        finally:
            self._end_all()

    def _wait_for_work(self) -> bool:
        """Runs commands, waiting for some if there is no other work; False if the engine is closed.

        Readers in event loops are woken here: they run while the engine rests.
        """
        began = time.monotonic()
        self._output_processor.notify_async_readers()
        with self._wake:
            while not (self.close_reason or self._has_work()):
                self._idle.notify_all()
                note_computing(id(self), False)
                self._wake.wait()
                began = time.monotonic()
            note_computing(id(self), True)
            self.progress.moved()
            if self._dispatched.wait_until_due(self._wake, lambda: bool(self.close_reason or self._commands)):
                self._counts.wait_s += time.monotonic() - began
                self._counts.busy_s += time.monotonic() - began
            if self.close_reason:
                return False
            commands = [self._commands.popleft() for _ in range(len(self._commands))]
        for command in commands:
            command()
            self.progress.moved()
        if not self._dispatched:
            self._idle_calls.run_if_idle()
        return True

    def step(self) -> None:
        """Runs one round: plans a step, sends it to the device, takes the oldest step's tokens."""
        began = time.monotonic()
        self._masked.drop_done(self._scheduler.find)
        plan = self._scheduler.schedule(began)
        if plan is not None:
            self._execute(plan)
            self.progress.moved()
        self._output_processor.deliver(self._scheduler.pop_finished())
        # A step whose program was new is read at once: loading the next one's would hold up its tokens.
        max_in_flight = MAX_IN_FLIGHT if self._runner.runs_ahead and self._dispatched.is_timed else 1
        if len(self._dispatched) >= max_in_flight or (plan is None and self._dispatched):
            self._output_processor.notify_async_readers()  # of what has ended: the device may compute for a while
            self._commit_oldest()
        for request_id in self._output_processor.take_failed():
            self._scheduler.abort(request_id, "error")
        if self.check_integrity:
            self._scheduler.check_integrity()
        if self._events is not None and self._scheduler.events:
            self._events.publish(self._scheduler.events.take())
        self._counts.busy_s += time.monotonic() - began

    def _execute(self, plan: StepPlan) -> None:
        """Sends a plan to the device, or ends the requests of one that cannot be sent."""

        def read_all() -> None:  # tokens of all steps in flight, for masks
            while self._dispatched:
                if (error := self._commit_oldest()) is not None:
                    raise error

        num_untimed, find = self._runner.num_untimed, self._scheduler.find
        try:
            requests = {row.slot: self._output_processor.request(row.request_id) for row in plan.prefill_rows}
            fresh = {row.slot: find(row.request_id) for row in plan.prefill_rows if row.slot in plan.fresh_slots}
            outputs = {slot: [] if state is None else state.output_ids for slot, state in fresh.items()}
            masks, sent_s = self._masked.of(plan, find, read_all), time.monotonic()
            step = self._runner.execute(plan, requests, outputs, masks)
        except SequenceEnded as end:
            if self.close_reason:  # by `close`, which ends its request with an error
                return
            while self._dispatched:  # tokens that the request has got come first
                self._commit_oldest()
            self._output_processor.deliver(self._scheduler.fail(plan, end.reason))
            return
        except Exception as error:
            self._fail(plan, error)
            return
        self._output_processor.deliver_failures(step, self._scheduler.abort)
        step.is_timed, step.expected_s = self._runner.num_untimed == num_untimed, self._scheduler.expected_seconds(plan)
        if plan.num_steps == 1 and (step.expected_s < LEAST_PACED_S or not plan.num_decode):
            step.expected_s = 0.0  # the host would be late, or nothing like it was measured
        step.sent_s = time.monotonic() if masks is None else sent_s  # a masked one has waited for the step before
        self._dispatched.push(step)

    def _commit_oldest(self) -> Exception | None:
        """Reads, commits and delivers the oldest step in flight; returns its error if it has failed."""
        step, waits_from = self._dispatched.pop(), time.monotonic()
        try:
            tokens = self._runner.read(step)
        except Exception as error:
            self._fail(step.plan, error)
            return error
        now = time.monotonic()
        self._counts.wait_s += now - waits_from
        duration_s = self._dispatched.completed(step, now)
        self._output_processor.record_prompt_logprobs(step)
        num_before = self._scheduler.num_new_tokens
        outcomes = self._scheduler.commit(step.plan, tokens, now, duration_s)
        self._counts.add(now, step.plan.num_steps, self._scheduler.num_new_tokens - num_before)
        if not len(self._scheduler):  # whoever reads the last token may change the model
            self._runner.hold_tracing()
        self._output_processor.deliver(outcomes, step)
        # A deadline may have passed meanwhile; if it has ended the last request, no further step would deliver that.
        self._output_processor.deliver(self._scheduler.pop_finished())
        return None

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """Ends the requests of a plan whose step has raised; without the cache, all that use it."""
        message: str | RequestError = f"its step failed ({describe(error)})"
        if isinstance(error, RequestError):  # of one request in a step of its own
            message = error
        else:
            logger.error("a step has failed: %s: %s", type(error).__name__, error)
        outcomes = self._scheduler.fail(plan)
        if self._runner.cache_is_lost:
            for step in self._dispatched:
                outcomes += self._scheduler.fail(step.plan)
            self._dispatched.clear()
            for request_id in self._output_processor.open_ids():
                state = self._scheduler.find(request_id)
                if state is not None and state.slot is not None and self._scheduler.abort(request_id, "error"):
                    outcomes.append(RowResult(request_id, None, (), "error"))
            self._runner.reset()
            self._scheduler.clear_prefix_cache()
        self._output_processor.deliver(outcomes, error=message)

    def _end_all(self) -> None:
        """Ends all requests with an error and notifies their readers, as the thread ends."""
        note_computing(id(self), False)
        with self._wake:
            commands = [self._commands.popleft() for _ in range(len(self._commands))]
        for command in commands:
            command()  # a submission is entered, and told below
        self._idle_calls.fail_all(self.close_reason)
        open_ids = self._output_processor.open_ids()
        for request_id in open_ids:
            self._scheduler.abort(request_id, "error")
        ended = [RowResult(request_id, None, (), "error") for request_id in open_ids]
        self._output_processor.deliver(ended, error=f"the engine was closed ({self.close_reason})")
        self._output_processor.notify_async_readers()
        self._dispatched.clear()
        if self._events is not None:
            self._events.close()
        with self._wake:
            self._idle.notify_all()
