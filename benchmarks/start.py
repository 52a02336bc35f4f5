"""From the start of a process to its first token: this project's first and second start beside importing jax.

    python benchmarks/start.py                                   # the embedded model
    python benchmarks/start.py --model FOLDER --repeats 7 --output start.json
    python benchmarks/start.py --systems jax second second-cli   # those only
    python benchmarks/start.py --decode 25 --model FOLDER --repeats 2   # decoding after a first request, in both starts

jax          importing jax, the measure of this machine
first        `serve`, then a prompt of 6 tokens, with an empty cache of compiled programs (C++ kernels excepted)
second       the same once more, from what the first has left on disk
second-cli   `torchax-serve run` with a prompt of text, to the first byte on stdout

Systems run in turns (A B C A B C). Reported are medians: seconds from starting the process to its first token and to
its last, processor seconds to the first, and peak memory; and the ratio of the first token's time to that of importing
jax, round by round. With `--decode` a process answers a prompt of 64 tokens with 4, and then prompts with 100 tokens
for so many seconds; reported are tokens/s of each answer by its end, behind its first token.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "What is 3 plus 4?"
_SERVE = """
import json, sys, time
from torchax_serve import EngineOptions, SamplingParams, serve
model = serve(sys.argv[1] or None, engine=EngineOptions(max_num_seqs=1))
params = SamplingParams(max_new_tokens=int(sys.argv[2]), ignore_eos=True)
for number, token in enumerate(model.iter_tokens([1, 2, 3, 4, 5, 6], params=params)):
    if number == 0:
        print(json.dumps({"cpu_s": time.process_time()}), flush=True)
print("{}", flush=True)
"""
"""Prints a line at the first token, with the processor time so far, and one at the end."""

_DECODE = """
import json, sys, time
from torchax_serve import SamplingParams, serve
model = serve(sys.argv[1] or None)

def answer(number, num_tokens):
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, temperature=0)
    ids = [1 + (number + 7 * index) % 997 for index in range(64)]
    return [time.perf_counter() for _ in model.iter_tokens(ids, params=params)]

began, number, rates = answer(0, 4)[-1], 0, []
while (time.perf_counter() - began) < float(sys.argv[2]):
    number += 1
    times = answer(number, 100)
    rates.append((round(times[-1] - began, 1), round(99 / (times[-1] - times[0]), 1)))
print(json.dumps({"rates": rates, "average": round(100 * number / (time.perf_counter() - began), 1)}), flush=True)
"""
"""Prints the rates of answers after a first one, each with its end in seconds, and all tokens over all seconds."""


@dataclasses.dataclass(frozen=True)
class Command:
    """A process that prints at its first token.

    Attributes:
        arguments: The command.
        environment: Variables of it, besides those of this process.
        says_cpu: Whether the first line has the processor time so far.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    says_cpu: bool = True


@dataclasses.dataclass(frozen=True)
class Start:
    """One measured start: seconds, and bytes."""

    first_token_s: float
    cpu_s: float
    end_s: float
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all systems start with.

    Attributes:
        model: Folder of the model; None is the embedded one.
        num_tokens: Tokens of the answer.
        cache: Folder of this project's cache.
    """

    model: str | None
    num_tokens: int
    cache: Path


def jax_import(setting: Setting) -> Command:
    code = "import json, time, jax; print(json.dumps({'cpu_s': time.process_time()}), flush=True)"
    return Command([sys.executable, "-c", code])


def first_start(setting: Setting) -> Command:
    shutil.rmtree(setting.cache / "torchax-serve" / "compiled", ignore_errors=True)
    return second_start(setting)


def second_start(setting: Setting) -> Command:
    arguments = [sys.executable, "-c", _SERVE, setting.model or "", str(setting.num_tokens)]
    return Command(arguments, {"XDG_CACHE_HOME": str(setting.cache)})


def second_start_cli(setting: Setting) -> Command:
    run = "from torchax_serve.cli.main import main; main()"
    arguments = ["run", *([setting.model] if setting.model else []), "-p", PROMPT]
    arguments += ["--max-new-tokens", str(setting.num_tokens)]
    return Command([sys.executable, "-c", run, *arguments], {"XDG_CACHE_HOME": str(setting.cache)}, says_cpu=False)


SYSTEMS: Mapping[str, Callable[[Setting], Command]] = {
    "jax": jax_import,
    "first": first_start,
    "second": second_start,
    "second-cli": second_start_cli,
}


def measured(command: Command) -> Start:
    """Runs a process to its end.

    Raises:
        RuntimeError: it failed, or printed nothing.
    """
    environment = {**os.environ, **command.environment}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    began = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command.arguments, stdout=subprocess.PIPE, stderr=errors, env=environment)
        assert process.stdout is not None
        first = process.stdout.readline() if command.says_cpu else process.stdout.read(1)
        first_token_s = time.perf_counter() - began
        process.stdout.read()
        end_s = time.perf_counter() - began
        process.stdout.close()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode or not first:
            errors.seek(0)
            raise RuntimeError(errors.read().decode(errors="replace")[-2000:])
    cpu_s = float(json.loads(first)["cpu_s"]) if command.says_cpu else usage.ru_utime + usage.ru_stime
    return Start(first_token_s, cpu_s, end_s, usage.ru_maxrss * 1024)


def decode_rates(setting: Setting, seconds: float) -> dict[str, dict[str, float | list[float]]]:
    """Returns the rates of decoding of a first and of a second start.

    Raises:
        CalledProcessError: a start failed.
    """
    shutil.rmtree(setting.cache / "torchax-serve" / "compiled", ignore_errors=True)
    found = {}
    environment = {**os.environ, "XDG_CACHE_HOME": str(setting.cache), "PYTHONPATH": str(ROOT)}
    for name in ("first", "second"):
        command = [sys.executable, "-c", _DECODE, setting.model or "", str(seconds)]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, found[name], flush=True)
    return found


def keep_kernels(cache: Path) -> None:
    """Copies the user's C++ kernels into `cache`, which no start is to wait for."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with contextlib.suppress(FileNotFoundError):
        shutil.copytree(base / "torchax-serve" / "kernels", cache / "torchax-serve" / "kernels")
    for folder in (cache / "torchax-serve", cache / "torchax-serve" / "kernels"):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)


def summary(starts: Mapping[str, Sequence[Start]]) -> dict[str, dict[str, float]]:
    """Returns the medians of each system, and the median ratio to importing jax in the same round."""
    found = {}
    for name, runs in starts.items():
        found[name] = {
            field.name: statistics.median(getattr(run, field.name) for run in runs)
            for field in dataclasses.fields(Start)
        }
        if measure := starts.get("jax"):
            for field in ("first_token_s", "cpu_s"):
                pairs = zip(runs, measure, strict=True)
                ratios = [getattr(run, field) / getattr(base, field) for run, base in pairs]
                found[name][f"{field.removesuffix('_s')}_over_jax"] = statistics.median(ratios)
    return found


def main() -> None:
    """Measures, prints a table, and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; without it the embedded one")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-tokens", type=int, default=17)
    parser.add_argument("--decode", type=float, metavar="SECONDS", help="measure decoding after a first request")
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    given = parser.parse_args()
    starts: dict[str, list[Start]] = {name: [] for name in given.systems}
    with tempfile.TemporaryDirectory() as cache:
        setting = Setting(given.model, given.num_tokens, Path(cache))
        keep_kernels(setting.cache)
        if given.decode is not None:
            rounds = [decode_rates(setting, given.decode) for _ in range(given.repeats)]
            if given.output is not None:
                given.output.write_text(json.dumps(rounds, indent=1) + "\n")
            return
        for name in given.systems:  # what a second start finds, and files in the page cache
            if name.startswith("second"):
                measured(SYSTEMS[name](setting))
        for _ in range(given.repeats):
            for name in given.systems:
                starts[name].append(measured(SYSTEMS[name](setting)))
    found = summary(starts)
    for name, row in found.items():
        print(f"{name:12} " + "  ".join(f"{key} {value:.3g}" for key, value in row.items()))
    if given.output is not None:
        runs = {name: [dataclasses.asdict(run) for run in each] for name, each in starts.items()}
        given.output.write_text(json.dumps({"medians": found, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
