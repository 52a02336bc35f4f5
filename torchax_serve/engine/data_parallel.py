"""Data parallelism in one process: several engines of one model.

Each engine has its own devices, weights and pages; requests are distributed over the engines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torchax_serve.engine.adapters import Adapters
from torchax_serve.engine.engine import CLOSE_TIMEOUT_S, Engine
from torchax_serve.engine.factory import build_engine
from torchax_serve.engine.options import EngineOptions
from torchax_serve.engine.progress import EngineProgress
from torchax_serve.engine.request_handle import RequestHandle, cancel_on_error
from torchax_serve.executors.request_input import SpanLimits
from torchax_serve.outputs import EngineStats
from torchax_serve.scheduler import Request

if TYPE_CHECKING:
    from model_adapters.loading.progress import Progress
    from torchax_serve.runtime.model_runtime import ModelRuntime


class DataParallelEngines:
    """Group of engines with the interface of one.

    A request goes to the engine with the fewest requests and stays there.

    Args:
        runtimes: one for each replica.
        options: of each engine; they divide the bytes of host memory.
        adapters: that requests can name, on each engine; None: none.
    """

    def __init__(
        self,
        runtimes: Sequence[ModelRuntime],
        options: EngineOptions | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        if options is not None and options.kv_offloading_bytes:
            options = dataclasses.replace(options, kv_offloading_bytes=options.kv_offloading_bytes // len(runtimes))
        self.engines: list[Engine] = []
        try:
            for index, runtime in enumerate(runtimes):
                ids = itertools.count(index, len(runtimes))  # the number of a request says which engine has it
                self.engines.append(build_engine(runtime, options, ids, adapters, index))
        except BaseException:
            self.close("a replica could not be made")
            raise
        self._round_robin = itertools.count()
        self._lock = threading.RLock()  # a signal handler may submit where it interrupted a submission

    @property
    def description(self) -> str:
        """Number of replicas, and the description of one."""
        return f"{len(self.engines)} replicas, each: {self.engines[0].description}"

    def submit(self, request: Request) -> RequestHandle:
        """Works as `Engine.submit`."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[Request]) -> list[RequestHandle]:
        """Works as `Engine.submit_all`; those of one engine enter together."""
        by_engine: dict[int, list[int]] = {}
        handles: dict[int, RequestHandle] = {}
        with self._lock:
            loads = [self._num_requests(index) for index in range(len(self.engines))]
            for row, request in enumerate(requests):
                index = self._choose_engine(request, loads)
                loads[index] += 1
                by_engine.setdefault(index, []).append(row)
            with cancel_on_error(handles.values()):
                for index, rows in by_engine.items():
                    handles |= zip(rows, self.engines[index].submit_all([requests[row] for row in rows]), strict=True)
        return [handles[row] for row in range(len(requests))]

    @contextlib.contextmanager
    def submitted_together(self) -> Iterator[None]:
        """Works as `Engine.submitted_together`, on each engine."""
        with contextlib.ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.submitted_together())
            yield

    def _choose_engine(self, request: Request, loads: Sequence[int]) -> int:
        number = len(self.engines)
        if isinstance(request.fork_of, int):  # shares the pages of its parent
            return request.fork_of % number
        turn = next(self._round_robin)
        return min(((turn + step) % number for step in range(number)), key=loads.__getitem__)

    def _num_requests(self, index: int) -> int:
        scheduler = self.engines[index].stats().scheduler
        return scheduler.num_running + scheduler.num_waiting

    def warm_up(self, progress: Progress | None = None, *, wait: bool = True) -> None:
        """Works as `Engine.warm_up`, one replica after the other."""
        for engine in self.engines:
            engine.warm_up(progress, wait=wait)

    def stats(self) -> EngineStats:
        """Sums over the replicas; the pages of all of them."""
        return EngineStats.sum_of([engine.stats() for engine in self.engines])

    def can_hold(self, length: int) -> bool:
        """Works as `Engine.can_hold`."""
        return self.engines[0].can_hold(length)

    @property
    def vocab_size(self) -> int:
        """As `Engine.vocab_size`."""
        return self.engines[0].vocab_size

    @property
    def max_logprobs(self) -> int:
        """As `Engine.max_logprobs`."""
        return self.engines[0].max_logprobs

    @property
    def max_model_len(self) -> int:
        """As `Engine.max_model_len`."""
        return self.engines[0].max_model_len

    def progress(self) -> EngineProgress:
        """Returns `Engine.progress` of the engine that has not moved for the longest time.

        Engines that have something to do, or whose thread has ended, come first.
        """
        each = [engine.progress() for engine in self.engines]
        return max(each, key=lambda progress: (not progress.is_alive, progress.is_due, progress.still_s))

    @property
    def span_limits(self) -> SpanLimits:
        """As `Engine.span_limits`."""
        return self.engines[0].span_limits

    @property
    def max_encoder_len(self) -> int | None:
        """As `Engine.max_encoder_len`."""
        return self.engines[0].max_encoder_len

    @property
    def close_reason(self) -> str | None:
        """As `Engine.close_reason`, of the first that is."""
        return next((engine.close_reason for engine in self.engines if engine.close_reason is not None), None)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Works as `Engine.drain`, for all at once."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for engine in self.engines:
            engine.drain(0)
        rests = (None if until is None else max(0.0, until - time.monotonic()) for _ in self.engines)
        return all(engine.drain(rest_s) for engine, rest_s in zip(self.engines, rests, strict=True))

    def close(self, why: str = "close() was called", timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Works as `Engine.close`, for all at once."""
        until = time.monotonic() + timeout_s
        for engine in self.engines:
            engine.close(why, max(0.0, until - time.monotonic()))
