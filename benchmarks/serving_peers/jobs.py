"""What a serving system is asked and what it answers, and the loop of its process. Standard library alone.

A system runs as ``python -m serving_peers.NAME SETTINGS`` in an environment that may have nothing of this project. It
says that it is ready, then answers each line on its standard input (a `Job`, or a question for its facts) with a line
on its standard output. Whatever libraries print goes to standard error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TextIO


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request and when it comes.

    Attributes:
        prompt_ids: token ids.
        max_new_tokens: exactly so many are generated: an end of the text is ignored.
        at_s: seconds from the start of the job.
        after_tokens: comes once every request that has a time has at least so many tokens; `at_s` is then nothing.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    at_s: float = 0.0
    after_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Job:
    """Requests that one system serves, greedily."""

    arrivals: list[Arrival]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Job:
        return cls([Arrival(**each) for each in found["arrivals"]])


@dataclasses.dataclass
class Trace:
    """What became of a request; seconds from the start of the job.

    Attributes:
        arrived_s: when it was due, whenever the system took it.
        token_times_s: when each token was handed out.
    """

    arrived_s: float = 0.0
    token_ids: list[int] = dataclasses.field(default_factory=list)
    token_times_s: list[float] = dataclasses.field(default_factory=list)

    def add(self, token_ids: list[int], now_s: float) -> None:
        self.token_ids += token_ids
        self.token_times_s += [now_s] * len(token_ids)

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_times_s[0] - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Time per token behind the first; None without one."""
        later = len(self.token_times_s) - 1
        return (self.token_times_s[-1] - self.token_times_s[0]) / later if later else None


@dataclasses.dataclass(frozen=True)
class JobResult:
    """The traces, in the order of the arrivals.

    Attributes:
        num_cached_tokens: prompt tokens found in a prefix cache; None where that is not known.
        num_compiled: programs compiled or loaded during the job; None where that is not known.
        cpu_s: processor seconds of the system's processes, waiting in loops included; None where it was not asked.
    """

    traces: list[Trace]
    num_cached_tokens: int | None = None
    num_compiled: int | None = None
    cpu_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> JobResult:
        return cls(**found | {"traces": [Trace(**each) for each in found["traces"]]})

    @property
    def total_s(self) -> float:
        """From the start of the job to the last token of all."""
        return max(trace.token_times_s[-1] for trace in self.traces)


class RequestGate:
    """Decides which of a job's requests are due, for systems driven by a loop of steps; notes what they answer."""

    def __init__(self, job: Job) -> None:
        self.traces = [Trace(each.at_s) for each in job.arrivals]
        self._arrivals = job.arrivals
        self._waiting = sorted(range(len(job.arrivals)), key=lambda index: job.arrivals[index].at_s)
        self._start_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def take_due(self) -> Iterator[int]:
        """Indices of the requests that have come since the last call."""
        now, held = self.now_s(), []
        for index in self._waiting:
            if not self._is_due(self._arrivals[index], now):
                held.append(index)
                continue
            if self._arrivals[index].after_tokens is not None:
                self.traces[index].arrived_s = now
            yield index
        self._waiting = held

    def _is_due(self, arrival: Arrival, now_s: float) -> bool:
        if arrival.after_tokens is None:
            return arrival.at_s <= now_s
        return all(
            len(trace.token_ids) >= arrival.after_tokens
            for trace, each in zip(self.traces, self._arrivals, strict=True)
            if each.after_tokens is None
        )

    @property
    def has_triggers(self) -> bool:
        """Whether some of those still to come wait for tokens of others."""
        return any(self._arrivals[index].after_tokens is not None for index in self._waiting)

    @property
    def is_open(self) -> bool:
        """Whether a request has still to come."""
        return bool(self._waiting)

    def until_next_s(self) -> float | None:
        """Seconds until the next request with a time; None if none is left."""
        times = [self._arrivals[index].at_s for index in self._waiting if self._arrivals[index].after_tokens is None]
        return max(0.0, min(times) - self.now_s()) if times else None

    async def serve(self, read: Callable[[int], Coroutine[Any, Any, None]], progress: asyncio.Event) -> None:
        """Starts `read(index)` as a task for each request once it is due, and returns when all have ended.

        `read` sets `progress` with each token that it notes.
        """
        async with asyncio.TaskGroup() as readers:
            while True:
                progress.clear()
                for index in self.take_due():
                    readers.create_task(read(index))
                if not self.is_open:
                    break
                if self.has_triggers:
                    await progress.wait()
                else:
                    await asyncio.sleep(self.until_next_s() or 0.0)

    def finish(self) -> list[Trace]:
        """The traces.

        Raises:
            RuntimeError: a request has another number of tokens than it asked for.
        """
        for index, (trace, arrival) in enumerate(zip(self.traces, self._arrivals, strict=True)):
            if len(trace.token_ids) != arrival.max_new_tokens:
                raise RuntimeError(
                    f"request {index}: expected {arrival.max_new_tokens} tokens, got {len(trace.token_ids)}"
                )
        return self.traces


def own_output() -> TextIO:
    """Standard output for this protocol alone: what else is written there, by subprocesses too, goes to stderr."""
    ours = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return ours


def answer_jobs(output: TextIO, run: Callable[[Job], JobResult], facts: Callable[[], dict[str, Any]]) -> None:
    """Says that the system is ready, and answers until standard input ends."""
    print(json.dumps({"ready": True}), file=output, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = facts() if asked == {"facts": True} else run(Job.from_json(asked)).to_json()
        print(json.dumps(answer), file=output, flush=True)
