"""Runs the process that measures types, within limits of time and memory."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from speed_of_types.rows import Row

if TYPE_CHECKING:
    from speed_of_types.cases import TypeCase

BENCHMARKS = Path(__file__).resolve().parents[1]
POLL_S = 0.5
MOST_WAITING = 10
"""Time in which a row has to come, over the processor time that it may take."""
_RUNNING: set[subprocess.Popen[str]] = set()


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is measured of each type.

    Attributes:
        dtypes, requests: of rows.
        turns, seconds: of the sides of a row, at most; `least_turns` are taken even so.
        sides: the first is eager PyTorch.
        is_small: whether models are small.
        cores: numbers of those that the process may use.
        lock: file of a lock that a process has while it times a row and its siblings stand; None if they have cores
            of their own.
        time_limit_s: of a row, of a processor.
        memory_limit: bytes of the process.
        log: file for what it prints.
    """

    dtypes: Sequence[str]
    requests: Sequence[int]
    turns: int
    least_turns: int
    seconds: float
    sides: Sequence[str]
    is_small: bool
    cores: Sequence[int]
    lock: Path | None
    time_limit_s: float
    memory_limit: float
    log: Path | None

    def command(self, cases: Sequence[TypeCase]) -> list[str]:
        """The process of some types, one after the other."""
        command = [sys.executable, "-m", "speed_of_types.measure", *(case.name for case in cases)]
        command += ["--dtypes", *self.dtypes, "--requests", *map(str, self.requests), "--turns", str(self.turns)]
        command += ["--least-turns", str(self.least_turns), "--seconds", str(self.seconds)]
        command += ["--sides", *self.sides, "--cores", *map(str, self.cores)]
        command += [] if self.lock is None else ["--lock", str(self.lock)]
        return [*command, "--small"] if self.is_small else command


def measured(cases: Sequence[TypeCase], asked: Asked) -> Iterator[Row]:
    """Yields the rows of types in one process; if it ends early, the reason is that of the type that it was at.

    The types behind that one are measured in another process.
    """
    waiting = list(cases)
    while waiting:
        missing = {
            (each.name, dtype, number) for each in waiting for dtype in asked.dtypes for number in asked.requests
        }
        began = time.monotonic()
        with _process(waiting, asked) as (process, limit):
            for line in process.stdout:
                row = json.loads(line)
                missing.discard((f"{row['task']}:{row['type']}", row["dtype"], row["requests"]))
                limit.end_of_row()
                yield row
            process.wait()
        if not missing:
            return
        at = next(case for case in waiting if any(case.name == each for each, _, _ in missing))
        error = limit.reason or f"the process ended with status {process.returncode}"
        for _, dtype, number in sorted(each for each in missing if each[0] == at.name):
            about = {"task": at.task, "type": at.model_type, "dtype": dtype, "requests": number}
            about |= {"kind": at.kind(), "executor": at.executor, "seconds": round(time.monotonic() - began, 1)}
            yield {**about, "status": "timed out" if limit.reason else "crashed", "error": error, "cores_in_use": 0.0}
        waiting = waiting[waiting.index(at) + 1 :]


@contextlib.contextmanager
def _process(cases: Sequence[TypeCase], asked: Asked) -> Iterator[tuple[Any, Limit]]:
    paths = [str(BENCHMARKS.parent), str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    with open(os.devnull if asked.log is None else asked.log, "a") as log:
        process = subprocess.Popen(asked.command(cases), stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    limit = Limit(process, asked.time_limit_s, asked.memory_limit)
    _RUNNING.add(process)
    try:
        yield process, limit
    finally:
        limit.is_over.set()
        process.kill()
        process.communicate()
        _RUNNING.discard(process)
        for each in list(_RUNNING):  # it may have ended while it was the one that is timed
            each.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def alone_in_time(lock: Path | None) -> Iterator[None]:
    """Waits until no sibling of this process times anything, and stops them meanwhile; nothing without a lock."""
    if lock is None:
        yield
        return
    own = psutil.Process()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        siblings = [each for each in own.parent().children() if each.pid != own.pid]
        for each in siblings:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.suspend()
        try:
            yield
        finally:
            for each in siblings:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.resume()


def end_all() -> None:
    """Ends all processes that measure."""
    for process in list(_RUNNING):
        process.kill()


class Limit:
    """Ends a process that takes too long for a row or too much memory.

    Time is that of the processor, so that a busy machine ends nothing; one that waits has `MOST_WAITING` times that.

    Attributes:
        reason: why it was ended; None if it was not.
        is_over: set when the process needs no limit any more.
    """

    def __init__(self, process: subprocess.Popen[str], seconds: float, num_bytes: float) -> None:
        self.reason: str | None = None
        self.is_over = threading.Event()
        self._process, self._seconds, self._bytes = process, seconds, num_bytes
        self._since = self._now()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            watched = psutil.Process(self._process.pid)
            while not self.is_over.wait(POLL_S):
                since, cpu_s = self._since
                waited_s = time.monotonic() - since
                if sum(watched.cpu_times()[:2]) - cpu_s > self._seconds or waited_s > MOST_WAITING * self._seconds:
                    self.reason = f"no row within {self._seconds:g} s of a processor"
                elif watched.memory_info().rss > self._bytes:
                    self.reason = f"more than {self._bytes / 1e9:g} GB of memory"
                if self.reason:
                    self._process.kill()
                    return

    def _now(self) -> tuple[float, float]:
        """Returns the time, and the processor seconds that the process has used."""
        used = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            used = sum(psutil.Process(self._process.pid).cpu_times()[:2])
        return time.monotonic(), used

    def end_of_row(self) -> None:
        """Begins the time of the next row."""
        self._since = self._now()
