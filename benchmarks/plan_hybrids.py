"""Plans of hybrids that are served on TPUs, beside what others have published, and their table in docs/plan.md.

    python benchmarks/plan_hybrids.py               # all of them, one process each; needs the extra plan
    python benchmarks/plan_hybrids.py kimi          # those with this word
    python benchmarks/plan_hybrids.py --page        # write the table of what is stored into docs/plan.md

Results go to benchmarks/results/plan-hybrids.json, which keeps what is not planned again.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from plan_shapes import planned, versions

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "plan-hybrids.json"
PAGE = HERE.parent / "docs" / "plan.md"
BEGIN, END = "<!-- hybrids: benchmarks/plan_hybrids.py --page -->\n", "<!-- end of hybrids -->"
LEN = 2048  # tokens of a request: prompts and answers of 1,024, as the published loads have them


@dataclass(frozen=True)
class Published:
    """What others have measured: milliseconds of a step, from tokens a second if these are what is published."""

    step_ms: float
    text: str


QWEN_27B = "Qwen3.8-27B, vLLM on TPU (recipes of August 2026), 64 requests, 1k/1k"
NONE = "none found"
# shape, title, topology, mesh, requests, published
PLANS = (
    (
        "qwen3.8-27b",
        "Qwen3.8 27B",
        "v6e:2x2",
        None,
        64,
        Published(33.0, f"33.0 ms a token, 1,871 tokens/s ({QWEN_27B})"),
    ),
    (
        "qwen3.8-27b",
        "Qwen3.8 27B",
        "tpu7x:2x2x1",
        None,
        64,
        Published(18.8, f"18.8 ms a token, 3,197 tokens/s ({QWEN_27B})"),
    ),
    ("qwen3.5-397b-fp8", "Qwen3.5 397B, fp8", "v6e:4x8", "model=4,expert=8", 128, None),
    (
        "qwen3.5-397b-fp8",
        "Qwen3.5 397B, fp8",
        "tpu7x:2x2x1",
        "model=2,expert=4",
        128,
        Published(128 / 3.957, "3,957 tokens/s of 128 requests, 1k/8k (recipes of 2026, InferenceX's client)"),
    ),
    ("nemotron-h-8b", "Nemotron-H 8B", "v6e:2x2", None, 64, None),
    ("nemotron-h-8b", "Nemotron-H 8B", "tpu7x:2x2x1", None, 64, None),
    ("granite-4.0-h-small", "Granite 4.0 H Small", "v6e:2x2", None, 64, None),
    ("granite-4.0-h-small", "Granite 4.0 H Small", "tpu7x:2x2x1", None, 64, None),
    ("kimi-linear-48b", "Kimi Linear 48B", "v6e:2x4", "model=2,expert=4", 64, None),
    ("kimi-linear-48b", "Kimi Linear 48B", "tpu7x:2x2x1", "model=2,expert=4", 64, None),
)


def row_of(plan):
    shape, title, topology, mesh, slots, _ = plan
    return {"shape": shape, "title": title, "topology": topology, "mesh": mesh or "all on model", "slots": slots}


def run(plan):
    _, _, _, mesh, slots, _ = plan
    options = ["--max-num-seqs", str(slots), "--max-model-len", str(LEN), "--prefill", "", "--no-cache"]
    return planned(row_of(plan), [*options, *(["--mesh", mesh] if mesh else [])])


def key(row):
    return row["shape"], row["topology"], row["mesh"], row["slots"]


def table(rows):
    """The rows of `PLANS` that are stored, as a table of Markdown."""
    heads = ("Shape", "Devices, mesh", "Requests", "Weights", "Pages", "States", "No faster than", "Compiler says")
    lines = ["| " + " | ".join([*heads, "Published", "Bound over published"]) + " |", "|" + "---|" * 10]
    stored = {key(row): row for row in rows}
    for plan in PLANS:
        row, published = stored.get(key(row_of(plan))), plan[-1]
        if row is not None:
            lines.append("| " + " | ".join(cells(row, published)) + " |")
    return "\n".join(lines) + "\n"


def cells(row, published):
    mesh = "" if row["mesh"] == "all on model" else ", " + row["mesh"].replace("=", " ").replace(",", ", ")
    first = [row["title"], row["topology"] + mesh, str(row["slots"])]
    said = NONE if published is None else published.text
    if "report" not in row:
        return [*first, "", "", "", row["error"], "", said, ""]
    report = row["report"]
    sizes = [f"{report[name] / 1e9:.2f}" for name in ("weights_bytes", "pages_bytes_wanted", "states_bytes")]
    bound, program = report["bounds"][0], report["programs"][0]
    step_ms = bound["seconds"] * 1e3
    least = f"{step_ms:.1f} ms, {row['slots'] / bound['seconds']:,.0f} tokens/s"
    if not report["fits"]:
        least += "; does not fit"
    compiler = "" if program["compiler_s"] is None else f"{program['compiler_s'] * 1e3:.1f} ms"
    share = "" if published is None else f"{100 * step_ms / published.step_ms:.0f} %"
    return [*first, *sizes, least, compiler, said, share]


def with_table(page, rows):
    """The page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(rows)}\n{END}{after}"


def main():
    wanted = [word for word in sys.argv[1:] if word != "--page"]
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    if "--page" in sys.argv[1:]:
        PAGE.write_text(with_table(PAGE.read_text(), rows))
        return
    for plan in PLANS:
        if not wanted or any(word in f"{plan[0]} {plan[2]}" for word in wanted):
            row = run(plan) | {"versions": versions()}
            rows = [each for each in rows if key(each) != key(row)] + [row]
            RESULTS.write_text(json.dumps({"length": LEN, "rows": rows}, indent=1) + "\n")
            print(table([row]), f"{row['cpu_s']:.0f} s, {row['peak_gb']:.1f} GB", flush=True)


if __name__ == "__main__":
    main()
