"""Reads a trace of JAX's profiler: how long each instruction of each program ran."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from torchax_serve.profiling.instructions import Instruction, without_numbers

NS = 1e-9


@dataclasses.dataclass
class InstructionTime:
    """Time of an instruction in a trace.

    Attributes:
        program: Name of its program.
        instruction: The instruction; None if its program is not one of those that were compiled for the profile.
        kernel: What ran.
        num_calls: How often it ran, on all devices together.
        seconds: Time of all calls, without that of instructions that they ran.
    """

    program: str
    instruction: Instruction | None
    kernel: str
    num_calls: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a trace says about instructions.

    Attributes:
        times: By program and instruction.
        span_s: Seconds in which any instruction ran.
        file: The trace, in the format of XProf.
    """

    times: tuple[InstructionTime, ...]
    span_s: float
    file: Path


@dataclasses.dataclass
class _Event:
    """An instruction that ran: its program, its name, its kernel, begin and end in nanoseconds."""

    program: str
    name: str
    kernel: str
    begin: float
    end: float
    inner_ns: float = 0.0  # of instructions that it ran


def read_trace(folder: Path, programs: Mapping[str, Mapping[str, Instruction]]) -> Trace:
    """Reads the newest trace in `folder`.

    Args:
        folder: Where `jax.profiler.start_trace` has written.
        programs: Instructions of each program by name.
    """
    file = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that the format may change
        data = jax.profiler.ProfileData.from_file(str(file))
    lines = [_events(line, plane.name) for plane in data.planes for line in plane.lines]
    found: dict[tuple[str, str], InstructionTime] = {}
    for line in lines:
        _count_nested(line)
        for event in line:
            instruction = programs.get(event.program, {}).get(event.name)
            if instruction is not None and instruction.is_control_flow:
                continue
            kernel = event.kernel or (instruction.kernel if instruction else without_numbers(event.name))
            time = found.setdefault((event.program, event.name), InstructionTime(event.program, instruction, kernel))
            time.num_calls += 1
            time.seconds += (event.end - event.begin - event.inner_ns) * NS
    span_ns = covered(
        (event.begin, event.end) for line in lines for event in line if not _is_control_flow(event, programs)
    )
    return Trace(tuple(found.values()), span_ns * NS, file)


def _is_control_flow(event: _Event, programs: Mapping[str, Mapping[str, Instruction]]) -> bool:
    instruction = programs.get(event.program, {}).get(event.name)
    return instruction is not None and instruction.is_control_flow


def _events(line: Any, plane: str) -> list[_Event]:
    """Returns the events of a line that are instructions, outer ones before those that they ran."""
    found = []
    for event in line.events:
        stats = dict(event.stats)
        name = stats.get("hlo_op")
        if name is None:
            continue
        is_device = plane.startswith("/device:")  # whose events are named after kernels
        begin = float(event.start_ns)
        kernel = event.name if is_device else ""
        found.append(_Event(str(stats.get("hlo_module", "")), str(name), kernel, begin, begin + event.duration_ns))
    return sorted(found, key=lambda event: (event.begin, -event.end))


def _count_nested(events: Iterable[_Event]) -> None:
    """Sets the time that each event of a line spent in events inside of it."""
    outer: list[_Event] = []
    for event in events:
        while outer and outer[-1].end <= event.begin:
            outer.pop()
        if outer:
            outer[-1].inner_ns += min(event.end, outer[-1].end) - event.begin
        outer.append(event)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals, each a begin and an end."""
    total, last_end = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > last_end:
            total += end - max(begin, last_end)
            last_end = end
    return total
