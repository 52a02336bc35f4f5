"""Processes of serving systems, from the side of the benchmark."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil  # type: ignore[import-untyped]

from serving_peers.jobs import Job, JobResult
from serving_peers.settings import SystemSettings

BENCHMARKS = Path(__file__).resolve().parents[1]
CLOSE_S = 60.0
LOG_TAIL = 3000  # characters


@dataclasses.dataclass(frozen=True)
class System:
    """How to start one.

    Attributes:
        name: in tables.
        module: of this package.
        python: interpreter of its environment.
        settings: how it is laid out.
        environment: variables besides those of the benchmark.
        packages: folder of its own packages; None: those of the benchmark.
    """

    name: str
    module: str
    python: str
    settings: SystemSettings
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    packages: Path | None = None

    def command(self) -> list[str]:
        """Of its process; with packages of its own it sees no others."""
        alone = [] if self.packages is None else ["-S"]
        return [self.python, *alone, "-m", f"serving_peers.{self.module}", self.settings.to_json()]

    def variables(self) -> dict[str, str]:
        """The whole environment of its process."""
        if self.packages is None:
            paths = [str(BENCHMARKS.parent), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
        else:
            paths = [str(self.packages), str(BENCHMARKS)]
        fixed = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        return {**os.environ, **fixed, **self.environment}

    def with_environment(self, more: Mapping[str, str]) -> System:
        return dataclasses.replace(self, environment={**self.environment, **more})


def peak_of(pid: int) -> int:
    """Peak resident bytes of a process as Linux keeps them; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


class Worker:
    """A system that has been started and is ready; a context manager that ends it.

    It is stopped by a signal while it is not asked: some systems keep a core busy while they wait, which the next one
    would pay for.

    Attributes:
        ready_s: from the start of the process until it was ready.
    """

    def __init__(self, system: System, log: Path, timeout_s: float) -> None:
        self.name, self._log, self._timeout_s = system.name, log, timeout_s
        self._started_s = time.perf_counter()
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                system.command(),
                env=system.variables(),
                cwd=log.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # so that its own children end with it
            )
        try:
            self._read()
        except BaseException:
            self.close()
            raise
        self.ready_s = self.age_s()
        self._signal(signal.SIGSTOP)

    def age_s(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self._started_s

    def run(self, job: Job) -> JobResult:
        before = self._cpu_s()
        result = JobResult.from_json(self._ask(job.to_json()))
        return dataclasses.replace(result, cpu_s=self._cpu_s() - before)

    def _cpu_s(self) -> float:
        times = [each.cpu_times() for each in self._processes()]
        return sum(each.user + each.system for each in times)

    def _processes(self) -> list[Any]:
        """The process, and those it has started that still run."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def peak_bytes(self) -> int:
        """The highest resident memory so far: of the process, and of those it has started that still run."""
        return sum(peak_of(each.pid) for each in self._processes())

    def facts(self) -> dict[str, Any]:
        return self._ask({"facts": True})

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._error("has ended") from None
        answer = self._read()
        self._signal(signal.SIGSTOP)
        return answer

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._signal(signal.SIGKILL)

        timer = threading.Timer(self._timeout_s, give_up)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if late.is_set():
            raise self._error(f"has not answered within {self._timeout_s:.0f} s")
        if not line:
            raise self._error("has ended")
        return json.loads(line)

    def _error(self, what: str) -> RuntimeError:
        return RuntimeError(f"{self.name} {what}; the end of its log:\n{self._log.read_text()[-LOG_TAIL:]}")

    def _signal(self, number: signal.Signals) -> None:
        """To the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Lets it end by itself, and sees to it that nothing of it is left."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
