"""What a first start costs over the number of layers: tracing, lowering and compiling of a model's programs.

    python benchmarks/start_depth.py                      # 4, 12, 24, 48 layers of the 184-million shape, narrow
    python benchmarks/start_depth.py --layers 4 48 --turns 5 --save benchmarks/results/start-depth.json
    python benchmarks/start_depth.py --package ../other-checkout   # with another version in turns

Each number of layers is a process of its own with an empty folder of compiled programs. It loads the shape with random
weights, makes the engine, and generates one token: that is "start", without imports. It then traces, lowers and
compiles the decode step and a prefill step of 256 tokens on their own. All numbers are seconds of processor time of
the process, as other programs would slow a clock; rows are medians of the turns. The widths are small: what is
measured depends on the number of operations, not on their sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
SHAPE = FOLDER / "shapes" / "qwen3-184m.json"
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
PREFILL_LEN = 256
PARTS = ("start_s", "trace_s", "lower_s", "compile_s")


def measure(num_layers: int) -> dict[str, float]:
    """Starts a model of `num_layers` layers in this process, whose cache folder is empty."""
    import jax
    from transformers import GenerationConfig

    from torchax_serve import EngineOptions, serve
    from torchax_serve.compilation import gc_pause
    from torchax_serve.request_params import RequestParams
    from torchax_serve.scheduler import Request

    shape = Path(os.environ["XDG_CACHE_HOME"]) / "shape.json"
    shape.write_text(json.dumps(json.loads(SHAPE.read_text()) | NARROW | {"num_hidden_layers": num_layers}))
    options = EngineOptions(max_model_len=640, max_num_seqs=8)
    begin = time.process_time()
    with serve(shape, random_weights=True, dtype="bfloat16", engine=options) as model:
        sampling = GenerationConfig(max_new_tokens=1, do_sample=False)
        request = Request.of([5, 6, 7], RequestParams.of_generation_config(sampling, seed=0))
        model.engine.submit(request).result()
        found = dict.fromkeys(PARTS, 0.0) | {"start_s": time.process_time() - begin}
        executor = model.engine._runner._executor
        gc.collect()
        with gc_pause.paused():
            for step in executor.abstract_steps([PREFILL_LEN]):
                times = [time.process_time()]
                donated = tuple(1 + number for number in step.donated)
                traced = jax.jit(step.function, donate_argnums=donated).trace(executor._weights, *step.args)
                times.append(time.process_time())
                lowered = traced.lower()
                times.append(time.process_time())
                lowered.compile()
                times.append(time.process_time())
                for part, before, after in zip(PARTS[1:], times, times[1:], strict=False):
                    found[part] += after - before
    return found


def measured_apart(num_layers: int, package: Path) -> dict[str, float]:
    """Runs `measure` in a process of its own, with the packages of a checkout."""
    from generate import keep_kernels

    with tempfile.TemporaryDirectory(prefix="start-depth") as scratch:
        cache = Path(scratch) / "cache"
        keep_kernels(cache)
        environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(package)}
        command = [sys.executable, __file__, "--measure", str(num_layers)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{num_layers} layers: {done.stderr.strip()}")
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(f"{'package':>12}{'layers':>8}{'start':>8}{'trace':>8}{'lower':>8}{'compile':>9}{'trace+compile':>15}")
    for row in rows:
        total = row["trace_s"] + row["lower_s"] + row["compile_s"]
        print(
            f"{row['package']:>12}{row['layers']:>8}{row['start_s']:>8.2f}{row['trace_s']:>8.2f}{row['lower_s']:>8.2f}"
            f"{row['compile_s']:>9.2f}{total:>15.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12, 24, 48])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--package", type=Path, help="a checkout with another version, measured in turns")
    parser.add_argument("--save", type=Path, help="also write the numbers here, as JSON")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.measure)))
        return
    packages = {"this": FOLDER.parent} | ({"other": options.package.resolve()} if options.package else {})
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(options.turns):
        for num_layers in options.layers:
            for name, package in packages.items():
                found.setdefault((name, num_layers), []).append(measured_apart(num_layers, package))
    rows = [
        {"package": name, "layers": num_layers}
        | {part: statistics.median(turn[part] for turn in turns) for part in PARTS}
        for (name, num_layers), turns in found.items()
    ]
    print_rows(rows)
    if options.save is not None:
        from importlib.metadata import version

        from torchax_serve.bench.machine import Machine

        report = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": str(Machine.here()),
            "versions": {name: version(name) for name in ("jax", "jaxlib", "torch", "torchax", "transformers")},
            "seconds_of": "processor time",
            "turns": options.turns,
            "rows": rows,
        }
        options.save.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
