"""One run of `serving.py`: the checkpoint, how systems are started at their best, and what has been found."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from generate import TARGET_SHAPE, keep_kernels, write_checkpoint
from serving_peers import measures
from serving_peers.conversion import converted, write_tokenizer
from serving_peers.environments import base_python, record_of
from serving_peers.gguf import GgufModel
from serving_peers.jobs import Job, JobResult
from serving_peers.processes import System, Worker
from serving_peers.roofline import Roofline, kv_token_bytes
from serving_peers.settings import SystemSettings
from serving_peers.targets import TARGETS, Row, judged
from serving_peers.variants import (
    A_FILE,
    EIGHT_BITS,
    FOUR_BITS,
    SYSTEMS,
    UNQUANTIZED,
    Choice,
    Variant,
    choose,
    options_of,
    read_choices,
    similar,
    thread_counts,
    variants_of,
    write_choices,
)
from serving_peers.workloads import SMOKE_KV_CACHE_BYTES, SMOKE_SHAPE, SMOKE_SIZES, Workload

OURS = "ours"
DTYPE = "bfloat16"  # of the checkpoint
TRIAL_PART = 4  # a trial has prompts and answers of this part of the benchmark's lengths
# A trial and a start take what starts soonest: vLLM compiles for a minute, and this project compiles what it needs.
QUICK = {"vllm": {"enforce_eager": True}, OURS: {"warm_up": False}}
Turns = dict[str, list[list[JobResult]]]  # by system: of each timed turn, the results of its jobs


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Bench:
    """Options, the checkpoint in `scratch`, and the rows that have been found."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options, self.scratch = options, scratch
        self.has_targets = options.config.resolve() == TARGET_SHAPE and not options.smoke
        self.rows: list[Row] = []
        self.facts: dict[str, Any] = {}
        self.turns: list[dict[str, Any]] = []
        self.file = None if options.gguf is None else GgufModel.read(options.gguf)
        self._choices_path = scratch / ("choices.json" if self.file is None else f"choices-{self.file.path.stem}.json")
        self.choices = read_choices(self._choices_path)
        self.roofline: Roofline | None = None
        self._deadline_s = time.monotonic() + 60 * options.minutes
        self.checkpoint, shape = self._checkpoint() if self.file is None else (self.file.path, self.file.shape)
        self.kv_cache_bytes = SMOKE_KV_CACHE_BYTES if options.smoke else options.kv_cache_gib * 2**30
        self.token_bytes = kv_token_bytes(shape)
        asked = {name: getattr(options, name) for name in ("prompt_len", "new_tokens")}
        sizes = SMOKE_SIZES if options.smoke else {}
        sizes = sizes | {name: value for name, value in asked.items() if value is not None}
        self.workload = Workload(shape["vocab_size"], options.seed, **sizes)
        self._shape = shape

    def _checkpoint(self) -> tuple[Path, dict[str, Any]]:
        """The folder of random weights, written when it is not there, and its configuration."""
        shape = json.loads(self.options.config.read_text()) | (SMOKE_SHAPE if self.options.smoke else {})
        folder = self.scratch / "model"
        if not (folder / "tokenizer.json").exists():
            (self.scratch / "shape.json").write_text(json.dumps(shape))
            write_checkpoint(self.scratch / "shape.json", DTYPE, folder)
            write_tokenizer(folder, shape["vocab_size"])
        return folder, shape

    def bits_of(self, kind: str) -> float:
        """Bits of a weight."""
        return self.file.bits if self.file is not None else {EIGHT_BITS: 8, FOUR_BITS: 4}.get(kind, 16)

    def variants(self, name: str, kind: str) -> list[Variant]:
        """The ways to run a system with weights of a kind."""
        if kind == A_FILE and self.file is not None:
            return [Variant(name, self.file.dtype, A_FILE)]
        return variants_of(name, kind)

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self._deadline_s

    def measure_roofline(self) -> Roofline | None:
        """The rates of the machine, measured once more; no system may be computing. None but for dense decoders."""
        now = Roofline.measured(self._shape, self.token_bytes)
        self.roofline = now.better(self.roofline) if now is not None and self.roofline is not None else now
        return self.roofline

    def system(self, variant: Variant, **chosen: object) -> System:
        """How to start `variant`; `chosen` are options of that system.

        Raises:
            RuntimeError: its environment is not there, or the checkpoint could not be converted for it.
        """
        kind, environments = SYSTEMS[variant.system], self.options.environments
        if kind.environment is not None and (error := record_of(kind.environment, environments)["error"]):
            raise RuntimeError(error)
        folder = self.checkpoint
        if variant.form:
            folder = converted(folder, variant.form, environments, self.scratch)
        settings = SystemSettings(
            folder=str(folder),
            kv_cache_bytes=self.kv_cache_bytes,
            kv_token_bytes=self.token_bytes,
            max_len=self.workload.max_len,
            options=options_of(variant, environments) | chosen | self.options.system_options.get(variant.system, {}),
        )
        if kind.environment is None:
            return System(variant.system, kind.module, sys.executable, settings)
        packages = environments / kind.environment
        return System(variant.system, kind.module, base_python(), settings, self._variables(variant), packages)

    def start_system(self, variant: Variant) -> System:
        """How to start `variant` for one request, with empty folders for what it stores on disk."""
        chosen = {} if variant.system == OURS else QUICK.get(variant.system, {})
        system = self.system(variant, **chosen).with_environment(self.fresh_caches(variant.system))
        return dataclasses.replace(system, module="ours_start") if variant.system == OURS else system

    def _variables(self, variant: Variant) -> dict[str, str]:
        if variant.system != "vllm":
            return {}
        cores = sorted(os.sched_getaffinity(0))[: variant.num_threads]
        return {
            "VLLM_CPU_KVCACHE_SPACE": str(self.options.kv_cache_gib),  # it takes whole GiB
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # its own choice leaves a core aside
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(self.scratch / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.scratch / "inductor"),
        }

    def start(self, system: System) -> Worker:
        note(f"{system.name}: starting")
        return Worker(system, self.scratch / f"{system.name}.log", self.options.timeout_s)

    def choice(self, name: str, kind: str) -> Choice:
        """The best variant of a system with weights of a kind, by measurement, once for a folder of work."""
        found = self.choices.setdefault(kind, {})
        if name not in found:
            candidates = self.variants(name, kind)
            counts = thread_counts(1 if self.options.smoke else len(os.sched_getaffinity(0)))
            if kind in (EIGHT_BITS, FOUR_BITS) and (like := self.choice(name, UNQUANTIZED).best):
                candidates, counts = similar(candidates, like), [like.num_threads or counts[0]]
            found[name] = choose(candidates, counts, self._trial)
            best = found[name].best
            note(f"{name}, {kind}: {best.name if best else 'nothing runs'}")
            write_choices(self._choices_path, self.choices)
        return found[name]

    def _trial(self, variant: Variant) -> list[float]:
        """Tokens/s of a small job for each batch size, after one that is not counted."""
        if not self.has_time:
            raise RuntimeError("not tried: the time of the run was over (--minutes)")
        whole, batches = self.workload, self.options.batch
        sizes = {name: max(2, getattr(whole, name) // TRIAL_PART) for name in ("prompt_len", "new_tokens")}
        small = dataclasses.replace(whole, **sizes)
        with self.start(self.system(variant, **QUICK.get(variant.system, {}))) as worker:
            compiles_by_shape = variant.system == OURS
            for num_requests in batches if compiles_by_shape else batches[:1]:
                worker.run(small.batch(num_requests, 0)[1])
            results = [worker.run(small.batch(num_requests, 1)[1]) for num_requests in batches]
        rates = [len(each.traces) * small.new_tokens / each.total_s for each in results]
        note(f"  {variant.name}: {', '.join(f'{rate:.0f}' for rate in rates)} tokens/s")
        return rates

    def best(self, names: Sequence[str], kind: str) -> dict[str, Variant]:
        """Of each system that runs; the result file says of the others why they do not."""
        chosen = {name: self.choice(name, kind).best for name in names if self.variants(name, kind)}
        return {name: variant for name, variant in chosen.items() if variant is not None}

    @contextlib.contextmanager
    def started(self, command: str, names: Sequence[str], kind: str, front: str) -> Iterator[dict[str, Worker]]:
        """Workers of the best variants; they are asked for their facts at the end."""
        variants = self.best(names, kind)
        with contextlib.ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for name, variant in variants.items():
                chosen = self.options.quick.get(name, {}) | ({"front": front} if name == "vllm" else {})
                workers[name] = stack.enter_context(self.start(self.system(variant, **chosen)))
            yield workers
            for name, worker in workers.items():
                more = {"ready_s": worker.ready_s, "dtype": variants[name].dtype, "peak_bytes": worker.peak_bytes()}
                more["num_threads"] = variants[name].num_threads
                self.facts.setdefault(command, {})[f"{name}, {kind}"] = worker.facts() | more

    def take_turns(
        self, workers: Mapping[str, Worker], cases: Mapping[str, Callable[[int], Sequence[Job]]], warm_up: int
    ) -> dict[str, Turns]:
        """Asks the systems for the jobs of each turn, one system after the other; the first turns are not counted.

        Turns end early where the time of the run is over, but not before one has been counted.
        """
        found: dict[str, Turns] = {case: {name: [] for name in workers} for case in cases}
        for turn in range(warm_up + self.options.repeats):
            if turn > warm_up and not self.has_time:
                note(f"the time is over after {turn - warm_up} of {self.options.repeats} turns")
                break
            for case, jobs in cases.items():
                for name, worker in workers.items():
                    cores = psutil.cpu_percent(interval=0.3) / 100 * (psutil.cpu_count() or 1)
                    results = [worker.run(job) for job in jobs(turn)]
                    note(f"{case}, turn {turn + 1 - warm_up}: {name} {sum(each.total_s for each in results):.2f} s")
                    is_timed = turn >= warm_up
                    self.turns.append({"case": case, "system": name, "timed": is_timed, "cores_in_use": cores})
                    self.turns[-1]["jobs"] = [summary(each) for each in results]
                    if is_timed:
                        found[case][name].append(results)
        return found

    def add(self, case: str, number: str, ours: float | None, beside: str, value: float | None, **more: str) -> None:
        """A row: ours, what stands next to it, and the one over the other, judged if there is a target for that."""
        ratio = ours / value if ours is not None and value else None
        row = {"case": case, "number": number, "ours": ours, "beside": beside, "other": value, "value": ratio}
        self.rows.append(judged(row | more, TARGETS if self.has_targets else ()))

    def add_numbers(
        self, case: str, numbers: Mapping[str, Mapping[str, float | None]], turns: Turns, kind: str
    ) -> None:
        """Rows of ours and each peer with both dtypes, and how far their first tokens agree; ours alone if none."""
        dtypes = {name: variant.dtype for name, variant in self.best(list(numbers), kind).items()}
        if set(numbers) == {OURS}:
            for number, value in numbers[OURS].items():
                self.add(case, number, value, "", None, dtype=dtypes[OURS])
        for peer in [name for name in numbers if name != OURS]:
            both = {"dtype": dtypes[OURS], "other_dtype": dtypes[peer]}
            for number, value in numbers[OURS].items():
                self.add(case, number, value, peer, numbers[peer][number], **both)
            equal = measures.part_of_first_tokens(turns[OURS], turns[peer])
            self.add(case, "first tokens equal", equal, peer, 1.0, **both)

    def unavailable(self) -> dict[str, str]:
        """Why variants did not run, by name."""
        return {
            name: why for found in self.choices.values() for each in found.values() for name, why in each.failed.items()
        }

    def fresh_caches(self, name: str) -> dict[str, str]:
        """Variables that give a system an empty folder for what it stores on disk; C++ kernels are in it."""
        folder = self.scratch / f"stored-{name}-{time.monotonic_ns()}"
        keep_kernels(folder)
        names = {"XDG_CACHE_HOME": folder, "VLLM_CACHE_ROOT": folder / "vllm", "TORCHINDUCTOR_CACHE_DIR": folder / "t"}
        return {variable: str(path) for variable, path in names.items()}


def summary(result: JobResult) -> dict[str, Any]:
    """As the result file has it: of each request its arrival, TTFT, end and number of tokens."""
    requests = [
        [round(trace.arrived_s, 4), round(trace.ttft_s, 4), round(trace.token_times_s[-1], 4), len(trace.token_ids)]
        for trace in result.traces
    ]
    kept: dict[str, float | None] = {"num_cached_tokens": result.num_cached_tokens, "num_compiled": result.num_compiled}
    kept["cpu_s"] = None if result.cpu_s is None else round(result.cpu_s, 2)
    return {"total_s": result.total_s, "requests": requests} | kept


def median_cached(turns: Sequence[Sequence[JobResult]]) -> float:
    return statistics.median(turn[1].num_cached_tokens or 0 for turn in turns)


__all__ = ["OURS", "UNQUANTIZED", "Bench", "Turns", "median_cached", "note"]
