"""`Profile`: the tables of a trace."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from model_adapters.errors import InvalidArgumentError, TorchaxServeError
from torchax_serve.profiling import roofline
from torchax_serve.profiling.bandwidth import Bandwidth, measure_bandwidth
from torchax_serve.profiling.tables import BY, ProfileTable, table_of
from torchax_serve.profiling.trace import Trace


class Profile:
    """What a profile has found; its tables are there once the profile has ended.

    Args:
        weight_bytes: By module, bytes of its own weights that a call reads; None: not known.
        bandwidth: Bandwidth of reads; None: measured when a table needs it.

    Attributes:
        bandwidth: Measured bandwidth of reads.
        measures_bandwidth: Whether tables by module have the part of the bandwidth that was used.
    """

    def __init__(self, weight_bytes: Mapping[str, int | None], bandwidth: Bandwidth | None = None) -> None:
        self._weight_bytes = weight_bytes
        self._trace: Trace | None = None
        self.measures_bandwidth = True
        if bandwidth is not None:
            self.bandwidth = bandwidth

    @functools.cached_property
    def bandwidth(self) -> Bandwidth:
        """Bandwidth of reads, measured at the first use: it takes some seconds and up to 1 GiB."""
        return measure_bandwidth()

    def finish(self, trace: Trace) -> None:
        """Sets the trace that the profile has ended with."""
        self._trace = trace

    @property
    def trace(self) -> Trace:
        """The trace.

        Raises:
            TorchaxServeError: The profile still runs, or has failed.
        """
        if self._trace is None:
            raise TorchaxServeError("expected a profile that has ended, got one that runs; read it behind its block")
        return self._trace

    @property
    def file(self) -> Path:
        """The trace on disk, which XProf, TensorBoard and Perfetto read."""
        return self.trace.file

    @property
    def programs(self) -> tuple[str, ...]:
        """Names of the programs that ran, the longest first."""
        seconds: dict[str, float] = {}
        for time in self.trace.times:
            seconds[time.program] = seconds.get(time.program, 0.0) + time.seconds
        return tuple(sorted(seconds, key=lambda name: -seconds[name]))

    def table(self, by: str = "module", program: str | None = None) -> ProfileTable:
        """Returns times by module, by operation (primitive of JAX) or by kernel.

        Args:
            by: "module", "op" or "kernel".
            program: Name of a program, or its beginning such as ``jit_decode_steps``; None: all.

        Raises:
            InvalidArgumentError: `by` is none of these, or no such program ran.
        """
        if by not in BY:
            raise InvalidArgumentError(f"by: expected one of {', '.join(BY)}, got {by!r}")
        times = self.trace.times
        if program is not None:
            times = tuple(time for time in times if time.program.startswith(program))
            if not times:
                raise InvalidArgumentError(f"program: expected one of {', '.join(self.programs)}, got {program!r}")
        rate = self.bandwidth.bytes_per_s if by == "module" and self.measures_bandwidth else None
        return table_of(times, by, self._weight_bytes, rate)

    def roofline(self) -> roofline.Roofline:
        """Returns times next to what the memory allows.

        On accelerators they are XProf's where it is installed.

        Elsewhere the bound of a module is the bytes of its weights over the measured bandwidth of reads.
        """
        if jax.default_backend() != "cpu" and (found := roofline.by_xprof(self.file)) is not None:
            return found
        return roofline.of_weights(self.table("module"))

    def plot(self, file: str | Path, by: str = "module", program: str | None = None) -> None:
        """Writes a picture of `table` to `file`, in the format of its suffix, such as ``.svg``.

        Raises:
            InvalidArgumentError: matplotlib is not installed, or does not know the suffix; errors of `table`.
        """
        from torchax_serve.profiling.picture import draw

        draw(self.table(by, program), Path(file))

    def as_dict(self, by: str = "module") -> dict[str, Any]:
        """Returns the table as JSON values, with the time in which any instruction ran."""
        return {"span_s": self.trace.span_s, "programs": list(self.programs), **self.table(by).as_dict()}

    def __str__(self) -> str:
        return str(self.table())
