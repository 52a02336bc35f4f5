"""What the C++ products have to know of the numbers of a quantized matrix."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class QuantizedNumbers:
    """What the numbers of a quantized matrix are, and which columns share scales.

    Attributes:
        kind: "int8", "int4", "float8_e4m3fn", or "table" for 4 bits that are places in `table`.
        zero: What is taken from a stored integer of 4 bits.
        group: Columns that share a scale: a multiple of 16, or all and more.
        act_group: Columns of x that are rounded to int8 with one scale: like `group`; 0: x is not rounded.
        table: 16 numbers.
    """

    kind: str
    zero: int
    group: int
    act_group: int
    table: tuple[float, ...] | None = None

    def attributes(self) -> dict[str, Any]:
        """Returns the attributes of a call."""
        numbers = ("int8", "int4", "float8_e4m3fn", "table").index(self.kind)
        table = np.zeros(16, np.float32) if self.table is None else np.asarray(self.table, np.float32)
        of_64_bits = {"numbers": numbers, "zero": self.zero, "group": self.group, "act_group": self.act_group}
        return {name: np.int64(value) for name, value in of_64_bits.items()} | {"table": table}
