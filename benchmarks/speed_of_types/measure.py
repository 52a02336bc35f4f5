"""Measures one type: the process of `types_speed.py` that has the model. Prints a row of JSON for each measurement."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from speed_of_types.cases import NEW_TOKENS, PROMPT_LEN, Inputs, TypeCase
from speed_of_types.processes import alone_in_time
from speed_of_types.sides import DROP_IN, EAGER, ENGINE, DropIn, Eager, EngineSide, Side
from torchax_serve.bench.timed_model import JaxMemory, count_programs
from torchax_serve.parity.result import error_line
from torchax_serve.profiling.bandwidth import num_cores

MOST_TRIES = 3
SIDES = {EAGER: Eager, ENGINE: EngineSide, DROP_IN: DropIn}

Times = list[tuple[float, float]]
"""Wall and processor seconds of calls."""


class MeasuredSide:
    """One side of a row, and what its calls have taken."""

    def __init__(self, name: str, model: Any) -> None:
        self.name, self.peak_bytes, self.warm_up_s = name, 0, 0.0
        self.error: str | None = None
        self.side: Side | None = None
        self.first: Times = []
        self.all: Times = []
        self.tokens: list[list[int]] = []
        self._model = model

    def warm_up(self, inputs: Inputs) -> None:
        """Makes the side if there is none, and calls it once; waits for what compiles in the background."""
        self.first, self.all, self.tokens = [], [], []
        if self.error is not None:
            return
        began = time.perf_counter()
        try:
            with JaxMemory().growth() as growth:
                if self.side is None:
                    self.side = SIDES[self.name](self._model)
                for new_tokens in (1, NEW_TOKENS):
                    self.tokens = self.side.run(inputs, new_tokens)
                self.side.wait()
            self.peak_bytes = growth[0]
        except Exception as error:
            self.error = error_line(error)
        self.warm_up_s = time.perf_counter() - began

    def turn(self, inputs: Iterator[Inputs]) -> None:
        """One timed call for a token, and one for all; again if something was compiled meanwhile.

        Each has prompts of its own: of those that it has seen the engine keeps the pages.
        """
        assert self.side is not None
        for _ in range(MOST_TRIES):
            with count_programs() as programs:
                first = timed(self.side, next(inputs), 1)
                last = timed(self.side, next(inputs), NEW_TOKENS)
                self.side.wait()
            if not programs[0]:
                break
        self.first.append(first)
        self.all.append(last)

    def summary(self, num_requests: int) -> dict[str, Any]:
        """Rates and seconds, medians of the turns."""
        if self.error is not None:
            return {"error": self.error}
        differences = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(self.all, self.first, strict=True)]
        prefill, decode, whole = medians(self.first), medians(differences), medians(self.all)
        steps = num_requests * (NEW_TOKENS - 1)
        return {
            "decode_tokens_per_s": rate(steps, decode[0]),
            "prefill_tokens_per_s": rate(num_requests * PROMPT_LEN, prefill[0]),
            "decode_s": round(decode[0], 4),
            "decode_cpu_s": round(decode[1], 4),
            "prefill_s": round(prefill[0], 4),
            "prefill_cpu_s": round(prefill[1], 4),
            "all_s": round(whole[0], 4),
            "all_cpu_s": round(whole[1], 4),
            "peak_bytes": self.peak_bytes,
            "warm_up_s": round(self.warm_up_s, 1),
            "turns": len(self.all),
        }


def timed(side: Side, inputs: Inputs, new_tokens: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    side.run(inputs, new_tokens)
    return time.perf_counter() - wall, time.process_time() - cpu


def medians(times: Times) -> tuple[float, float]:
    return statistics.median(wall for wall, _ in times), statistics.median(cpu for _, cpu in times)


def rate(number: int, seconds: float) -> float | None:
    return float(f"{number / seconds:.4g}") if seconds > 0 else None


def ratios(eager: dict[str, Any], ours: dict[str, Any]) -> dict[str, float | None] | None:
    """How many times as fast ours is: by the wall's time and by processor time."""
    if "error" in eager or "error" in ours:
        return None

    def ratio(name: str) -> float | None:
        return round(eager[name] / ours[name], 3) if eager[name] > 0 and ours[name] > 0 else None

    names = [f"{part}{kind}" for part in ("decode", "prefill", "all") for kind in ("", "_cpu")]
    return {name: ratio(f"{name}_s") for name in names}


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """The part of the tokens before the first that differs, of all requests."""
    same = 0
    for a, b in zip(ours, theirs, strict=True):
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return round(same / max(1, sum(map(len, theirs))), 3)


class OtherCores:
    """Counts how many cores other programs use from now on."""

    def __init__(self) -> None:
        self._since = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        times = psutil.cpu_times()
        return time.monotonic(), times.user + times.system + times.nice - time.process_time()

    def in_use(self) -> float:
        """Cores that others have used, on average."""
        (began, used), (now, later) = self._since, self._now()
        return round(max(0.0, later - used) / max(1e-3, now - began), 2)


def measure(
    case: TypeCase, sides: dict[str, MeasuredSide], num_requests: int, options: Any, model: Any
) -> dict[str, Any]:
    """Takes turns between the sides; returns what a row has of them."""
    used = list(sides.values())
    inputs = {side.name: case.inputs(model, num_requests) for side in used}  # the same for each
    for side in used:
        side.warm_up(next(inputs[side.name]))
    live = [side for side in used if side.error is None]
    with alone_in_time(options.lock):
        others = OtherCores()
        deadline = time.perf_counter() + options.seconds
        for turn in range(options.turns if live else 0):
            first = turn % len(live)
            for side in (*live[first:], *live[:first]):
                side.turn(inputs[side.name])
            if time.perf_counter() > deadline and turn + 1 >= options.least_turns:
                break
    found = {side.name: side.summary(num_requests) for side in used}
    eager = sides[EAGER]
    row: dict[str, Any] = {"sides": found, "ratios": {}, "agreement": {}, "cores_in_use": others.in_use()}
    for side in used[1:]:
        row["ratios"][side.name] = ratios(found[EAGER], found[side.name])
        if side.tokens and eager.tokens:
            row["agreement"][side.name] = agreement(side.tokens, eager.tokens)
    row["status"] = "measured" if len(live) == len(used) else "impossible" if eager.error else "failed"
    row["error"] = "; ".join(f"{side.name}: {side.error}" for side in used if side.error) or None
    return row


def rows_of(case: TypeCase, dtype: str, options: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows of a type in a dtype, one for each number of requests."""
    began, cpu = time.perf_counter(), time.process_time()
    base = {"task": case.task, "type": case.model_type, "dtype": dtype, "kind": case.kind(), "executor": case.executor}
    try:
        model = case.model(dtype, is_small=options.small)
        next(case.inputs(model, 1))
    except Exception as error:
        for number in options.requests:
            impossible = {"status": "impossible", "error": error_line(error), "cores_in_use": 0.0}
            yield {**base, "requests": number, **impossible}
        return
    base["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    sides = {name: MeasuredSide(name, model) for name in options.sides}
    try:
        for number in options.requests:
            row = measure(case, sides, number, options, model)
            engine = sides[ENGINE].side
            if isinstance(engine, EngineSide) and sides[ENGINE].error is None:
                row["executor"] = engine.executor()
            row |= {"seconds": round(time.perf_counter() - began, 1), "cpu_s": round(time.process_time() - cpu, 1)}
            began, cpu = time.perf_counter(), time.process_time()
            yield {**base, "requests": number, **row}
    finally:
        for each in sides.values():
            if each.side is not None:
                each.side.close()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="+", help="TASK:TYPE")
    parser.add_argument("--dtypes", nargs="+", required=True)
    parser.add_argument("--requests", nargs="+", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--least-turns", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--sides", nargs="+", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--lock", type=Path, help="of the one process that may time its sides")
    parser.add_argument("--cores", nargs="+", type=int, required=True)
    options = parser.parse_args(arguments)
    os.sched_setaffinity(0, options.cores)  # before JAX makes its threads
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not a row
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(num_cores())
    for name in options.cases:
        for dtype in options.dtypes:
            for row in rows_of(TypeCase(*name.split(":")), dtype, options):
                print(json.dumps(row), file=output, flush=True)
            gc.collect()


if __name__ == "__main__":
    main(sys.argv[1:])
