"""Speed of every model type of transformers that generates, over eager PyTorch: the engine and the drop-in.

    python benchmarks/types_speed.py                       # all that have no row yet
    python benchmarks/types_speed.py --types t5 qwen3      # some; causal:bart and images:gemma3 name the task, too
    python benchmarks/types_speed.py --kinds experts latent --dtype bfloat16 --requests 8
    python benchmarks/types_speed.py --part 3/12 --again   # every twelfth from the third on, also what has a row
    python benchmarks/types_speed.py show [--types ...]    # the table, the slowest first
    python benchmarks/types_speed.py page                  # writes docs/models.md, docs/performance.md, a picture
    python benchmarks/types_speed.py --small --again       # small models, some seconds for a type; --dtype float32, too
    python benchmarks/types_speed.py --guard               # those with a row of this processor; 1 if below 0.8 of it

A model has 50 to 200 million random weights, four layers, and a layer of every kind that the type has. Asked are 64
tokens and 32 new ones, greedy, without an end: in eager PyTorch as one batch of ``generate``; on the engine of
``serve(model)`` with its default options, as ``generate_batch``; by ``to_jax(model).generate``. An encoder reads the
64 tokens; types for speech get features of a fixed length. A type runs in a process of its own. Its sides take turns;
each has been called before, and has nothing left to compile. With ``--workers 3`` other types get ready meanwhile;
while one is timed, they stand. Prefill is a call for one token; decoding is the rest of a call for 32. Rows have
medians: seconds of the clock and of all processors, and how far memory grew with the first calls, compilation
included. On a machine that does something else, compare processor time, with ``--threads 1``: threads that wait for
each other compute nothing and take it, too. Rows are appended to benchmarks/results/types-speed.jsonl.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import datetime
import importlib.metadata
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from processors import processor
from speed_of_types import pages, rows
from speed_of_types.kinds import KINDS
from speed_of_types.processes import Asked, end_all, measured
from speed_of_types.rows import Row

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results" / "types-speed.jsonl"
SMALL_RESULTS = FOLDER / "results" / "types-speed-small.jsonl"
DTYPES, REQUESTS = ("bfloat16", "float32"), (1, 8)
LEAST, MEASURED_AGAIN = 0.8, 3
"""Part of the committed ratio below which the guard fails; times that it measures a type once more before."""
SIDES = ("eager", "engine", "drop-in")
SMALL: dict[str, Any] = {
    "dtype": ["bfloat16"],
    "requests": [8],
    "sides": SIDES[:2],
    "threads": 1,
    "workers": 2,
    "turns": 5,
    "least_turns": 3,
    "seconds": 2.0,
    "results": SMALL_RESULTS,
}
"""Options of measurements that take a few seconds for a type."""


def here() -> dict[str, Any]:
    """The day, the machine, and the versions of libraries."""
    names = ("torch", "jax", "transformers")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": next(
            (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
        ),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: importlib.metadata.version(name) for name in names},
    }


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
    if options.guard:
        known = {(row["task"], row["type"]) for row in known_here(options).values()}
        cases = [case for case in cases if (case.task, case.model_type) in known]
    if options.part:
        first, step = options.part
        cases = cases[first - 1 :: step]
    return cases


def known_here(options: argparse.Namespace) -> dict[rows.Key, Row]:
    """The committed rows that a processor of this kind was measured for."""
    here = processor()
    return {key: row for key, row in rows.read(options.results).items() if row.get("processor") == here}


def sweep(options: argparse.Namespace) -> list[Row]:
    """Measures what is missing, or all with ``--again``; returns its rows."""
    known, found, model = rows.read(options.results), [], processor()
    cases, began = chosen(options), time.monotonic()
    waiting = []
    for case in cases:
        of_case = (case.task, case.model_type)
        keys = [(*of_case, d, n, options.threads, model) for d in options.dtype for n in options.requests]
        if options.again or any(key not in known for key in keys):
            waiting.append(case)
    size = -(-len(waiting) // (2 * options.workers)) if options.small else 1
    groups = collections.deque(waiting[at : at + size] for at in range(0, len(waiting), size))
    lock, about = threading.Lock(), {"threads": options.threads, **here()}

    def work(number: int) -> None:
        while True:
            with lock:
                if not groups:
                    return
                group = groups.popleft()
            for row in measured(group, asked(options, number)):
                with lock:
                    found.append({**about, **row})
                    if not options.guard:
                        rows.append(options.results, found[-1])
                    print(f"{len(found)} rows, {time.monotonic() - began:5.0f} s  {line(row)}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        for future in [pool.submit(work, number) for number in range(options.workers)]:
            future.result()
    cpu = sum(row.get("cpu_s", 0.0) for row in found)
    print(f"{len(waiting)} of {len(cases)} types, {cpu:.0f} s of processors, {time.monotonic() - began:.0f} s")
    return found


def asked(options: argparse.Namespace, worker: int) -> Asked:
    """What a worker measures, on cores of its own where there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    number = options.threads or len(cores)
    first = worker * number % len(cores)
    return Asked(
        dtypes=options.dtype,
        requests=options.requests,
        turns=options.turns,
        least_turns=options.least_turns,
        seconds=options.seconds,
        sides=options.sides,
        is_small=options.small,
        cores=(cores[first:] + cores[:first])[:number],
        lock=None if options.workers * number <= len(cores) else options.lock,
        time_limit_s=options.time_limit,
        memory_limit=options.memory_limit * 1e9,
        log=options.log,
    )


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
        for row in rows.newest(rows.read(options.results).values())
        if (row["task"], row["type"]) in named and row["dtype"] in options.dtype and row["requests"] in options.requests
    ]
    print(rows.table(found))
    for name in ("decode", "decode_cpu"):
        print(f"median of engine/eager by kind, {name}: {rows.median_by_kind(found, name)}")


def write_pages(options: argparse.Namespace) -> None:
    """Writes the documents that show rows, and the file in the package that one of them reads."""
    from parity_sweep import models_page, speed_table
    from serving_peers.performance_page import page

    rows.tidy(options.results)
    found = pages.Results.of(rows.newest(rows.read(options.results).values()))
    speed_table.write(pages.about(found), pages.columns(found))
    docs = FOLDER.parent / "docs"
    models_page.write(FOLDER.parent)
    pages.draw(options.results.parent, docs / "pictures")
    (docs / "performance.md").write_text(page(options.results.parent))


def part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected N/M with N from 1 to M, such as 2/12, got {text!r}")
    return int(number), int(count)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["measure", "show", "page"], default="measure")
    parser.add_argument("--types", nargs="+", metavar="TYPE")
    parser.add_argument("--tasks", nargs="+", choices=["causal", "seq2seq", "speech", "images"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS)
    parser.add_argument("--part", type=part, metavar="N/M", help="a part of the types")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="default: both; with --small bfloat16")
    parser.add_argument("--requests", nargs="+", type=int, default=list(REQUESTS))
    parser.add_argument("--threads", type=int, default=0, help="cores that a process may use; default: all")
    parser.add_argument("--workers", type=int, default=1, help="processes at once; one times, others stand")
    parser.add_argument("--turns", type=int, default=4, help="of each side, at most")
    parser.add_argument("--seconds", type=float, default=8.0, help="of turns, after which no further one begins")
    parser.add_argument("--time-limit", type=float, default=300.0, help="processor seconds of a row")
    parser.add_argument("--memory-limit", type=float, default=8.0, help="GB of its process")
    parser.add_argument("--again", action="store_true", help="measure also what has a row")
    parser.add_argument("--small", action="store_true", help="models of some million weights, eight requests, bfloat16")
    parser.add_argument("--guard", action="store_true", help="--small, compared with the committed ratios")
    parser.add_argument("--show", action="store_const", dest="command", const="show", help="the same as show")
    parser.add_argument("--results", type=Path, help="file of rows; default: in benchmarks/results")
    parser.add_argument("--log", type=Path, help="file for what the processes print")
    options = parser.parse_args()
    options.small |= options.guard
    options.again |= options.guard
    options.sides, options.least_turns = SIDES, 1
    options.lock = Path(tempfile.gettempdir()) / f"types-speed-{os.getpid()}.lock"
    defaults = SMALL if options.small else {"dtype": list(DTYPES), "results": RESULTS}
    for name, value in defaults.items():
        if name not in ("dtype", "results") or getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main() -> None:
    options = parse()

    def end(number: int, frame: Any) -> None:
        end_all()
        os._exit(128 + number)  # the threads of workers have nothing to wait for

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    if options.command == "show":
        show(options)
        return
    if options.command == "page":
        write_pages(options)
        return
    if options.guard:
        sys.exit(guard(options))
    try:
        sweep(options)
    finally:
        options.lock.unlink(missing_ok=True)


def guard(options: argparse.Namespace) -> int:
    """Compares with the committed rows; returns 1 if a type is slower each time that it is measured."""
    known = known_here(options)
    if not known:
        print(f"no rows are kept for the processor {processor()}: nothing is compared; measure with --small")
        return 0
    wrong = rows.slower(sweep(options), known, LEAST)
    for _ in range(MEASURED_AGAIN):
        if not wrong:
            break
        options.types, options.part = [f"{task}:{model_type}" for task, model_type, *_ in wrong], None
        wrong = rows.slower(sweep(options), known, LEAST)
    print("\n".join(wrong.values()) or f"no type is slower than {LEAST:g} of its committed ratio")
    return int(bool(wrong))


if __name__ == "__main__":
    main()
