"""Picture of a profile's table: time by row, the part that bandwidth explains darker."""

from __future__ import annotations

from pathlib import Path

from model_adapters.errors import InvalidArgumentError
from torchax_serve.profiling.tables import ProfileTable
from torchax_serve.validation.extras import require_matplotlib

MAX_ROWS = 24
"""Bars of a picture; the rest is one more."""


def check_plot(file: Path) -> None:
    """Raises `InvalidArgumentError` if no plot can be written to `file`.

    Call it before hours of work.
    """
    require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    endings = sorted(FigureCanvasBase.filetypes)
    if file.suffix.removeprefix(".").lower() not in endings:
        raise InvalidArgumentError(f"the plot's name is {file}, expected one that ends in {', '.join(endings)}")
    if not file.absolute().parent.is_dir():
        raise InvalidArgumentError(f"there is no folder {file.absolute().parent} for the plot; make it first")


def draw(table: ProfileTable, file: Path) -> None:
    """Writes a bar for each row of `table` to `file`, in the format of its suffix.

    Raises:
        InvalidArgumentError: matplotlib is not installed, or does not know the suffix.
    """
    check_plot(file)
    from matplotlib.figure import Figure

    rows = table.merged().rows
    shown, rest = rows[:MAX_ROWS], rows[MAX_ROWS:]
    bars = [(row.label, row.seconds, (row.bandwidth_share or 0.0) * row.seconds) for row in shown]
    if rest:
        bars.append((f"{len(rest)} more", sum(row.seconds for row in rest), 0.0))
    figure = Figure(figsize=(10, 1.2 + 0.28 * len(bars)), layout="constrained")
    axes = figure.subplots()
    names = [name for name, _, _ in bars]
    drawn = axes.barh(names, [seconds * 1e3 for _, seconds, _ in bars], color="#9ecae1", label="time")
    if any(bound for _, _, bound in bars):
        axes.barh(names, [bound * 1e3 for _, _, bound in bars], color="#3182bd", label="weights' bytes over bandwidth")
        axes.legend(loc="lower right")
    total = table.seconds
    axes.bar_label(drawn, [f"{seconds / total:.1%}" for _, seconds, _ in bars], fontsize=8, padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.margins(x=0.12)
    figure.savefig(file, dpi=130)
