"""Plots the rates of a benchmark by batch size, ours and the peer's."""

from __future__ import annotations

from pathlib import Path

from torchax_serve.bench.report import BenchReport, Measurement
from torchax_serve.profiling.picture import check_plot as check_plot


def plot(report: BenchReport, file: Path) -> None:
    """Writes decode and prefill rates by batch size to `file`, in the format of its suffix.

    Raises:
        InvalidArgumentError: matplotlib is not installed, or does not know the suffix.
    """
    check_plot(file)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    sides: list[list[Measurement]] = [[case.ours for case in report.cases]]
    if report.peer is not None:
        sides.append([case.peer for case in report.cases if case.peer is not None])
    rates = (("decode_tokens_per_s", "decode, tokens/s"), ("prefill_tokens_per_s", "prefill, tokens/s"))
    for axes, (name, title) in zip(figure.subplots(1, len(rates)), rates, strict=True):
        width = 0.8 / len(sides)
        for index, side in enumerate(sides):
            places = [place + width * (index - (len(sides) - 1) / 2) for place in range(len(side))]
            bars = axes.bar(places, [getattr(each, name) for each in side], width, label=side[0].engine)
            axes.bar_label(bars, fmt="%.0f", fontsize=8)
        axes.set_xticks(range(len(report.cases)), [f"batch {case.batch}" for case in report.cases])
        axes.set_title(title)
        axes.legend()
    model = report.model
    figure.suptitle(
        f"{model.architecture} {model.num_parameters / 1e6:.0f} M, {model.dtype}, "
        f"{report.settings.prompt_len} + {report.settings.new_tokens} tokens, "
        f"{report.machine.cpu if report.machine.device.startswith('cpu') else report.machine.device}, "
        f"{report.machine.num_cores} cores",
        fontsize=10,
    )
    figure.savefig(file, dpi=130)
