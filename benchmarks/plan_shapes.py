"""Plans of well-known shapes on hardware that need not be here, one process each, and the table of what came out.

    python benchmarks/plan_shapes.py                  # all of them; needs the extras plan and cuda
    python benchmarks/plan_shapes.py llama-3-70b      # those with this word
    python benchmarks/plan_shapes.py int4 fp8 mxfp4   # those with one of these

Results go to benchmarks/results/plan.json, which keeps what was planned before and is not planned again now.
"""

from __future__ import annotations

import importlib.metadata
import json
import operator
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "plan.json"
LEN = 4096
# shape, topology, mesh, requests, tokens of prefill steps, further options
PLANS = (
    ("llama-3-70b", "v6e:2x4", None, 64, "1024"),
    ("llama-3-70b", "h200:4", None, 64, ""),
    ("qwen3-32b", "v6e:2x4", None, 64, ""),
    ("gemma-3-27b", "v6e:2x4", None, 64, ""),
    ("mixtral-8x7b", "v6e:2x4", None, 64, ""),
    ("mixtral-8x7b", "v6e:2x4", "model=2,expert=4", 64, ""),
    ("gpt-oss-120b", "v5p:2x2x2", "model=2,expert=4", 64, ""),
    ("qwen3-coder-480b", "v5p:2x4x4", "model=4,expert=8", 64, ""),
    ("deepseek-v3", "v5p:2x4x4", "model=4,expert=8", 16, ""),
    ("llama-3-70b", "v6e:2x4", None, 64, "", ("--quantization", "int4")),
    ("llama-3-70b", "v6e:2x4", None, 64, "", ("--quantization", "int4", "--kv-cache-dtype", "int8")),
    ("gpt-oss-120b-mxfp4", "v6e:2x4", "model=2,expert=4", 64, ""),
    ("qwen3-coder-480b-fp8", "v5p:2x2x4", "model=4,expert=4", 64, ""),
    ("deepseek-v3-fp8", "v5p:2x2x4", "model=4,expert=4", 16, ""),
)
VERSIONS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "torch", "transformers", "torchax")
COMMAND = "import sys; sys.argv[0] = 'torchax-serve'; from torchax_serve.cli.main import main; main()"


def run(shape, topology, mesh, slots, prefill, options=()):
    arguments = ["plan", str(HERE / "shapes" / f"{shape}.json"), "--topology", topology, "--max-num-seqs", str(slots)]
    arguments += ["--max-model-len", str(LEN), "--prefill", prefill, "--json", "--no-cache"]
    arguments += [*(["--mesh", mesh] if mesh else []), *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = {
        "wall_s": round(time.perf_counter() - start, 1),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "peak_gb": round(after.ru_maxrss / 1e6, 2),  # of the largest process so far
    }
    row = {"shape": shape, "topology": topology, "mesh": mesh or "all on model", "slots": slots}
    row |= {"options": " ".join(options), **took}
    if done.returncode:
        return row | {"error": done.stderr.strip().splitlines()[-1]}
    report = json.loads(done.stdout)
    report["model"] = shape
    return row | {"report": report}


def versions():
    found = {}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def table(rows):
    heading = "| shape | topology | mesh | bits | fits | weights | pages | temporaries | exchange | step at least "
    lines = [f"{heading}| s, GB here |", "|" + "---|" * 11]
    for row in rows:
        report = row.get("report")
        first = f"| {row['shape']} | {row['topology']} | {row['mesh']} |"
        if report is None:
            lines.append(f"{first} {row['error']} | | | | | | | |")
            continue
        gb = [report[key] / 1e9 for key in ("weights_bytes", "pages_bytes_wanted", "temporary_bytes")]
        decode, bound = report["programs"][:1], report["bounds"][:1]
        exchange = ", ".join(f"{n} {kind}" for kind, (n, _) in decode[0]["collectives"].items()) if decode else "-"
        least = f"{bound[0]['seconds'] * 1e3:.1f} ms" if bound else "-"
        fits, bits = "yes" if report["fits"] else "no", report.get("weight_bits", 16)
        lines.append(
            f"{first} {bits:.1f} | {fits} | {gb[0]:.2f} | {gb[1]:.2f} | {gb[2]:.2f} | {exchange} | "
            f"{least} | {row['cpu_s']:.0f}, {row['peak_gb']:.1f} |"
        )
    return "\n".join(lines)


def key(row):
    return (*operator.itemgetter("shape", "topology", "mesh")(row), row.get("options", ""))


def main():
    wanted = set(sys.argv[1:])
    content = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    kept = content["rows"]
    for plan in PLANS:
        if wanted and not any(word in " ".join(map(str, plan)) for word in wanted):
            continue
        row = run(*plan) | {"versions": versions()}
        kept = [each for each in kept if key(each) != key(row)]
        kept.append(row)
        content |= {"length": LEN, "rows": kept}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")
        print(table([row]), flush=True)
    print(table(kept))


if __name__ == "__main__":
    main()
