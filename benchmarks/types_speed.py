"""Speed of every model type of transformers that generates, over eager PyTorch: the engine and the drop-in.

    python benchmarks/types_speed.py                       # all that have no row yet
    python benchmarks/types_speed.py --types t5 qwen3      # some; causal:bart and images:gemma3 name the task, too
    python benchmarks/types_speed.py --kinds experts latent --dtype bfloat16 --requests 8
    python benchmarks/types_speed.py --part 3/12 --again   # every twelfth from the third on, also what has a row
    python benchmarks/types_speed.py show [--types ...]    # the table, the slowest first
    python benchmarks/types_speed.py --part 3/12 --guard   # 1 if a ratio is below 0.8 of the committed one

A model has about 100 million random weights, six layers, and a layer of every kind that the type has. Asked are 64
tokens and 32 new ones, greedy, without an end: in eager PyTorch as one batch of ``generate``; on the engine of
``serve(model)`` with its default options, as ``generate_batch``; by ``to_jax(model).generate``. An encoder reads the 64
tokens; types for speech get features of a fixed length. A type runs in a process of its own. Its sides take turns; each
has been called before, and has nothing left to compile. Prefill is a call for one token; decoding is the rest of a call
for 32. Rows have medians: seconds of the clock and of all processors, and how far memory grew with the first calls,
compilation included. On a machine that does something else, compare processor time, with ``--threads 1``: threads that
wait for each other compute nothing and take it, too. Rows are appended to benchmarks/results/types-speed.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from speed_of_types import rows
from speed_of_types.rows import Row

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results" / "types-speed.jsonl"
GUARD_RESULTS = FOLDER / "results" / "types-speed-guard.jsonl"
DTYPES, REQUESTS = ("bfloat16", "float32"), (1, 8)
LEAST = 0.8
"""Part of the committed ratio below which the guard fails."""
GUARD: dict[str, Any] = {"dtype": ["bfloat16"], "requests": [8], "threads": 1, "turns": 2, "seconds": 4.0}
POLL_S = 0.5


def measured(case: Any, options: argparse.Namespace, dtypes: Sequence[str], requests: Sequence[int]) -> Iterator[Row]:
    """Yields the rows of a type; for what its process did not answer, why."""
    command = [sys.executable, "-m", "speed_of_types.measure", case.task, case.model_type, "--dtypes", *dtypes]
    command += ["--requests", *map(str, requests), "--turns", str(options.turns), "--seconds", str(options.seconds)]
    command += ["--threads", str(options.threads)] if options.threads else []
    paths = [str(FOLDER.parent), str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    with open(os.devnull if options.log is None else options.log, "a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    limit = Limit(process, options.time_limit * len(dtypes), options.memory_limit * 1e9)
    missing = [(dtype, number) for dtype in dtypes for number in requests]
    about = {"task": case.task, "type": case.model_type, "threads": options.threads, "date": today()}
    assert process.stdout is not None
    try:
        for line in process.stdout:
            row = json.loads(line)
            missing.remove((row["dtype"], row["requests"]))
            yield {**about, **row, "cores_in_use": limit.cores_in_use()}
        process.wait()
    finally:
        limit.is_over.set()
        process.kill()
    for dtype, number in missing:
        error = limit.reason or f"the process ended with status {process.returncode}"
        others = {"kind": case.kind(), "executor": case.executor, "seconds": round(time.monotonic() - began, 1)}
        status = "timed out" if limit.reason else "crashed"
        yield {**about, "dtype": dtype, "requests": number, **others, "status": status, "error": error}


class Limit:
    """Ends a process that takes too long or too much memory; counts what other processes use."""

    def __init__(self, process: subprocess.Popen[str], seconds: float, num_bytes: float) -> None:
        self.reason: str | None = None
        self.is_over = threading.Event()
        self._process, self._deadline, self._bytes = process, time.monotonic() + seconds, num_bytes
        self._seconds = seconds
        self._since = self._used()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            watched = psutil.Process(self._process.pid)
            while not self.is_over.wait(POLL_S):
                if time.monotonic() > self._deadline:
                    self.reason = f"no end within {self._seconds:.0f} s"
                elif watched.memory_info().rss > self._bytes:
                    self.reason = f"more than {self._bytes / 1e9:g} GB of memory"
                if self.reason:
                    self._process.kill()
                    return

    def _used(self) -> tuple[float, float]:
        """Time, and the seconds of processors that others have used."""
        times = psutil.cpu_times()
        own = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            own = sum(psutil.Process(self._process.pid).cpu_times()[:2])
        return time.monotonic(), times.user + times.system + times.nice - own

    def cores_in_use(self) -> float:
        """Cores that other programs have used since the last call."""
        (before, used), self._since = self._since, self._used()
        return round(max(0.0, self._since[1] - used) / max(1e-3, self._since[0] - before), 2)


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def chosen(options: argparse.Namespace) -> list[Any]:
    """The types that the options name."""
    from speed_of_types.cases import all_cases, named

    cases = all_cases()
    if options.types:
        try:
            cases = named(cases, options.types)
        except ValueError as error:
            sys.exit(f"--types: {error}")
    if options.tasks:
        cases = [case for case in cases if case.task in options.tasks]
    if options.kinds:
        cases = [case for case in cases if case.kind() in options.kinds]
    if options.part:
        first, step = options.part
        cases = cases[first - 1 :: step]
    return cases


def sweep(options: argparse.Namespace) -> list[Row]:
    """Measures what is missing, or all with ``--again``; returns its rows."""
    known, found = rows.read(options.results), []
    cases, began = chosen(options), time.monotonic()
    for index, case in enumerate(cases):
        keys = {
            (d, n): (case.task, case.model_type, d, n, options.threads) for d in options.dtype for n in options.requests
        }
        wanted = [each for each, key in keys.items() if options.again or key not in known]
        dtypes = [dtype for dtype in options.dtype if any(each[0] == dtype for each in wanted)]
        requests = [number for number in options.requests if any(each[1] == number for each in wanted)]
        for row in measured(case, options, dtypes, requests) if wanted else ():
            if not options.guard:
                rows.append(options.results, row)
            found.append(row)
            print(f"{index + 1}/{len(cases)} {time.monotonic() - began:6.0f} s  {line(row)}", flush=True)
    return found


def line(row: Row) -> str:
    """A row in short."""
    name = f"{row['type']:24} {row['kind']:15} {row['dtype']:8} {row['requests']}"
    if row["status"] != rows.MEASURED:
        return f"{name}  {row['status']}: {str(row['error'])[:160]}"
    parts = []
    for side in ("engine", "drop-in"):
        values = [rows.ratio(row, each, side) for each in rows.RATIOS]
        parts.append(f"{side}/eager decode {values[0]} (cpu {values[1]}), prefill {values[2]} (cpu {values[3]})")
    return f"{name}  {'; '.join(parts)}"


def show(options: argparse.Namespace) -> None:
    named = {(case.task, case.model_type) for case in chosen(options)}
    found = [
        row
        for row in rows.read(options.results).values()
        if (row["task"], row["type"]) in named and row["dtype"] in options.dtype and row["requests"] in options.requests
    ]
    print(rows.table(found))
    for name in ("decode", "decode_cpu"):
        print(f"median of engine/eager by kind, {name}: {rows.median_by_kind(found, name)}")


def part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected N/M with N from 1 to M, such as 2/12, got {text!r}")
    return int(number), int(count)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["measure", "show"], default="measure")
    parser.add_argument("--types", nargs="+", metavar="TYPE")
    parser.add_argument("--tasks", nargs="+", choices=["causal", "seq2seq", "speech", "images"])
    parser.add_argument("--kinds", nargs="+")
    parser.add_argument("--part", type=part, metavar="N/M", help="a part of the types")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--requests", nargs="+", type=int, default=list(REQUESTS))
    parser.add_argument("--threads", type=int, default=0, help="cores that a process may use; default: all")
    parser.add_argument("--turns", type=int, default=4, help="of each side, at most")
    parser.add_argument("--seconds", type=float, default=8.0, help="of turns, after which no further one begins")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds of a type in a dtype")
    parser.add_argument("--memory-limit", type=float, default=8.0, help="GB of its process")
    parser.add_argument("--again", action="store_true", help="measure also what has a row")
    parser.add_argument("--guard", action="store_true", help="compare with the committed ratios; write nothing")
    parser.add_argument("--show", action="store_const", dest="command", const="show", help="the same as show")
    parser.add_argument("--results", type=Path, help="file of rows; default: benchmarks/results/types-speed.jsonl")
    parser.add_argument("--log", type=Path, help="file for what the processes print")
    options = parser.parse_args()
    if options.guard:
        vars(options).update(GUARD, again=True)
    if options.results is None:
        options.results = GUARD_RESULTS if options.guard else RESULTS
    return options


def main() -> None:
    options = parse()
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # so that the process of a type ends, too
    if options.command == "show":
        show(options)
        return
    found = sweep(options)
    if options.guard:
        wrong = rows.slower(found, rows.read(options.results), LEAST)
        print("\n".join(wrong) or f"none of {len(found)} is slower than {LEAST:g} of the committed ratio")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
