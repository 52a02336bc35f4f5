"""Compilation in other threads: of the next tokens' programs, and of all before serving.

XLA compiles without the interpreter's lock, so threads compile in parallel; one at a time traces.
"""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from model_adapters.errors import TorchaxServeError
from model_adapters.jax_settings import programs_run
from torchax_serve.compilation.program_signature import ProgramSignature
from torchax_serve.compilation.yielding import yield_to_requests

logger = logging.getLogger("torchax_serve")

MAX_THREADS = 8
"""Maximum number of threads that compile: tracing, one at a time, does not feed more, and each takes memory."""

POLL_S = 0.2
"""Seconds between two looks at what another thread does: whether it cancels, whether it holds tracing."""


@dataclasses.dataclass(frozen=True)
class CompileTask:
    """A program that can be compiled in any thread.

    Attributes:
        key: Identity of the program among the tasks of its owner.
        compile: Compiles or loads it, if it is not there, and returns it.
    """

    key: Hashable
    compile: Callable[[], Any]

    def then(self, following: Callable[[Any], Iterable[CompileTask]]) -> CompileTask:
        """Returns the task that compiles the program and then those that `following` returns for it."""

        def compile() -> Any:
            program = self.compile()
            for task in following(program):
                task.compile()
            return program

        return CompileTask(self.key, compile)


def num_compile_threads() -> int:
    """Returns the number of threads that compile in parallel: one for each core of this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, MAX_THREADS))


def abstract(tree: Any) -> Any:
    """Returns `tree` with the shape, dtype and place of each array instead of the array.

    A program compiled for these is the program for the arrays.
    """
    return ProgramSignature.of(tree, None, names_modules=False).abstract_args()


class TracingHeldError(Exception):
    """A thread of a `BackgroundCompiler` may not trace now."""


_this_thread = threading.local()


def check_may_trace() -> None:
    """Raises TracingHeldError in the thread of a `BackgroundCompiler` that is held."""
    compiler = getattr(_this_thread, "compiler", None)
    if compiler is not None and not compiler.may_trace:
        raise TracingHeldError


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Runs a trace inside, for which `BackgroundCompiler.hold_tracing` waits.

    Raises:
        TracingHeldError: The thread is that of a `BackgroundCompiler` that is held.
    """
    compiler: BackgroundCompiler | None = getattr(_this_thread, "compiler", None)
    with contextlib.nullcontext() if compiler is None else compiler.trace_lock:
        check_may_trace()
        yield


def wait_for_work(seconds: float) -> None:
    """Waits, in a `BackgroundCompiler`'s thread, until the model has worked for some time.

    For what is worth its cost only where there is much work.

    Args:
        seconds: Seconds of work, in all calls together.

    Raises:
        TracingHeldError: The model has become idle, or was closed.
    """
    compiler: BackgroundCompiler | None = getattr(_this_thread, "compiler", None)
    while compiler is not None and compiler.waited_s < seconds:
        if compiler.is_closed or not compiler.may_trace:
            raise TracingHeldError
        time.sleep(POLL_S)
        compiler.waited_s += POLL_S


class BackgroundCompiler:
    """Compiles tasks in one thread of low priority, in their order, while others compute.

    A trace replaces the tensors of the model's modules for its time. So none runs while the model is idle and its
    owner may change it: see `hold_tracing`.

    The thread ends when nothing is left. It ends before the process does: a thread inside XLA while the interpreter is
    taken down would bring the process down with it.

    Attributes:
        is_closed: Whether it takes no more tasks.
        trace_lock: Held while a task traces.
        waited_s: Time in seconds that `wait_for_work` has waited.
    """

    def __init__(self) -> None:
        self._tasks: collections.deque[CompileTask] = collections.deque()
        self._known: set[Hashable] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.is_closed, self.waited_s = False, 0.0
        self.trace_lock = threading.RLock()
        self._may_trace = threading.Event()
        self._may_trace.set()
        atexit.register(_close, weakref.ref(self))

    def submit(self, task: CompileTask) -> None:
        """Compiles a program in the background.

        A program that was submitted before is not compiled again.
        """
        with self._lock:
            if self.is_closed or task.key in self._known:
                return
            self._known.add(task.key)
            self._tasks.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="compile", daemon=True)
                self._thread.start()

    @property
    def may_trace(self) -> bool:
        """Whether the thread may trace."""
        return self._may_trace.is_set()

    def hold_tracing(self) -> None:
        """Lets no task trace any more; waits for one that does. What XLA compiles goes on."""
        with self._lock:
            if not self.is_closed:  # else its thread would never end
                self._may_trace.clear()
        with self.trace_lock:
            return

    def allow_tracing(self) -> None:
        """Lets tasks trace again."""
        self._may_trace.set()

    def _run(self) -> None:
        _this_thread.compiler = self
        yield_to_requests()
        while True:
            with self._lock:
                if self.is_closed or not self._tasks:
                    self._thread = None
                    return
                task = self._tasks.popleft()
            try:
                with programs_run():
                    task.compile()
            except TracingHeldError:
                with self._lock:
                    self._tasks.appendleft(task)
                self._may_trace.wait()
            except Exception as error:  # whoever needs the program compiles it, and gets the error
                logger.info("a program was not compiled ahead: %s", str(error).splitlines()[0:1])
            del task  # which holds weights

    def drop(self) -> None:
        """Drops what is waiting, which may be submitted again; what is being compiled goes on."""
        with self._lock:
            self._known.difference_update(task.key for task in self._tasks)
            self._tasks.clear()

    def wait(self) -> None:
        """Waits until nothing is left to compile."""
        while (thread := self._thread) is not None:
            self.allow_tracing()  # again: the model may have become idle meanwhile
            thread.join(POLL_S)

    def close(self) -> None:
        """Drops what is waiting, and waits for the program that is being compiled."""
        with self._lock:
            self.is_closed = True
            self._tasks.clear()
        if self._thread is not threading.current_thread():
            self.wait()


def _close(compiler: weakref.ref[BackgroundCompiler]) -> None:
    if (open_one := compiler()) is not None:
        open_one.close()


def compile_all(
    tasks: Sequence[CompileTask],
    advance: Callable[[int], object] = lambda number: None,
    cancelled: Callable[[], str | None] = lambda: None,
) -> None:
    """Compiles all tasks, in parallel where there are cores.

    An exception in the caller, such as Ctrl-C, ends it: what is being compiled is finished by its thread, the rest is
    dropped.

    Args:
        tasks: The programs.
        advance: Called with the number of programs done since its last call.
        cancelled: Returns the reason to stop, if there is one; looked at several times a second.

    Raises:
        TorchaxServeError: it was cancelled.
        Exception: of a program that cannot be compiled.
    """

    def run(task: CompileTask) -> None:
        with programs_run():
            task.compile()

    pool = concurrent.futures.ThreadPoolExecutor(num_compile_threads(), thread_name_prefix="warm-up")
    try:
        pending = {pool.submit(run, task) for task in tasks}
        while pending:
            if (reason := cancelled()) is not None:
                raise TorchaxServeError(f"expected the warm-up to end, got {reason}; what is compiled stays")
            done, pending = concurrent.futures.wait(
                pending, timeout=POLL_S, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                future.result()
            advance(len(done))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
