"""Rows of `types_speed.py`: the file that they are appended to, and the table that they make."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Key = tuple[Any, ...]
MEASURED = "measured"
RATIOS = ("decode", "decode_cpu", "prefill", "prefill_cpu")


def key_of(row: Mapping[str, Any]) -> Key:
    """What a row is of, and the processor that measured it."""
    return row["task"], row["type"], row["dtype"], row["requests"], row["threads"], row.get("processor")


def read(path: Path) -> dict[Key, Row]:
    """The rows of a file; of several with one key the last."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {key_of(row): row for row in map(json.loads, lines)}


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last measured one of rows that differ in the processor alone."""
    return list({key_of(row)[:-1]: row for row in sorted(rows, key=lambda row: row["date"])}.values())


def append(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        print(json.dumps(row), file=file)


def tidy(path: Path) -> None:
    """Writes the file again in order, with the last row of each key."""
    rows = read(path)
    ordered = sorted(rows.values(), key=lambda row: tuple(map(str, key_of(row))))
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in ordered))
    temporary.replace(path)


def ratio(row: Mapping[str, Any], name: str, side: str = "engine") -> float | None:
    """How many times as fast as eager PyTorch a side is; None where that is not known."""
    return ((row.get("ratios") or {}).get(side) or {}).get(name)


def table(rows: Iterable[Row]) -> str:
    """A table in text, the slowest first, and a line for each row that has no ratios."""
    rows = list(rows)
    measured = [row for row in rows if ratio(row, "decode") is not None or ratio(row, "decode", "drop-in") is not None]
    measured.sort(key=lambda row: (ratio(row, "decode_cpu") or 0.0, ratio(row, "decode") or 0.0))
    head = ["type", "kind", "executor", "dtype", "n", "decode tok/s: eager", "engine", "drop-in", "/eager", "cpu"]
    head += ["drop-in/eager", "cpu", "prefill/eager", "cpu", "drop-in", "cpu", "peak MB", "same"]
    lines = [head, *map(_cells, measured)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    for row in rows:
        if row.get("error"):
            shown.append(f"{row['type']} {row['dtype']} {row['requests']}: {row['status']}: {row['error']}")
    return "\n".join(shown)


def _cells(row: Row) -> list[str]:
    sides = row["sides"]
    rates = [_text(sides[name].get("decode_tokens_per_s")) for name in ("eager", "engine", "drop-in")]
    names = [(name, side) for name in ("decode", "prefill") for side in ("engine", "drop-in")]
    of_ratios = [_text(ratio(row, each, side)) for name, side in names for each in (name, f"{name}_cpu")]
    kinds = [row["type"], row["kind"], row["executor"].partition(":")[0], row["dtype"], str(row["requests"])]
    peak = sides["engine"].get("peak_bytes")
    same = str(row["agreement"].get("engine", ""))
    return [*kinds, *rates, *of_ratios, "" if peak is None else f"{peak / 1e6:.0f}", same]


def _text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def slower(rows: Iterable[Row], known: Mapping[Key, Row], part: float) -> dict[Key, str]:
    """What is slower by processor time than `part` of the known ratio, or no longer runs; a line for each.

    Compared are calls for all tokens: differences of short calls are mostly noise.
    """
    found = {}
    for row in rows:
        was = ratio(known.get(key_of(row), {}), "all_cpu")
        now = ratio(row, "all_cpu")
        if was and (now is None or now < part * was):
            what = f"{row['error']}" if now is None else f"{now} times as fast as eager PyTorch"
            found[key_of(row)] = f"{row['task']}:{row['type']}: expected at least {part:g} of {was} times, got {what}"
    return found


def median_by_kind(rows: Sequence[Row], name: str) -> dict[str, float]:
    """The median ratio of each kind."""
    kinds: dict[str, list[float]] = {}
    for row in rows:
        if (value := ratio(row, name)) is not None:
            kinds.setdefault(row["kind"], []).append(value)
    return {kind: round(statistics.median(values), 3) for kind, values in sorted(kinds.items())}
