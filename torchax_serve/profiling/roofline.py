"""How near a profile is to the memory's limit: by XProf, else by the weights' bytes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from torchax_serve.profiling.tables import ProfileTable

XPROF_TOOL = "roofline_model"


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Measured times next to their bounds.

    Attributes:
        source: ``xprof``, or ``weights``: bytes of weights over the measured bandwidth of reads.
        rows: For ``weights``: name of the module, `seconds`, `bound_s` and `of_bound`, the part of the time that the
            bound is. For ``xprof`` the rows of its tool `roofline_model` by the labels of their columns.
    """

    source: str
    rows: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        if not self.rows:
            return f"no operations in the roofline of {self.source}"
        columns = list(self.rows[0])
        lines = [columns, *([_cell(row.get(column)) for column in columns] for row in self.rows)]
        widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )


def of_weights(table: ProfileTable) -> Roofline:
    """Returns the roofline of modules whose weights' bytes are known; a list's layers are a row.

    Args:
        table: By module, with a measured bandwidth.
    """
    rows = []
    for row in table.merged().rows:
        if row.weight_bytes is not None and table.bytes_per_s:
            bound_s = row.weight_bytes / table.bytes_per_s
            rows.append(
                {
                    "module": row.label,
                    "seconds": row.seconds,
                    "bound_s": bound_s,
                    "of_bound": bound_s / row.seconds if row.seconds else None,
                }
            )
    return Roofline("weights", tuple(rows))


def by_xprof(file: Path) -> Roofline | None:
    """Returns XProf's roofline of a trace of an accelerator; None if XProf is not installed.

    XProf counts operations of devices, so that the roofline of a trace of a CPU has no rows.

    Args:
        file: The trace, ``*.xplane.pb``.
    """
    try:
        from xprof.convert import raw_to_tool_data
    except ImportError:
        return None
    data, _ = raw_to_tool_data.xspace_to_tool_data([str(file)], XPROF_TOOL, {"tqx": "out:json;"})
    tables = json.loads(data) if data else []
    return Roofline("xprof", tuple(rows_of(tables[-1] if isinstance(tables, list) and tables else tables)))


def rows_of(table: Any) -> list[dict[str, Any]]:
    """Returns the rows of a table of Google Charts by the labels of their columns."""
    if not isinstance(table, dict):
        return []
    labels = [column.get("label") or column["id"] for column in table.get("cols", ())]
    return [
        {label: cell and cell.get("v") for label, cell in zip(labels, row["c"], strict=False)}
        for row in table.get("rows", ())
    ]


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
