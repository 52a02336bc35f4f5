"""What is aimed at, and the table of what was found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from generate import with_target

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Target:
    """What is aimed at for ours over what stands beside it, on 2 CPU cores with `TARGET_SHAPE`."""

    number: str
    beside: str
    limit: float
    at_most: bool = False


TARGETS = (
    Target("decode tokens/s", "vllm", 2.0),
    Target("total s", "vllm", 0.7, at_most=True),
    Target("total s", "hf-continuous", 0.4, at_most=True),
    Target("TTFT s of a hit", "its miss", 0.15, at_most=True),
    Target("TPOT s in a flood", "no flood", 2.0, at_most=True),
    Target("KV cache GB", "asked for", 1.02, at_most=True),
    Target("KV cache GB", "at least", 0.98),
)


def judged(row: Row, targets: Sequence[Target]) -> Row:
    """`row` with the target that speaks about its number, and whether it is met; None where there is none."""
    about = [target for target in targets if (target.number, target.beside) == (row["number"], row["beside"])]
    if row["value"] is None or not about:
        return row | {"target": None, "met": None}
    return with_target(row, about[0].limit, at_most=about[0].at_most)


def print_rows(rows: Sequence[Row]) -> None:
    """Prints them as a table."""

    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"

    print(f"{'':28}{'':24}{'ours':>9} {'dtype':20}{'next to it':14}{'dtype':20}{'':>9}{'ratio':>8}  target")
    for row in rows:
        verdict = {None: "", True: "met", False: "MISSED"}[row["met"]]
        print(
            f"{row['case']:28}{row['number']:24}{text(row['ours']):>9} {row.get('dtype', ''):20}"
            f"{row['beside']:14}{row.get('other_dtype', ''):20}{text(row['other']):>9}"
            f" {text(row['value']):>7}  {row['target'] or '':8}{verdict}"
        )
