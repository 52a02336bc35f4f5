"""Pictures of the curves that `curves.py` has measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving_peers.variants import NAMES

COLORS = {"ours": "#c4451c", "llama.cpp": "#1f6f8b", "openvino": "#6b4fa0", "onnxruntime": "#7a7a2e", "vllm": "#2e7d4f"}
OTHER_COLOR = "#777777"


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        number: of the points.
        title, x_label: as drawn; the unit is in the title.
    """

    number: str
    title: str
    x_label: str
    is_log_x: bool = True
    is_log_y: bool = False


PANELS: Mapping[str, tuple[Panel, ...]] = {
    "requests": (
        Panel("tokens_per_s", "Decoding, tokens/s", "requests at once", is_log_y=True),
        Panel("host_ms", "Engine's thread, ms for a step", "requests at once"),
    ),
    "context": (
        Panel("ms_per_token", "One request, ms per token", "tokens before", is_log_y=True),
        Panel("ttft_s", "Time to first token, s", "tokens of the prompt", is_log_y=True),
    ),
    "layers": (Panel("first_token_s", "Process to first token, s", "layers", False),),
    "load": (
        Panel("first_token_s", "Process to first token, s", "checkpoint, GB", False),
        Panel("peak_gb", "Peak memory, GB", "checkpoint, GB", False),
    ),
}


def series_of(
    points: Mapping[str, Mapping[str, Mapping[str, float]]], number: str
) -> dict[str, list[tuple[float, float]]]:
    """By system, the points that have the number, in the order of x."""
    found: dict[str, list[tuple[float, float]]] = {}
    for x, systems in sorted(points.items(), key=lambda item: float(item[0])):
        for name, point in systems.items():
            if number in point:
                found.setdefault(name, []).append((float(x), point[number]))
    return found


def draw(results: Path, pictures: Path) -> list[Path]:
    """Writes a picture of every part that has a result file; returns their paths."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "curves", "svg.fonttype": "none", "font.family": "sans-serif"}
    written = []
    for part, panels in PANELS.items():
        source = results / f"curves-{part}.json"
        if source.exists():
            written.append(draw_part(json.loads(source.read_text())["points"], panels, pictures / f"{part}.svg"))
    return written


def label_of(name: str) -> str:
    """The name of a variant, with its system as the project writes it."""
    system, _, variant = name.partition(" ")
    return f"{NAMES.get(system, system)} {variant}"


def draw_part(points: Mapping[str, Any], panels: tuple[Panel, ...], path: Path) -> Path:
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.4), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        xs = sorted(map(float, points))
        for name, series in series_of(points, panel.number).items():
            color = next((color for each, color in COLORS.items() if name.startswith(each)), OTHER_COLOR)
            style = "--" if "first start" in name else "-"
            axis.plot(*zip(*series, strict=True), style, marker="o", markersize=4, color=color, label=label_of(name))
        if panel.is_log_x:
            axis.set_xscale("log", base=2)
        if panel.is_log_y:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.set_xticks(xs, [f"{x:,g}" for x in xs])
        axis.minorticks_off()
        axis.set_title(panel.title, fontsize=11, loc="left")
        axis.set_xlabel(panel.x_label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if panel.is_log_y:
            axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
            axis.yaxis.set_minor_formatter(lambda value, _: "")
        axis.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path
