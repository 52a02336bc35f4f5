"""Checks of many model types in worker processes.

A crash or a hang ends only the check in which it happens.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import multiprocessing
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import jax

from parity_sweep import checks
from torchax_serve.parity.result import Result
from torchax_serve.parity.tasks import CAUSAL

TIME_LIMIT_S = 600.0
"""Time limit for one type, in seconds. The slowest type takes a tenth of it on an idle machine."""
START_LIMIT_S = 300.0
"""Time limit for the start of a worker process, in seconds."""
QUICK_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
"""XLA flags that reduce compile time, which dominates: each program runs once. Results are the same."""
if jax.__version_info__ < (0, 11):  # later releases end the process at a flag that they do not know
    QUICK_COMPILATION += " --xla_cpu_use_fusion_emitters=false"
TYPES_PER_WORKER = 40
"""Number of types after which a worker is replaced: the memory that JAX and transformers hold for each adds up."""


def sweep(
    types: Sequence[str],
    *,
    task: str = CAUSAL,
    num_workers: int = 2,
    time_limit_s: float = TIME_LIMIT_S,
    work: Callable[[Connection], None] | None = None,
) -> Iterator[Result]:
    """Yields a result for each type, in the order in which they end.

    Args:
        types: Model types to check.
        task: Name of the parity task, a key of `CHECKS`.
        num_workers: Number of worker processes.
        time_limit_s: Time limit for one type, in seconds.
        work: Function that a worker process runs instead of the task.
    """
    waiting = collections.deque(types)
    workers: list[_Worker] = []
    programs = tempfile.mkdtemp()
    try:
        while waiting or workers:
            while waiting and len(workers) < num_workers:
                workers.append(_Worker(work or functools.partial(_work, task=task, programs=programs)))
            for worker in workers:
                if worker.is_ready and waiting:
                    worker.give(waiting.popleft())
            wait([worker.connection for worker in workers], timeout=1.0)
            for worker in list(workers):
                if (result := worker.look(time_limit_s)) is not None:
                    yield result
                if worker.is_over or (not waiting and worker.model_type is None):
                    worker.end()
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.end()
        shutil.rmtree(programs, ignore_errors=True)


class _Worker:
    """Worker process that checks one type after the other."""

    def __init__(self, work: Callable[[Connection], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.model_type: str | None = None
        self.since = time.monotonic()
        self.num_done = 0
        self.is_started = False
        self.is_over = False

    @property
    def is_ready(self) -> bool:
        """Whether the worker is idle and accepts a type."""
        return self.is_started and self.model_type is None and not self.is_over

    def give(self, model_type: str) -> None:
        """Sends `model_type` to the worker."""
        self.model_type, self.since = model_type, time.monotonic()
        self.connection.send(model_type)

    def look(self, time_limit_s: float) -> Result | None:
        """Returns the worker's result, or that it crashed or timed out; None while it works."""
        try:
            if self.connection.poll():
                answer = self.connection.recv()
                if not self.is_started:
                    self.is_started = True
                    return None
                self.model_type, self.num_done = None, self.num_done + 1
                self.is_over = self.num_done >= TYPES_PER_WORKER
                return Result(**answer)
        except (EOFError, ConnectionResetError):
            self.process.join(timeout=10)
            return self._ended("crashed", f"the process ended with status {self.process.exitcode}")
        seconds = time.monotonic() - self.since
        if not self.is_started and seconds > START_LIMIT_S:
            raise TimeoutError(f"expected a worker process within {START_LIMIT_S:.0f} s")
        if self.model_type is not None and seconds > time_limit_s:
            return self._ended("timed out", f"no answer within {time_limit_s:.0f} s")
        return None

    def _ended(self, status: str, error: str) -> Result | None:
        self.is_over = True
        if not self.is_started:
            raise RuntimeError(f"a worker process could not start: {error}")
        return None if self.model_type is None else Result(self.model_type, "", status=status, error=error)

    def end(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def _work(connection: Connection, task: str, programs: str) -> None:
    """Runs the loop of a worker process.

    `programs` is the folder of compiled programs that all workers share.
    """
    warnings.filterwarnings("ignore")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILATION}"
    import jax
    import torch
    import transformers

    torch.set_num_threads(1)
    jax.config.update("jax_compilation_cache_dir", programs)  # of this sweep only
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs  # for processes that a check starts
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    transformers.logging.set_verbosity_error()
    connection.send("ready")
    while True:
        model_type = connection.recv()
        try:
            result = checks.check(task, model_type)
        except Exception as error:  # an error of the harness itself; the other types go on
            result = Result(model_type, "", status="crashed", error=f"{type(error).__name__}: {str(error)[:300]}")
        connection.send(dataclasses.asdict(result))


def named(result: Result, name: str) -> Result:
    """Returns `result` under another name."""
    return dataclasses.replace(result, model_type=name)


def load(path: Path) -> dict[str, Any]:
    """Reads a file of results."""
    return json.loads(path.read_text())


def save(
    path: Path, results: dict[str, Result], versions: dict[str, str], full_sweep: dict[str, Any] | None = None
) -> None:
    """Writes results by type, in order, atomically.

    `full_sweep` describes the last run of all types.
    """
    content = {
        "versions": versions,
        **({} if full_sweep is None else {"full_sweep": full_sweep}),
        "results": {name: dataclasses.asdict(results[name]) for name in sorted(results)},
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def update(
    path: Path,
    types: Sequence[str],
    versions: dict[str, str],
    *,
    again: Callable[[Result | None], bool],
    say: Callable[[Result], None],
    task: str = CAUSAL,
    num_workers: int = 2,
    work: Callable[[Connection], None] | None = None,
) -> dict[str, Result]:
    """Checks the types for which `again` is true; returns the results of all types.

    `again` gets the result in `path` or None. Results are written after each check.
    """
    results: dict[str, Result] = {}
    full_sweep, began = None, time.monotonic()
    if path.exists():
        content = load(path)
        if content["versions"] == versions:
            results = {name: Result(**fields) for name, fields in content["results"].items()}
            full_sweep = content.get("full_sweep")
    missing = [name for name in types if again(results.get(name))]
    # The longest first, so that no worker is idle while the last type runs.
    missing.sort(key=lambda name: -(results[name].total_s or 0.0) if name in results else 0.0)
    for result in sweep(missing, task=task, num_workers=num_workers, work=work):
        results[result.model_type] = result
        save(path, results, versions, full_sweep)
        say(result)
    if missing and set(missing) == set(results):
        seconds = round(time.monotonic() - began)
        full_sweep = {"types": len(missing), "seconds": seconds, "workers": num_workers, "cores": os.cpu_count()}
        save(path, results, versions, full_sweep)
    return results
