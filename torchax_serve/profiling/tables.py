"""Tables of a profile: time by module, operation or kernel, and bytes of weights."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from model_adapters.program.module_scopes import module_of
from torchax_serve.profiling.trace import InstructionTime

MODEL = "(the model itself)"
"""Name of the row of what the model computes outside of its modules, such as sampling."""
OTHERS = "(other programs)"
"""Name of the row of programs that are not the model's, such as copies of pages."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclasses.dataclass(frozen=True)
class ProfileRow:
    """A row of a table.

    Attributes:
        name: Name of the module as in ``named_modules()``, "" for the model itself, of the primitive or of the kernel;
            None for programs that are not the model's.
        seconds: Time of all calls.
        share: Part of the time of all rows.
        num_calls: How often it ran.
        weight_bytes: Bytes of weights that these calls have read; None where that is not known: what a module looks up
            in a table, experts of which tokens choose some, and rows that are no modules.
        bandwidth_share: These bytes per second over the measured bandwidth; None if either is not known.
    """

    name: str | None
    seconds: float
    share: float
    num_calls: int
    weight_bytes: int | None = None
    bandwidth_share: float | None = None

    @property
    def label(self) -> str:
        """Name for people."""
        return OTHERS if self.name is None else self.name or MODEL


@dataclasses.dataclass(frozen=True)
class ProfileTable:
    """Rows by descending time.

    Attributes:
        by: "module", "op" or "kernel".
        rows: The rows.
        bytes_per_s: Measured bandwidth of reads; None: not measured.
    """

    by: str
    rows: tuple[ProfileRow, ...]
    bytes_per_s: float | None = None

    @property
    def seconds(self) -> float:
        """Time of all rows."""
        return sum(row.seconds for row in self.rows)

    def merged(self) -> ProfileTable:
        """Returns the table with the layers of a list as one row: ``model.layers.*.mlp``."""
        parts: dict[str | None, list[ProfileRow]] = collections.defaultdict(list)
        for row in self.rows:
            is_module = self.by == "module" and row.name is not None
            parts[_NUMBER.sub(".*", row.name or "") if is_module else row.name].append(row)
        return _table(self.by, (_sum_of(name, rows) for name, rows in parts.items()), self.bytes_per_s)

    def as_dict(self) -> dict[str, Any]:
        """Returns the table as JSON values."""
        return {"by": self.by, "bytes_per_s": self.bytes_per_s, "rows": [dataclasses.asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        lines = [("share", "time", "calls", "GB read", "GB/s", "of bandwidth", self.by)]
        for row in self.merged().rows:
            gigabytes = None if row.weight_bytes is None else row.weight_bytes / 1e9
            lines.append(
                (
                    f"{row.share:.1%}",
                    f"{row.seconds * 1e3:.2f} ms",
                    str(row.num_calls),
                    "-" if gigabytes is None else f"{gigabytes:.3f}",
                    "-" if gigabytes is None or not row.seconds else f"{gigabytes / row.seconds:.1f}",
                    "-" if row.bandwidth_share is None else f"{row.bandwidth_share:.0%}",
                    row.label,
                )
            )
        widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]) - 1)]
        return "\n".join(
            "  ".join([*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[-1]])
            for line in lines
        )


BY = ("module", "op", "kernel")
"""What a table may be by."""


def table_of(
    times: Iterable[InstructionTime],
    by: str,
    weight_bytes: Mapping[str, int | None],
    bytes_per_s: float | None,
) -> ProfileTable:
    """Returns the table of instructions.

    Args:
        times: Times of instructions.
        by: One of `BY`.
        weight_bytes: By module, bytes of its own weights that a call reads; None: not known. Has every module.
        bytes_per_s: Measured bandwidth.
    """
    name_of: Callable[[InstructionTime], str | None] = {
        "module": lambda time: time.instruction and module_of(time.instruction.scopes, weight_bytes),
        "op": lambda time: (time.instruction and time.instruction.primitive) or time.kernel,
        "kernel": lambda time: time.kernel,
    }[by]
    groups: dict[str | None, list[InstructionTime]] = collections.defaultdict(list)
    for time in times:
        groups[name_of(time)].append(time)
    rows = []
    for name, group in groups.items():
        # A module ran as often as the instruction of it that ran most in each program.
        most: dict[str, int] = collections.defaultdict(int)
        for time in group:
            most[time.program] = max(most[time.program], time.num_calls)
        num_calls = sum(most.values()) if by == "module" else sum(time.num_calls for time in group)
        own = weight_bytes.get(name) if by == "module" and name is not None else None
        rows.append(
            ProfileRow(
                name=name,
                seconds=sum(time.seconds for time in group),
                share=0.0,
                num_calls=num_calls,
                weight_bytes=own * num_calls if own else None,
            )
        )
    return _table(by, rows, bytes_per_s)


def _sum_of(name: str | None, rows: list[ProfileRow]) -> ProfileRow:
    known = [row.weight_bytes for row in rows if row.weight_bytes is not None]
    return ProfileRow(
        name=name,
        seconds=sum(row.seconds for row in rows),
        share=0.0,
        num_calls=sum(row.num_calls for row in rows),
        weight_bytes=sum(known) if len(known) == len(rows) else None,
    )


def _table(by: str, rows: Iterable[ProfileRow], bytes_per_s: float | None) -> ProfileTable:
    """Returns the table of rows, with their shares."""
    ordered = sorted(rows, key=lambda row: -row.seconds)
    total = sum(row.seconds for row in ordered)
    complete = []
    for row in ordered:
        rate = row.weight_bytes / row.seconds if row.weight_bytes is not None and row.seconds else None
        complete.append(
            dataclasses.replace(
                row,
                share=row.seconds / total if total else 0.0,
                bandwidth_share=rate / bytes_per_s if rate is not None and bytes_per_s else None,
            )
        )
    return ProfileTable(by, tuple(complete), bytes_per_s)
