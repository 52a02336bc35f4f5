"""What a plan of one forward says: fit, time bound and the compiler's figures."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from torchax_serve.planning.chips import Chip
from torchax_serve.planning.compiled_steps import ProgramReport


@dataclasses.dataclass(frozen=True)
class ForwardPlan(abc.ABC):
    """Result of a plan of one forward; bytes are those of one device."""

    model: str
    class_name: str
    dtype: str
    topology: str
    mesh: Mapping[str, int]
    fits: bool
    memory_bytes: int
    weights_bytes: int
    weights_bytes_of_one_device: int  # of all weights, as if there were one device
    temporary_bytes: int
    step_flops: float  # operations on all devices, by PyTorch's FlopCounterMode, or the compiler where it fails
    bound_s: float | None  # least time by weights read once and operations at peak; None for a CPU
    bound_by: str | None  # "memory" or "compute"
    missing: str | None  # what does not fit
    program: ProgramReport | None  # None if the compiler has run out of the device's memory

    unit: ClassVar[str] = "forward"
    left_out: ClassVar[str] = ""

    @property
    @abc.abstractmethod
    def subject(self) -> str:
        """What is computed."""

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON types."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """Formats the plan as lines: the answer first, then the numbers behind it."""
        used = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items() if size > 1) or "one device"
        found = [
            f"{self.model} ({self.class_name}, {self.dtype}) on {self.topology}: {used}",
            f"{'fits' if self.fits else 'DOES NOT FIT'}: {self.subject}",
            "",
            "each device",
            f"  memory            {_gb(self.memory_bytes)}",
            f"  weights           {_gb(self.weights_bytes)}  of {_gb(self.weights_bytes_of_one_device).strip()} in all",
            f"  temporary         {_gb(self.temporary_bytes)}  temporaries and code of the {self.unit}",
            *([f"  missing           {self.missing}"] if self.missing else []),
            "",
            f"{self.unit}, {self.step_flops / 1e12:.1f} trillion operations",
        ]
        if self.bound_s is not None:
            found.append(f"  no faster than    {1e3 * self.bound_s:>9.2f} ms  bound by {self.bound_by}")
        if self.program is not None:
            found += [
                f"  {kind:<18}{number:>9} of {size / 1e6:.1f} MB"
                for kind, (number, size) in self.program.collectives.items()
            ]
            took = f"{self.program.trace_s:>9.1f} s traced, {self.program.compile_s:.1f} s compiled"
            found.append(f"  compiled in       {took}")
        return [*found, *(["", self.left_out] if self.left_out else [])]


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:>9.2f} GB"


def figures_of(
    chip: Chip, program: ProgramReport | None, missing: str | None, weights_bytes: int, flops: float
) -> dict[str, Any]:
    """Returns the fields of a `ForwardPlan` that follow from its program.

    Args:
        chip: Kind of device.
        program: The compiler's report; None if it has run out of memory, of which `missing` tells.
        missing: What does not fit by the compiler's word.
        weights_bytes: Of one device.
        flops: Of one device.
    """
    temporary = 0 if program is None else program.temporary_bytes + program.code_bytes
    needed = weights_bytes + temporary
    if missing is None and needed > chip.memory_bytes:
        missing = f"{(needed - chip.memory_bytes) / 1e9:.2f} GB; take more devices"
    bound_s = bound_by = None
    if chip.bytes_per_s is not None and chip.flops_per_s is not None:
        memory_s, compute_s = weights_bytes / chip.bytes_per_s, flops / chip.flops_per_s
        bound_s, bound_by = max(memory_s, compute_s), "memory" if memory_s > compute_s else "compute"
    return {
        "fits": missing is None,
        "memory_bytes": chip.memory_bytes,
        "temporary_bytes": temporary,
        "bound_s": bound_s,
        "bound_by": bound_by,
        "missing": missing,
        "program": program,
    }
