"""Generation on JAX against transformers' own ``generate``, beside the rates this project aims at.

    python benchmarks/generate.py                     # the 184 M Qwen3 shape, bfloat16 and float32, batch 1, 8 and 32
    python benchmarks/generate.py --quick             # a tiny shape: shows that everything runs, no more
    python benchmarks/generate.py --config benchmarks/shapes/llama-8b.json --dtype bfloat16 --no-starts   # on a GPU

Both sides run in one process in turns, with the same random weights. Starts are processes of their own over a
checkpoint written for the purpose: the first with an empty folder of compiled programs, the second with what the first
left there. Close everything else before; what other programs use of the processor is noted in the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parent
SHAPES = FOLDER / "shapes"
TARGET_SHAPE = SHAPES / "qwen3-184m.json"


@dataclasses.dataclass(frozen=True)
class Target:
    """What is aimed at for one number, on 2 CPU cores with `TARGET_SHAPE`."""

    dtype: str
    batch: int
    number: str
    at_least: float


TARGETS = (
    Target("bfloat16", 1, "decode ratio", 1.8),
    Target("bfloat16", 8, "decode ratio", 1.2),
    Target("bfloat16", 1, "prefill ratio", 1.0),
    Target("bfloat16", 8, "prefill ratio", 1.0),
    Target("bfloat16", 1, "MBU", 0.7),
    Target("float32", 1, "decode ratio", 1.5),
)
SECOND_START_AT_MOST = 0.5


def with_target(row: dict[str, Any], target: float | None, *, at_most: bool = False) -> dict[str, Any]:
    """The row and whether its value reaches the target, if it has one."""
    if target is None:
        return row | {"target": None, "met": None}
    met = row["value"] <= target if at_most else row["value"] >= target
    return row | {"target": f"{'<=' if at_most else '>='} {target:g}", "met": met}


def rows_of(report: Any, *, has_targets: bool) -> list[dict[str, Any]]:
    """Rows of the table; ``value`` is what a target speaks about."""
    targets = {(t.dtype, t.batch, t.number): t.at_least for t in TARGETS} if has_targets else {}
    rows = []
    for case in report.cases:
        numbers = [("decode ratio", "decode_tokens_per_s"), ("prefill ratio", "prefill_tokens_per_s"), ("MBU", "mbu")]
        for label, name in numbers:
            ours, peer = getattr(case.ours, name), getattr(case.peer, name)
            value = ours if name == "mbu" else case.ratio(name)
            row = {"dtype": report.model.dtype, "batch": case.batch, "number": label, "ours": ours, "peer": peer}
            rows.append(with_target(row | {"value": value}, targets.get((report.model.dtype, case.batch, label))))
    return rows


def measure(config: Path, dtype: str, options: argparse.Namespace) -> Any:
    from torchax_serve.bench import BenchSettings, bench

    settings = BenchSettings(tuple(options.batch), options.prompt_len, options.new_tokens, options.repeats, "hf")
    command = shlex.join(["python", *sys.argv])
    note = lambda text: print(f"{dtype}: {text}", file=sys.stderr, flush=True)  # noqa: E731
    return bench(os.path.relpath(config), settings, dtype=dtype, random_weights=True, command=command, note=note)


def write_checkpoint(config: Path, dtype: str, folder: Path) -> None:
    """Random weights as an ordinary model folder."""
    import torch
    import transformers

    shape = json.loads(config.read_text())
    torch.manual_seed(0)
    built = transformers.AutoConfig.for_model(**shape)
    model = transformers.AutoModelForCausalLM.from_config(built, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)


def start_once(folder: Path, prompt_len: int, new_tokens: int, began: float) -> dict[str, float]:
    """In a fresh process: loads the model and generates; seconds until the first token is handed out.

    `began` is when the process was started, by the clock of who started it: the kernel's own record of it is rounded
    to whole seconds since the machine's start.
    """
    from torchax_serve import serve  # isort: skip  # imports torch, jax and transformers

    import torch
    from transformers import GenerationConfig
    from transformers.generation.streamers import BaseStreamer

    from torchax_serve.bench.timed_model import count_programs

    times: list[float] = []

    class Clock(BaseStreamer):
        def put(self, value: Any) -> None:
            times.append(time.time())

        def end(self) -> None:
            pass

    imported = time.time()
    with count_programs() as programs, serve(folder) as model:
        loaded = time.time()
        model.torch_model.generation_config = GenerationConfig(do_sample=False)
        ids = torch.arange(prompt_len)[None] % 100 + 3
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, streamer=Clock())
    first = times[1]  # the prompt comes before it
    return {
        "from_process_start_s": first - began,
        "from_serve_s": first - imported,
        "import_s": imported - began,
        "load_s": loaded - imported,
        "num_programs": programs[0],
        "num_from_cache": programs[1],
    }


def measure_starts(config: Path, dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Pairs of a first and a second start, each pair with a cache folder of its own."""
    with tempfile.TemporaryDirectory(prefix="starts") as scratch:
        folder = Path(scratch) / "model"
        write_checkpoint(config, dtype, folder)
        command = [sys.executable, __file__, "--step", "start", "--folder", str(folder)]
        command += ["--prompt-len", str(options.prompt_len), "--new-tokens", str(options.new_tokens)]
        pairs = []
        for index in range(options.starts):
            cache = Path(scratch) / f"cache{index}"
            keep_kernels(cache)
            python_path = os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])
            environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": python_path, "HF_HUB_OFFLINE": "1"}
            pair = {}
            for name in ("first", "second"):
                print(f"{dtype}: {name} start, {index + 1} of {options.starts}", file=sys.stderr, flush=True)
                began = ["--began", str(time.time())]
                done = subprocess.run(command + began, env=environment, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"the {name} start failed:\n{done.stderr}")
                pair[name] = json.loads(done.stdout.splitlines()[-1])
            pairs.append(pair)
    return pairs


def keep_kernels(cache: Path) -> None:
    """Puts the compiled C++ kernels into an empty cache folder: starts are about XLA's programs, not about g++."""
    from model_adapters.ops.cpu.build import BuildError, cache_folder, library_path

    cache.mkdir()
    try:
        library_path()
    except BuildError:
        return
    shutil.copytree(cache_folder().path, cache / "torchax-serve" / "kernels")


def rows_of_starts(dtype: str, pairs: list[dict[str, Any]], *, has_targets: bool) -> list[dict[str, Any]]:
    rows = []
    for name, label in (("from_process_start_s", "start, from process"), ("from_serve_s", "start, from serve()")):
        first, second = (statistics.median(pair[which][name] for pair in pairs) for which in ("first", "second"))
        row = {"dtype": dtype, "batch": 1, "number": label, "ours": second, "peer": first, "value": second / first}
        rows.append(with_target(row, SECOND_START_AT_MOST if has_targets else None, at_most=True))
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.3g}"

    print(f"{'':10}{'batch':>6}  {'':20}{'ours':>9}{'hf':>9}{'value':>9}  target")
    for row in rows:
        verdict = {None: "", True: "met", False: "MISSED"}[row["met"]]
        print(
            f"{row['dtype']:10}{row['batch']:>6}  {row['number']:20}{text(row['ours']):>9}{text(row['peer']):>9}"
            f"{text(row['value']):>9}  {row['target'] or '':8}{verdict}"
        )
    print("decode and prefill in tokens/s; start: seconds to the first token, second start beside the first one")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=TARGET_SHAPE)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--starts", type=int, default=5, help="pairs of a first and a second start")
    parser.add_argument("--no-starts", dest="starts", action="store_const", const=0)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/generate-NAME.json; none with --quick")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--step", choices=["all", "start"], default="all", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.config, options.batch, options.prompt_len, options.new_tokens = SHAPES / "tiny.json", [1, 2], 16, 8
        options.dtype, options.repeats, options.starts = options.dtype[:1], 1, min(options.starts, 1)
    elif options.output is None:
        options.output = FOLDER / "results" / f"generate-{options.config.stem}.json"
    return options


def main() -> None:
    options = parse()
    if options.step == "start":
        print(json.dumps(start_once(options.folder, options.prompt_len, options.new_tokens, options.began)))
        return
    sys.path.insert(0, str(REPOSITORY))
    from torchax_serve.cli.bench import print_report

    has_targets = options.config.resolve() == TARGET_SHAPE
    rows, reports, starts = [], [], {}
    for dtype in options.dtype:
        report = measure(options.config, dtype, options)
        print_report(report)
        rows += rows_of(report, has_targets=has_targets)
        reports.append(report.as_dict())
    if options.starts:
        dtype = options.dtype[0]
        starts = {dtype: measure_starts(options.config, dtype, options)}
        rows += rows_of_starts(dtype, starts[dtype], has_targets=has_targets)
    print_rows(rows)
    if any(report["machine"]["is_busy"] for report in reports):
        print("other programs used the machine: measure again on a quiet one")
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"rows": rows, "reports": reports, "starts": starts}, indent=1) + "\n")
        print(f"written to {options.output}")


if __name__ == "__main__":
    main()
