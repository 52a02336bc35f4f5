"""Many requests at once: this project and its peers at their best, in one run, and the targets it aims at.

    python benchmarks/peers.py install environments                     # once: each peer in an environment of its own
    python benchmarks/serving.py decode start --environments environments
    python benchmarks/serving.py mix prefix fairness --environments environments --peers vllm hf-continuous
    python benchmarks/serving.py decode mix --peers hf hf-continuous    # needs no environments
    python benchmarks/serving.py decode start mix prefix fairness --peers hf hf-continuous --smoke
    python benchmarks/serving.py decode --gguf SmolLM2-135M-Instruct.Q4_1.gguf --environments environments
    python benchmarks/serving.py decode --config benchmarks/shapes/llama-8b.json --peers hf \\
        --batch 1 8 64 256 --prompt-len 1024 --kv-cache-gib 45 --warm-up 1 --repeats 3 \\
        --options 'ours:{"max_num_seqs": 256}' 'hf:{"cache_implementation": "static"}'    # on a GPU

decode    requests of one length that come together: rates of decoding and of prefill, time to first token
start     from the start of a process to its first token, the 16 tokens behind it, and peak memory; with and without
          what an earlier start has left on disk
mix       requests of many lengths that arrive at random: time for all, percentiles of TTFT and TPOT
prefix    time to first token of a request whose beginning is in the cache, over that of one where it is not
fairness  time per token of running requests when a flood of long prompts arrives, over that when none does

Each system is a process of its own over one checkpoint of random weights that this script writes, converted by the
peer's own tool; they are asked in turns (A B C A B C), while the others are stopped by a signal. Before, each system
is run with each dtype and number of threads that it has (`serving_peers/variants.py`), and the best takes part. Systems
with weights of 16 or 32 bits are compared with each other, those of 8 and of 4 bits likewise. What cannot be
installed or does not run is in the result with the reason. Next to decoding and the mix stands the least time
that the machine needs, by its measured rates of memory and of products (`serving_peers/roofline.py`), for
dense decoders.

With ``--work FOLDER`` the checkpoint, its conversions and what was found best stay there for the next run, so that one
which was cut off goes on. ``--minutes`` bounds a command: what was not reached is in the result as such.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from generate import FOLDER, REPOSITORY, TARGET_SHAPE
from serving_peers import measures
from serving_peers.bench import OURS, QUICK, UNQUANTIZED, Bench, median_cached, note
from serving_peers.environments import RECIPES, record_of
from serving_peers.starts import StartTimes, measure_start, median_start
from serving_peers.targets import print_rows
from serving_peers.variants import A_FILE, KINDS, SYSTEMS, Variant

PEERS = {
    "decode": ("vllm", "hf", "llama.cpp", "openvino", "onnxruntime"),
    "start": ("vllm", "hf", "llama.cpp", "openvino", "onnxruntime"),
    "mix": ("vllm", "hf-continuous"),
    "prefix": ("vllm",),
    "fairness": ("vllm",),
}
BUSY_CORES = 0.25
START_NUMBERS = (  # as rows call them, as `StartTimes` does, and the unit
    ("ready s", "ready_s", 1),
    ("first token s", "first_token_s", 1),
    ("next tokens s", "next_tokens_s", 1),
    ("peak GB", "peak_bytes", 1e9),
)
START_PROMPT_LEN = 16  # tokens: a start is about what comes before


def names_of(bench: Bench, command: str) -> list[str]:
    return [OURS, *(peer for peer in PEERS[command] if peer in bench.options.peers)]


def case_of(num_requests: int, kind: str) -> str:
    return f"{num_requests} requests" + ("" if kind == UNQUANTIZED else f", {kind}")


def run_decode(bench: Bench) -> None:
    """Of each kind of weights: the systems in turns at every batch size."""
    bench.measure_roofline()
    found: dict[tuple[int, str], dict[str, dict[str, float | None]]] = {}
    for kind in bench.options.kinds:
        cases = {case_of(number, kind): partial(bench.workload.batch, number) for number in bench.options.batch}
        with bench.started("decode", names_of(bench, "decode"), kind, "offline") as workers:
            turns = bench.take_turns(workers, cases, bench.options.warm_up)
        for number in bench.options.batch:
            case = case_of(number, kind)
            rates = {
                name: measures.rates_of_batches(each, bench.workload.prompt_len) for name, each in turns[case].items()
            }
            found[number, kind] = rates
            bench.add_numbers(case, rates, turns[case], kind)
    if (roofline := bench.measure_roofline()) is None:
        return
    for (number, kind), rates in found.items():
        most = roofline.decode_rate(number, bench.workload.prompt_len, bench.workload.new_tokens, bench.bits_of(kind))
        for name, variant in bench.best(list(rates), kind).items():
            label = "decode tokens/s" if name == OURS else f"decode tokens/s, {name}"
            rate = rates[name]["decode tokens/s"]
            bench.add(case_of(number, kind), label, rate, "roofline", most, dtype=variant.dtype)


def run_start(bench: Bench) -> None:
    """Pairs of starts, each pair with folders of its own for what is stored on disk; C++ kernels are built before."""
    times: dict[tuple[str, str], list[StartTimes]] = {}  # by the name of a variant and which start
    variants = [each for kind in bench.options.kinds for each in bench.best(names_of(bench, "start"), kind).values()]
    prompt_ids = bench.workload.batch(1, 0)[0].arrivals[0].prompt_ids[:START_PROMPT_LEN]
    for turn in range(bench.options.repeats):
        if turn and not bench.has_time:
            break
        for variant in variants:
            system = bench.start_system(variant)
            for which in ("first start", "second start"):
                start = measure_start(system, prompt_ids, bench.scratch / "start.log", bench.options.timeout_s)
                note(f"{which}, {variant.name}: {start.first_token_s:.2f} s, {start.peak_bytes / 1e9:.2f} GB")
                times.setdefault((variant.name, which), []).append(start)
    medians = {key: median_start(each) for key, each in times.items()}
    for ours in [each for each in variants if each.system == OURS]:
        for which in ("first start", "second start"):
            peers = [each for each in variants if each.system != OURS and each.kind == ours.kind]
            add_start(bench, ours, peers, which, medians)
    found = [[name, which, [dataclasses.asdict(each) for each in starts]] for (name, which), starts in times.items()]
    bench.facts["start"] = {"times": found}


def add_start(
    bench: Bench, ours: Variant, peers: list[Variant], which: str, medians: Mapping[tuple[str, str], StartTimes]
) -> None:
    """Rows of one start of ours and of its peers."""
    case = f"{which}, {ours.kind}"
    for label, name, unit in START_NUMBERS:
        value = getattr(medians[ours.name, which], name) / unit
        if not peers:
            bench.add(case, label, value, "", None, dtype=ours.dtype)
        for peer in peers:
            both = {"dtype": ours.dtype, "other_dtype": peer.dtype}
            bench.add(case, label, value, peer.system, getattr(medians[peer.name, which], name) / unit, **both)


def run_mix(bench: Bench) -> None:
    # Requests may come while a step runs: vLLM's offline loop would let them wait for its end.
    bench.measure_roofline()
    cases = {
        "all at once" if math.isinf(rate) else f"{rate:g} requests/s": partial(bench.workload.mix, rate)
        for rate in bench.options.rate
    }
    with bench.started("mix", names_of(bench, "mix"), UNQUANTIZED, "async") as workers:
        turns = bench.take_turns(workers, cases, bench.options.warm_up)
    found = {case: {name: measures.numbers_of_mix(each) for name, each in turns[case].items()} for case in cases}
    for case in cases:
        bench.add_numbers(case, found[case], turns[case], UNQUANTIZED)
    if (roofline := bench.measure_roofline()) is None:
        return
    least_s = roofline.total_s(bench.workload.mix(math.inf, 0)[0].arrivals)
    for name, numbers in found.get("all at once", {}).items():
        number = "total s" if name == OURS else f"total s, {name}"
        bench.add("all at once", number, numbers["total s"], "roofline", least_s)


def run_prefix(bench: Bench) -> None:
    case = f"prefix of {bench.workload.prefix_len}"
    with bench.started("prefix", names_of(bench, "prefix"), UNQUANTIZED, "offline") as workers:
        turns = bench.take_turns(workers, {case: bench.workload.prefix}, bench.options.warm_up)[case]
    for name, found in turns.items():
        hit_s, miss_s = measures.hit_and_miss(found)
        whose = "TTFT s of a hit" if name == OURS else f"TTFT s of a hit, {name}"
        bench.add(case, whose, hit_s, "its miss", miss_s)
        bench.add(case, f"cached tokens, {name}", median_cached(found), "its prefix", bench.workload.prefix_len)


def run_fairness(bench: Bench) -> None:
    workload = bench.workload
    case = f"{workload.num_running} running, flood of {workload.num_flood}"
    with bench.started("fairness", names_of(bench, "fairness"), UNQUANTIZED, "async") as workers:
        turns = bench.take_turns(workers, {case: workload.flood}, bench.options.warm_up)[case]
    for name, found in turns.items():
        flood_s, calm_s = measures.tpot_of_flood(found, workload.flood_after)
        whose = "TPOT s in a flood" if name == OURS else f"TPOT s in a flood, {name}"
        bench.add(case, whose, flood_s, "no flood", calm_s)


RUN = {"decode": run_decode, "start": run_start, "mix": run_mix, "prefix": run_prefix, "fairness": run_fairness}


def add_cache_size(bench: Bench, command: str) -> None:
    """How much of the cache that was asked for ours has."""
    facts: Mapping[str, Any] = bench.facts.get(command, {}).get(f"{OURS}, {UNQUANTIZED}", {})
    if "kv_cache_bytes" in facts:
        for beside in ("asked for", "at least"):
            bench.add(command, "KV cache GB", facts["kv_cache_bytes"] / 1e9, beside, bench.kv_cache_bytes / 1e9)


def print_warnings(bench: Bench) -> None:
    """What makes the numbers doubtful, and who is missing."""
    for name, why in bench.unavailable().items():
        print(f"{name} did not run: {why.strip().splitlines()[-1]}")
    timed = [turn for turn in bench.turns if turn["timed"]]
    if busy := sum(turn["cores_in_use"] > BUSY_CORES for turn in timed):
        print(f"other programs used the machine before {busy} of {len(timed)} turns: measure again on a quiet one")
    if compiled := sum(job["num_compiled"] or 0 for turn in timed for job in turn["jobs"]):
        print(f"ours compiled or loaded {compiled} programs in timed turns: raise --warm-up")
    expected = {f"prefix of {bench.workload.prefix_len}"}
    if cached := sum(
        job["num_cached_tokens"] or 0 for turn in timed if turn["case"] not in expected for job in turn["jobs"]
    ):
        print(f"{cached} prompt tokens were found in a prefix cache where none was to be expected")


def system_options(text: str) -> tuple[str, dict[str, Any]]:
    name, _, found = text.partition(":")
    if name not in SYSTEMS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(SYSTEMS)} before the colon, got {name!r}")
    try:
        chosen = json.loads(found)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected JSON behind the colon, got {found!r} ({error})") from None
    return name, chosen


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+", choices=list(RUN), metavar="COMMAND", help=", ".join(RUN))
    parser.add_argument("--config", type=Path, default=TARGET_SHAPE)
    parser.add_argument("--gguf", type=Path, help="file that ours and llama.cpp read as it is, in decode and start")
    parser.add_argument("--peers", nargs="*", choices=list(SYSTEMS)[1:], help="default: all that there are")
    parser.add_argument("--environments", type=Path, help="folder that peers.py installed the peers in")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of weights, in decode and start"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="of decode")
    parser.add_argument("--prompt-len", type=int, help="of decode; default: 128")
    parser.add_argument("--new-tokens", type=int, help="of decode; default: 64")
    parser.add_argument("--rate", type=float, nargs="+", default=[8.0, math.inf], help="of mix, requests/s; inf")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns at most; medians are shown")
    parser.add_argument("--minutes", type=float, default=60.0, help="of each command; only a first turn begins later")
    parser.add_argument("--warm-up", type=int, default=1, help="turns before them")
    parser.add_argument("--kv-cache-gib", type=int, default=1, help="of every system")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for one answer of a system")
    parser.add_argument(
        "--options", type=system_options, nargs="+", default=[], help="of systems, as 'ours:{\"max_num_seqs\": 64}'"
    )
    parser.add_argument("--output", type=Path, default=FOLDER / "results", help="folder")
    parser.add_argument("--work", type=Path, help="folder for the checkpoint and its conversions; default: one for now")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny: shows that everything runs, no more; writes nothing"
    )
    options = parser.parse_args(arguments)
    possible = {peer for command in options.commands for peer in PEERS[command]}
    options.peers = possible if options.peers is None else set(options.peers)
    if idle := options.peers - possible:
        parser.error(f"{', '.join(sorted(idle))}: expected peers of {', '.join(options.commands)}, leave them out")
    if options.gguf is not None:
        if not options.gguf.is_file() or set(options.commands) - {"decode", "start"}:
            parser.error(f"--gguf: expected a file, with decode or start alone, got {options.gguf}")
        options.gguf, options.kinds, options.peers = options.gguf.resolve(), [A_FILE], {"llama.cpp"}
    options.environments = None if options.environments is None else options.environments.resolve()
    options.system_options = dict(options.options)
    options.quick = {}  # of systems while they serve
    if options.smoke:
        options.batch, options.rate, options.repeats, options.warm_up = [1, 3], [50.0, math.inf], 1, 1
        options.quick = QUICK
    lengths = [each for each in (options.prompt_len, options.new_tokens) if each is not None]
    counts = [options.repeats, options.kv_cache_gib, *options.batch, *lengths]
    if min(counts) < 1 or options.warm_up < 0 or min(options.rate) <= 0:
        names = "--repeats, --kv-cache-gib, --batch, --prompt-len, --new-tokens, --rate"
        parser.error(f"expected positive numbers: {names} (--warm-up may be 0)")
    if options.new_tokens == 1:
        parser.error("--new-tokens: expected 2 or more, as decoding is what comes behind the first")
    return options


def write_results(bench: Bench, command: str) -> None:
    from torchax_serve.bench.machine import Machine

    folder: Path = bench.options.output
    folder.mkdir(parents=True, exist_ok=True)
    stem = bench.options.config.stem if bench.file is None else bench.file.path.stem
    path = folder / f"serving-{command}-{stem}.json"
    machine = Machine.here()
    environments = RECIPES if bench.file is None else ("llama-cpp",)
    found = {
        "command": shlex.join(["python", *sys.argv]),
        **({} if bench.file is None else {"model": bench.file.title}),
        "machine": dataclasses.asdict(machine) | {"is_busy": machine.is_busy},
        "workload": dataclasses.asdict(bench.workload),
        "roofline": None if bench.roofline is None else dataclasses.asdict(bench.roofline),
        "rows": bench.rows,
        "choices": {
            kind: {name: dataclasses.asdict(choice) for name, choice in found.items()}
            for kind, found in bench.choices.items()
        },
        "environments": {name: record_of(name, bench.options.environments) for name in environments},
        "systems": bench.facts.get(command, {}),
        "turns": bench.turns,
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {path}")


def main() -> None:
    options = parse()
    sys.path.insert(0, str(REPOSITORY))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that systems are ended, too
    with contextlib.ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serving")))
        work.mkdir(parents=True, exist_ok=True)
        for command in options.commands:
            bench = Bench(options, work.resolve())
            RUN[command](bench)
            add_cache_size(bench, command)
            print_rows(bench.rows)
            print_warnings(bench)
            if not options.smoke:
                write_results(bench, command)


if __name__ == "__main__":
    main()
