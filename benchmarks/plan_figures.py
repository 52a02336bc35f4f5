"""How long planning a model of 70 billion parameters takes, and how much memory, beside what it may.

    python benchmarks/plan_figures.py            # needs the extra plan; results/plan-figures.json
    python benchmarks/plan_figures.py decode     # one of decode, prefill; each is followed by its second plan

Each plan is a process of its own with an empty folder of earlier plans; the second one finds what the first has left.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "plan-figures.json"
ARGUMENTS = [str(HERE / "shapes" / "llama-3-70b.json"), "--topology", "v6e:2x4", "--max-model-len", "4096", "--json"]
# name: tokens of the prefill steps, most seconds of the first and the second plan, most bytes
FIGURES = {"decode": ("", 40, 10, 3e9), "prefill": ("256,512,1024,2048", 150, 10, 3e9)}
CODE = """
import sys; sys.argv[0] = "torchax-serve"
from torchax_serve.cli.main import main
try:
    main()
finally:
    lines = open("/proc/self/status").read().splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("VmHWM")), file=sys.stderr)
"""


def plan(prefill, folder):
    """Seconds, peak bytes and report of one process."""
    path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": folder}
    command = [sys.executable, "-c", CODE, "plan", *ARGUMENTS, "--prefill", prefill]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    took = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(done.stderr)
    return round(took, 1), int(done.stderr.split()[-1]) * 1024, json.loads(done.stdout)


def run(name):
    prefill, most_s, most_again_s, most_bytes = FIGURES[name]
    with tempfile.TemporaryDirectory() as folder:
        first_s, peak, report = plan(prefill, folder)
        again_s, _, again = plan(prefill, folder)
    assert not report["from_cache"] and again["from_cache"]
    programs = [
        {key: each[key] for key in ("name", "num_tokens", "trace_s", "compile_s", "compiler_s", "num_opaque")}
        for each in report["programs"]
    ]
    return {
        "figure": name,
        "num_cores": len(os.sched_getaffinity(0)),
        "first_s": first_s,
        "most_s": most_s,
        "again_s": again_s,
        "most_again_s": most_again_s,
        "peak_gb": round(peak / 1e9, 2),
        "most_gb": most_bytes / 1e9,
        "met": first_s <= most_s and again_s <= most_again_s and peak <= most_bytes,
        "bounds_ms": [round(each["seconds"] * 1e3, 3) for each in report["bounds"]],
        "programs": programs,
    }


def main():
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for name in sys.argv[1:] or FIGURES:
        row = run(name)
        print(json.dumps(row), flush=True)
        rows = [each for each in rows if each["figure"] != name] + [row]
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
