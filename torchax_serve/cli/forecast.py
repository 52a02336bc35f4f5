"""``torchax-serve forecast``: what comes behind the numbers of a file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any

import typer

from model_adapters.errors import InvalidArgumentError
from torchax_serve.cli.shared.command import Command
from torchax_serve.cli.shared.load_options import LoadOptions, option_groups
from torchax_serve.cli.shared.model_name import complete_model
from torchax_serve.cli.shared.result_files import check_files, model_with, print_rows

NUM_SHOWN = 200
"""Values in front of a forecast that its picture shows."""


@option_groups
def forecast(
    model: Annotated[str, typer.Argument(help="Hub id or folder.", autocompletion=complete_model)],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="CSV, or a number a line; the newest last.")],
    *,
    column: Annotated[
        str | None, typer.Option("--column", show_default=False, help="Name of the CSV's column; the last without.")
    ] = None,
    horizon: Annotated[
        int | None, typer.Option("--horizon", min=1, show_default=False, help="Number of values; the model's most.")
    ] = None,
    frequency: Annotated[
        int | None,
        typer.Option(
            "--frequency", min=0, max=2, show_default=False, help="0: up to a day, 1: weeks, months, 2: longer."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", show_default=False, help="Picture of both.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of a line for each value.")] = False,
    load: LoadOptions,
) -> None:
    """Forecast a series of numbers; a line has the mean, and the lowest and highest quantile.

    torchax-serve forecast google/timesfm-2.0-500m-pytorch sales.csv --column sold --output sales.png
    """
    check_files([file])
    series = numbers_of(file, column)
    if output is not None:
        from torchax_serve.profiling.picture import check_plot

        check_plot(output)
    with model_with(("forecast",), "forecast", model, load) as (served, _):
        found = served.forecast(series, horizon=horizon, frequency=frequency)
    rows = [
        {"mean": float(mean), "quantiles": dict(zip(map(str, found.levels), map(float, each), strict=True))}
        for mean, each in zip(found.mean, found.quantiles, strict=True)
    ]
    lines = [f"{mean:.6g} {each[0]:.6g} {each[-1]:.6g}" for mean, each in zip(found.mean, found.quantiles, strict=True)]
    print_rows(rows, lines, as_json=as_json)
    if output is not None:
        _draw(series, found, output)


def numbers_of(path: Path, column: str | None) -> list[float]:
    """Returns the numbers in a column of a file.

    Args:
        path: CSV with or without names in its first line; a file with a number a line is one with one column.
        column: Name of the column; None: the last one.

    Raises:
        InvalidArgumentError: it is no such file, or a line has no number there.
    """
    try:
        rows = [row for row in csv.reader(path.read_text("utf-8-sig").splitlines()) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidArgumentError(f"FILE: expected lines of text, got {path}, which is none ({error})") from error
    names = rows[0] if rows and _number(rows[0][-1]) is None else []
    if column is not None and column not in names:
        known = f"one of {', '.join(names)}" if names else "none for a file without names in its first line"
        raise InvalidArgumentError(f"--column: expected {known}, got {column}")
    place = -1 if column is None else names.index(column)
    found = []
    for number, row in enumerate(rows[bool(names) :], 1 + bool(names)):
        text = row[place] if len(row) > place else ""
        value = _number(text)
        if value is None:
            raise InvalidArgumentError(
                f"FILE: expected a number in line {number} of {path}, got {text!r}; fill gaps first"
            )
        found.append(value)
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _draw(series: list[float], found: Any, output: Path) -> None:
    from matplotlib.figure import Figure

    shown, first = series[-NUM_SHOWN:], len(series)
    before, behind = range(first - len(shown), first), range(first, first + len(found.mean))
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="value", title=f"{len(found.mean)} values behind {first}")
    axes.plot(before, shown, label="series")
    axes.plot(behind, found.mean, label="forecast")
    low, high = found.quantiles[:, 0], found.quantiles[:, -1]
    axes.fill_between(behind, low, high, alpha=0.25, label=f"{found.levels[0]:g} to {found.levels[-1]:g}")
    axes.legend()
    figure.savefig(output)


COMMAND = Command("forecast", forecast, position=25)
