"""What documents show of the rows: columns of docs/models.md, a section and a picture of docs/performance.md."""

from __future__ import annotations

import dataclasses
import random
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from speed_of_types.kinds import KINDS
from speed_of_types.rows import Row, ratio, read

FILE = "types-speed.jsonl"
PICTURE = "types.svg"
BUSY_CORES = 0.5
"""Cores that others used in the median row, beyond which ratios are those of processor time."""
_NO_BFLOAT16 = (
    "This processor has no AVX-512: eager PyTorch's products in bfloat16 are slow on it, float32 compares both at "
    "their best."
)
COLORS = {"bfloat16": "#c4451c", "float32": "#1f6f8b"}


@dataclasses.dataclass(frozen=True)
class Results:
    """Rows of one processor and number of threads, and how they are compared.

    Attributes:
        rows: those that have ratios.
        others: those that have none, and say why.
        suffix: of the names of ratios: "_cpu" where the machine was busy.
    """

    rows: Sequence[Row]
    others: Sequence[Row]
    suffix: str

    @classmethod
    def of(cls, found: Iterable[Row]) -> Results:
        """Takes the rows of the processor that measured last, with the number of threads that most have."""
        found = list(found)
        last = max(found, key=lambda row: str(row["date"])).get("processor")
        found = [row for row in found if row.get("processor") == last]
        threads = Counter(row["threads"] for row in found).most_common(1)[0][0]
        found = [row for row in found if row["threads"] == threads]
        rows = [row for row in found if row["ratios"].get("engine")]
        others = [row for row in found if not row["ratios"].get("engine")]
        is_busy = statistics.median(row["cores_in_use"] for row in rows) > BUSY_CORES if rows else False
        return cls(rows, others, "_cpu" if is_busy else "")

    @property
    def dtype(self) -> str:
        """The dtype that both sides are at their best in."""
        return "float32" if _lacks_bfloat16(self.rows) else "bfloat16"

    def values(self, number: str, requests: int, dtype: str, side: str = "engine") -> dict[str, dict[str, float]]:
        """Ratios by kind and type."""
        found: dict[str, dict[str, float]] = {}
        for row in self.rows:
            value = ratio(row, number + self.suffix, side)
            if value is not None and (row["requests"], row["dtype"]) == (requests, dtype):
                found.setdefault(row["kind"], {})[f"{row['task']}:{row['type']}"] = value
        return found

    def machine(self) -> str:
        """Where and when they were measured."""
        first = max(self.rows, key=lambda row: str(row["date"]))
        threads = f"{first['threads']} of {first['cores']}" if first["threads"] else str(first["cores"])
        versions = ", ".join(f"{name} {version}" for name, version in sorted(first["versions"].items()))
        compared = "by processor time, as others used the machine" if self.suffix else "by the clock"
        return f"{threads} cores of {first['cpu']}, {first['date']}, {compared}; {versions}"


def _lacks_bfloat16(found: Sequence[Row]) -> bool:
    """Whether the processor is known, and has no AVX-512: eager PyTorch has kernels for bfloat16 on others."""
    known = found[0].get("processor") if found else None
    return known is not None and "avx2" in known and "avx512" not in known


def columns(results: Results) -> dict[str, dict[str, dict[str, float]]]:
    """Ratios of decoding in `Results.dtype`, by task, type and number of requests."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in results.rows:
        value = ratio(row, f"decode{results.suffix}")
        if row["dtype"] == results.dtype and value is not None:
            found.setdefault(row["task"], {}).setdefault(row["type"], {})[str(row["requests"])] = value
    return found


def section(folder: Path) -> str | None:
    """The section of docs/performance.md; None if nothing was measured."""
    found = read(folder / FILE)
    if not found:
        return None
    results = Results.of(found.values())
    introduction = (
        f"`python benchmarks/types_speed.py` on {results.machine()}. The engine of `serve(model)` with its default "
        "options and the drop-in, over eager PyTorch's `generate` on the same weights: a random model of each type "
        "with 50 to 200 million weights, 64 tokens and 32 new ones. Decoding, medians over the types of a kind, empty "
        "where it was not measured:"
    )
    slow = [f"{number}: {', '.join(_slow(results, number)) or 'none'}" for number in ("decoding", "prefill")]
    if _lacks_bfloat16(results.rows):
        introduction = introduction.replace(" Decoding, medians", f" {_NO_BFLOAT16} Decoding, medians")
    rest = f"Types whose engine is slower than eager PyTorch in some row: {'; '.join(slow)}."
    parts = ["## Types of models", _filled(introduction), _table(results, "decode"), "Prefill:"]
    parts += [_table(results, "prefill"), _filled(rest)]
    return "\n\n".join([*parts, f"![types](pictures/{PICTURE})"]) + "\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, 125, break_long_words=False, break_on_hyphens=False)


def _table(results: Results, number: str) -> str:
    head = ["kind", "types"]
    cases = [(d, n, side) for d in COLORS for n in (1, 8) for side in ("engine", "drop-in")]
    head += [f"{side}, {dtype}, {number}" for dtype, number, side in cases]
    lines = [head, ["---"] * len(head)]
    for kind in KINDS:
        types = {(row["task"], row["type"]) for row in results.rows if row["kind"] == kind}
        values = [results.values(number, requests, dtype, side).get(kind, {}) for dtype, requests, side in cases]
        if types:
            lines.append([kind, str(len(types)), *(_median(each.values()) for each in values)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _median(values: Iterable[float]) -> str:
    values = list(values)
    return f"{statistics.median(values):.2f}" if values else ""


def _slow(results: Results, number: str) -> list[str]:
    """Names the types whose engine is slower than eager PyTorch, with the lowest of their ratios."""
    lowest: dict[str, float] = {}
    for row in results.rows:
        name = row["type"] if row["task"] == "causal" else f"{row['task']}:{row['type']}"
        value = ratio(row, f"{'decode' if number == 'decoding' else number}{results.suffix}")
        if value is not None:
            lowest[name] = min(value, lowest.get(name, value))
    slow = sorted((value, name) for name, value in lowest.items() if value < 1)
    return [f"`{name}` {value:.2f}" for value, name in slow]


def draw(folder: Path, pictures: Path) -> Path | None:
    """Draws every type as a dot over its ratio, a line for each kind; returns the path."""
    found = read(folder / FILE)
    if not found:
        return None
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "types", "svg.fonttype": "none", "font.family": "sans-serif"}
    from matplotlib import pyplot

    results = Results.of(found.values())
    figure, axes = pyplot.subplots(2, 2, figsize=(9.2, 6.8), sharey=True, sharex=True)
    for row, number in zip(axes, ("decode", "prefill"), strict=True):
        for axis, requests in zip(row, (1, 8), strict=True):
            _draw_panel(axis, results, number, requests)
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    pictures.mkdir(parents=True, exist_ok=True)
    figure.savefig(pictures / PICTURE, metadata={"Date": None})
    pyplot.close(figure)
    return pictures / PICTURE


def _draw_panel(axis: Any, results: Results, number: str, requests: int) -> None:
    places = {kind: len(KINDS) - index for index, kind in enumerate(KINDS)}
    spread = random.Random(0)
    for shift, (dtype, color) in zip((0.15, -0.15), COLORS.items(), strict=True):
        xs, ys = [], []
        for kind, values in results.values(number, requests, dtype).items():
            xs += values.values()
            ys += [places[kind] + shift + spread.uniform(-0.1, 0.1) for _ in values]
        axis.plot(xs, ys, ".", color=color, alpha=0.6, markersize=5, label=dtype)
    axis.axvline(1, color="#777777", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_xticks([0.05, 0.1, 0.2, 0.5, 1, 2, 5], ["0.05", "0.1", "0.2", "0.5", "1", "2", "5"])
    axis.minorticks_off()
    axis.set_yticks(list(places.values()), list(places))
    asked = "1 request" if requests == 1 else f"{requests} requests"
    axis.set_title(f"{number}, engine over eager, {asked}", fontsize=10, loc="left")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def about(results: Results) -> Mapping[str, str]:
    """What docs/models.md says of the measurement."""
    return {"command": "python benchmarks/types_speed.py", "machine": results.machine(), "dtype": results.dtype}
