"""How cost grows: this project and the best peers over requests, context, layers and gigabytes, as pictures.

    python benchmarks/curves.py --environments environments              # measures what is missing, and draws all
    python benchmarks/curves.py --only requests context --environments environments
    python benchmarks/curves.py --again --environments environments      # measures all anew
    python benchmarks/curves.py --draw                                   # draws what has been measured

requests  tokens/s of 1 to 256 requests that decode together, and what the host needs for a step of ours
context   time per token of one request behind 128 to 8,192 tokens
layers    from the start of a process to its first token, over the number of layers of a small width
load      the same over the size of the checkpoint, for a second start

Points are measured in turns, A B A B, and stored after each value in ``results/curves-PART.json``; a run that is cut
off goes on where it stopped, with ``--work FOLDER`` without converting and choosing again. All parts together take
about ``--minutes``, which they share evenly; each measures one value at least. Pictures are written to docs/pictures
and need matplotlib; docs/performance.md shows them, and the tables of `serving.py decode start`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import serving
from generate import FOLDER, REPOSITORY, TARGET_SHAPE
from serving_peers.bench import OURS, QUICK, UNQUANTIZED, Bench, note
from serving_peers.curve_pictures import draw
from serving_peers.environments import record_of
from serving_peers.jobs import Arrival, Job, JobResult
from serving_peers.performance_page import page
from serving_peers.processes import Worker
from serving_peers.starts import StartTimes, measure_start, median_start
from serving_peers.variants import SYSTEMS, Variant, read_choices, variants_of, write_choices

NUM_REQUESTS = (1, 4, 16, 64, 256)
CONTEXTS = (128, 512, 2048, 8192)
NUM_LAYERS = (4, 12, 24, 48)
GIGABYTES = (0.25, 0.5, 1.0, 2.0)
NARROW = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPT_LEN, NEW_TOKENS = 8, 33  # of requests that come together
CONTEXT_NEW_TOKENS = 17
POSITIONS = 16384  # more than the longest context
Point = dict[str, float]


@dataclasses.dataclass
class Part:
    """What has been measured of one curve.

    Attributes:
        points: by value on the x axis, then by system; medians.
    """

    path: Path
    points: dict[str, dict[str, Point]] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Part:
        if not path.exists():
            return cls(path)
        found = json.loads(path.read_text())
        return cls(path, found["points"], {name: found[name] for name in found if name != "points"})

    def add(self, x: float, found: Mapping[str, Point]) -> None:
        self.points[f"{x:g}"] = dict(found)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.facts | {"points": self.points}, indent=1) + "\n")

    def fail(self, name: str, error: Exception) -> None:
        """Notes that a system has no further points."""
        note(f"  {name}: {error}")
        self.facts.setdefault("failed", {})[name] = str(error)

    def is_of(self, facts: Mapping[str, Any]) -> bool:
        """Whether its points were measured on such a processor with such versions."""
        old, new = (found.get("machine", {}) for found in (self.facts, facts))
        return all(old.get(name) == new.get(name) for name in ("cpu", "num_cores", "versions"))


def missing(part: Part, values: Sequence[float], deadline_s: float) -> Iterator[float]:
    """The values without a point: one at least, and more as long as there is time."""
    for number, x in enumerate(x for x in values if f"{x:g}" not in part.points):
        if number and time.monotonic() >= deadline_s:
            note(f"{part.path.stem}: the time is over before {x:g}; run the command again to go on")
            return
        yield x


def medians(found: Sequence[Point]) -> Point:
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def make_bench(options: argparse.Namespace, scratch: Path, name: str, **shape: object) -> Bench:
    """Over a checkpoint of the target's shape with some sizes changed."""
    folder = scratch / name
    folder.mkdir(exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(TARGET_SHAPE.read_text()) | shape))
    arguments = [
        "decode",
        "--config",
        str(config),
        "--batch",
        "1",
        "8",
        "--timeout-s",
        "240",
        "--peers",
        *options.peers,
    ]
    if options.environments is not None:
        arguments += ["--environments", str(options.environments)]
    bench = Bench(serving.parse(arguments), folder)
    bench.choices = options.choices  # what is best is found once for all parts
    return bench


@contextlib.contextmanager
def started(
    bench: Bench, variants: Mapping[str, Variant], max_len: int, max_num_seqs: int
) -> Iterator[dict[str, Worker]]:
    """Workers for requests of so many tokens and of so many at once."""
    with contextlib.ExitStack() as stack:
        workers = {}
        for name, variant in variants.items():
            seqs = {"max_num_seqs": max_num_seqs} if name != "hf" else {}
            quick = {} if name == OURS else QUICK.get(name, {})  # ours compiles in seconds, before it is timed
            system = bench.system(variant, **quick, **seqs)
            settings = dataclasses.replace(system.settings, max_len=max_len)
            workers[variant.name] = stack.enter_context(bench.start(dataclasses.replace(system, settings=settings)))
        yield workers


def in_turns(
    workers: Mapping[str, Worker], ask: Callable[[Worker, int], Point], repeats: int, part: Part
) -> dict[str, Point]:
    """The medians of each worker's points, after one that is not counted; without those that fail."""
    found: dict[str, list[Point]] = {name: [] for name in workers}
    for turn in range(1 + repeats):
        for name in list(found):
            try:
                point = ask(workers[name], turn)
            except RuntimeError as error:
                part.fail(name, error)
                del found[name]
                continue
            note(f"  {name}: " + ", ".join(f"{label} {value:.4g}" for label, value in point.items()))
            if turn:
                found[name].append(point)
    return {name: medians(each) for name, each in found.items()}


def ids_of(bench: Bench, length: int, *named: object) -> list[int]:
    return dataclasses.replace(bench.workload, prompt_len=length)._ids(length, *named)


def decode_rate(first: JobResult, whole: JobResult) -> float:
    """Tokens/s behind the first ones: what they add to the time of the same requests with one token each."""
    added_s, num_first = whole.total_s - first.total_s, len(whole.traces)
    num_new = sum(len(trace.token_ids) for trace in whole.traces)
    return (num_new - num_first) / added_s if added_s > 0 else num_new / whole.total_s


def measure_requests(options: argparse.Namespace, part: Part, scratch: Path, deadline_s: float) -> None:
    bench = make_bench(options, scratch, "requests")
    variants = bench.best([OURS, *options.peers], UNQUANTIZED)
    with started(bench, variants, PROMPT_LEN + NEW_TOKENS, max(options.num_requests)) as workers:
        for number in missing(part, options.num_requests, deadline_s):
            note(f"{number:g} requests")

            def ask(worker: Worker, turn: int, number: int = int(number)) -> Point:
                def job(num_tokens: int) -> Job:
                    ids = [ids_of(bench, PROMPT_LEN, number, turn, num_tokens, each) for each in range(number)]
                    return Job([Arrival(each, num_tokens) for each in ids])

                first = worker.run(job(1))
                before = worker.facts() if worker.name == OURS else {}
                point = {"tokens_per_s": decode_rate(first, worker.run(job(NEW_TOKENS)))}
                if before:
                    after = worker.facts()
                    steps = after["num_steps"] - before["num_steps"]
                    point["host_ms"] = 1000 * (after["host_s"] - before["host_s"]) / max(1, steps)
                return point

            part.add(number, in_turns(workers, ask, options.repeats, part))


def measure_context(options: argparse.Namespace, part: Part, scratch: Path, deadline_s: float) -> None:
    bench = make_bench(options, scratch, "context", max_position_embeddings=POSITIONS)
    variants = bench.best([OURS, *options.peers], UNQUANTIZED)
    with started(bench, variants, max(options.contexts) + CONTEXT_NEW_TOKENS, 1) as workers:
        for length in missing(part, options.contexts, deadline_s):
            note(f"context of {length:g} tokens")

            def ask(worker: Worker, turn: int, length: int = int(length)) -> Point:
                job = Job([Arrival(ids_of(bench, length, length, turn), CONTEXT_NEW_TOKENS)])
                trace = worker.run(job).traces[0]
                return {"ms_per_token": 1000 * (trace.tpot_s or 0.0), "ttft_s": trace.ttft_s}

            part.add(length, in_turns(workers, ask, options.repeats, part))


def measure_starts(bench: Bench, peers: Sequence[str], repeats: int, part: Part) -> dict[str, Point]:
    """A first and a second start of ours, and of each peer a second one: they store nothing."""
    found: dict[str, list[StartTimes]] = {}
    for _ in range(repeats):
        for name in (OURS, *peers):
            try:
                for label, start in starts_of(bench, name).items():
                    found.setdefault(label, []).append(start)
            except RuntimeError as error:
                part.fail(name, error)
    medians_of = {name: median_start(each) for name, each in found.items()}
    return {
        name: {"first_token_s": each.first_token_s, "peak_gb": each.peak_bytes / 1e9}
        for name, each in medians_of.items()
    }


def starts_of(bench: Bench, name: str) -> dict[str, StartTimes]:
    """By the name of a curve, one start; of ours two."""
    variant = variants_of(name, UNQUANTIZED)[0]
    system = bench.start_system(variant)
    prompt_ids, found = ids_of(bench, PROMPT_LEN, "start"), {}
    for which in ("first start", "second start"):
        start = measure_start(system, prompt_ids, bench.scratch / "start.log", bench.options.timeout_s)
        note(f"  {variant.name}, {which}: {start.first_token_s:.2f} s")
        found[f"{variant.name}, {which}" if name == OURS else variant.name] = start
    return found


def start_peers(options: argparse.Namespace) -> list[str]:
    """Those whose conversion takes seconds: of several checkpoints, some of gigabytes."""
    return [name for name in options.peers if name in ("llama.cpp", "hf")]


def measure_layers(options: argparse.Namespace, part: Part, scratch: Path, deadline_s: float) -> None:
    for number in missing(part, options.num_layers, deadline_s):
        note(f"{number:g} layers")
        bench = make_bench(options, scratch, f"layers-{number:g}", num_hidden_layers=int(number), **NARROW)
        part.add(number, measure_starts(bench, start_peers(options), options.repeats, part))


def measure_load(options: argparse.Namespace, part: Part, scratch: Path, deadline_s: float) -> None:
    shape = json.loads(TARGET_SHAPE.read_text())
    from serving_peers.roofline import num_weights

    of_layer = num_weights(shape | {"num_hidden_layers": 1})[0]
    of_head = num_weights(shape)[1]
    for gigabytes in missing(part, options.gigabytes, deadline_s):
        number = max(1, round((gigabytes * 1e9 / 2 - of_head) / of_layer))
        note(f"{gigabytes:g} GB: {number} layers")
        with tempfile.TemporaryDirectory(prefix="load", dir=scratch) as folder:  # some are large
            bench = make_bench(options, Path(folder), "load", num_hidden_layers=number)
            found = measure_starts(bench, start_peers(options), options.repeats, part)
            part.add(gigabytes, {name: point for name, point in found.items() if not name.endswith("first start")})


MEASURE = {
    "requests": measure_requests,
    "context": measure_context,
    "layers": measure_layers,
    "load": measure_load,
}


def facts_of(options: argparse.Namespace) -> dict[str, Any]:
    """The command, the machine, and the versions of the peers."""
    from torchax_serve.bench.machine import Machine

    names = {each: SYSTEMS[each].environment for each in options.peers}
    versions = {
        each: record_of(name, options.environments).get("versions") for each, name in names.items() if name is not None
    }
    command = shlex.join(["python", *sys.argv])
    machine = Machine.here()
    described = dataclasses.asdict(machine) | {"is_busy": machine.is_busy}
    return {"command": command, "machine": described, "peers": versions}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MEASURE), default=list(MEASURE), help="parts; default: all")
    parser.add_argument("--environments", type=Path, help="folder that peers.py installed the peers in")
    known = ["llama.cpp", "openvino", "onnxruntime", "vllm", "hf"]
    parser.add_argument("--peers", nargs="*", choices=known, default=["llama.cpp", "openvino"])
    parser.add_argument("--minutes", type=float, default=15.0, help="for all parts")
    parser.add_argument("--repeats", type=int, default=2, help="of every point; medians are drawn")
    parser.add_argument("--num-requests", type=int, nargs="+", default=list(NUM_REQUESTS))
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--num-layers", type=int, nargs="+", default=list(NUM_LAYERS))
    parser.add_argument("--gigabytes", type=float, nargs="+", default=list(GIGABYTES))
    parser.add_argument("--again", action="store_true", help="measure also what has been measured")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument(
        "--work", type=Path, help="folder for checkpoints and what was found best; default: one for now"
    )
    parser.add_argument("--results", type=Path, default=FOLDER / "results")
    parser.add_argument("--pictures", type=Path, default=REPOSITORY / "docs" / "pictures")
    parser.add_argument("--page", type=Path, default=REPOSITORY / "docs" / "performance.md")
    options = parser.parse_args()
    options.environments = None if options.environments is None else options.environments.resolve()
    if options.repeats < 1 or options.minutes <= 0:
        parser.error("expected positive numbers: --repeats, --minutes")
    for name in options.peers if not options.draw else []:
        environment = SYSTEMS[name].environment
        if environment and (error := record_of(environment, options.environments)["error"]):
            parser.error(f"--peers: {name}: {error}; or name other --peers")
    return options


def main() -> None:
    options = parse()
    sys.path.insert(0, str(REPOSITORY))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that systems are ended, too
    ends_s = time.monotonic() + 60 * options.minutes
    with contextlib.ExitStack() as stack:
        work = (options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="curves")))).resolve()
        work.mkdir(parents=True, exist_ok=True)
        options.choices = read_choices(work / "choices.json")
        for index, name in enumerate(options.only if not options.draw else []):
            part = Part.read(options.results / f"curves-{name}.json")
            facts = facts_of(options)
            if options.again or not part.is_of(facts):
                part = Part(part.path)
            part.facts = facts
            share_s = (ends_s - time.monotonic()) / (len(options.only) - index)
            options.trial_minutes = share_s / 60 / 2  # the rest is for what is measured
            MEASURE[name](options, part, work, time.monotonic() + share_s)
            write_choices(work / "choices.json", options.choices)
    for path in draw(options.results, options.pictures):
        print(f"drawn: {path}")
    options.page.write_text(page(options.results))
    print(f"written: {options.page}")


if __name__ == "__main__":
    main()
