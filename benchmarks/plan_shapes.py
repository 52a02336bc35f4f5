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
    ("qwen3.5-27b", "v6e:2x2", None, 64, ""),
    ("qwen3.5-27b", "tpu7x:2x2x1", None, 64, ""),
    ("qwen3.5-397b-fp8", "v6e:4x8", "model=4,expert=8", 128, ""),
    ("qwen3.5-397b-fp8", "tpu7x:2x2x1", "model=2,expert=4", 128, ""),
    ("nemotron-h-8b", "v6e:2x2", None, 64, ""),
    ("nemotron-h-8b", "tpu7x:2x2x1", None, 64, ""),
    ("granite-4-h-small", "v6e:2x2", None, 64, ""),
    ("granite-4-h-small", "tpu7x:2x2x1", None, 64, ""),
    ("kimi-linear-48b", "v6e:2x4", None, 64, ""),
    ("kimi-linear-48b", "tpu7x:2x2x1", None, 64, ""),
)
IMAGE_PLANS = (("flux-1-dev", "v6e:2x2", "1024x1024"), ("stable-diffusion-3.5-large", "v6e:2x2", "1024x1024"))
"""Transformers of diffusion pipelines: shape, topology, pixels of an image."""
VERSIONS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "torch", "transformers", "torchax", "diffusers")
COMMAND = "import sys; sys.argv[0] = 'torchax-serve'; from torchax_serve.cli.main import main; main()"


def run(shape, topology, mesh, slots, prefill, options=()):
    arguments = ["--max-num-seqs", str(slots), "--max-model-len", str(LEN), "--prefill", prefill, "--no-cache"]
    row = {"shape": shape, "topology": topology, "mesh": mesh or "all on model", "slots": slots}
    return planned(row, [*arguments, *(["--mesh", mesh] if mesh else []), *options]) | {"options": " ".join(options)}


def planned(row, options):
    """The row with what a plan says, in a process of its own."""
    arguments = ["plan", str(HERE / "shapes" / f"{row['shape']}.json"), "--topology", row["topology"], "--json"]
    arguments += options
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
    row = row | took
    if done.returncode:
        return row | {"error": done.stderr.strip().splitlines()[-1]}
    report = json.loads(done.stdout)
    report["model"] = row["shape"]
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


def image_table(rows):
    lines = [
        "| shape | topology | image | fits | weights | temporaries | exchange | step at least | s, GB here |",
        "|" + "---|" * 9,
    ]
    for row in rows:
        report = row.get("report")
        first = f"| {row['shape']} | {row['topology']} | {row['image']} |"
        if report is None:
            lines.append(f"{first} {row['error']} | | | | | |")
            continue
        program = report["program"] or {"collectives": {}}
        exchange = ", ".join(f"{n} {kind}" for kind, (n, _) in program["collectives"].items()) or "-"
        lines.append(
            f"{first} {'yes' if report['fits'] else 'no'} | {report['weights_bytes'] / 1e9:.2f} | "
            f"{report['temporary_bytes'] / 1e9:.2f} | {exchange} | {report['bound_s'] * 1e3:.1f} ms | "
            f"{row['cpu_s']:.0f}, {row['peak_gb']:.1f} |"
        )
    return "\n".join(lines)


def key(row):
    return (*operator.itemgetter("shape", "topology", "mesh")(row), row.get("options", row.get("image", "")))


def main():
    wanted = set(sys.argv[1:])
    content = {"rows": [], "images": []} | (json.loads(RESULTS.read_text()) if RESULTS.exists() else {})

    def is_wanted(plan):
        return not wanted or any(word in " ".join(map(str, plan)) for word in wanted)

    def add(kind, row):
        row |= {"versions": versions()}
        kept = [each for each in content[kind] if key(each) != key(row)]
        content.update({"length": LEN, kind: [*kept, row]})
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")
        print((table if kind == "rows" else image_table)([row]), flush=True)

    for plan in filter(is_wanted, PLANS):
        add("rows", run(*plan))
    for shape, topology, size in filter(is_wanted, IMAGE_PLANS):
        row = {"shape": shape, "topology": topology, "mesh": "all on model", "image": size}
        add("images", planned(row, ["--image-size", size]))
    print(table(content["rows"]), image_table(content["images"]), sep="\n\n")


if __name__ == "__main__":
    main()
