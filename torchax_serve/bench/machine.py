"""Describes the machine of a benchmark: hardware and installed versions."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import platform
from pathlib import Path

import jax
import psutil  # type: ignore[import-untyped]

from torchax_serve import __version__
from torchax_serve.profiling.bandwidth import num_cores

PACKAGES = ("torch", "torchax", "jax", "jaxlib", "transformers", "numpy")
_QUIET_CORES = 0.25


@dataclasses.dataclass(frozen=True)
class Machine:
    """Description of a machine that distinguishes it from others.

    Attributes:
        cores_in_use: Number of cores that other programs used in the second before.
    """

    cpu: str
    num_cores: int
    memory_bytes: int
    device: str
    num_devices: int
    system: str
    versions: dict[str, str]
    date: str
    cores_in_use: float

    @property
    def is_busy(self) -> bool:
        """Whether other programs used so much of the machine that rates are not reliable."""
        return self.cores_in_use > _QUIET_CORES

    @classmethod
    def here(cls) -> Machine:
        """Describes this machine as it is now."""
        devices = jax.devices()
        return cls(
            cpu=_cpu_model(),
            num_cores=num_cores(),
            memory_bytes=psutil.virtual_memory().total,
            device=f"{devices[0].platform}: {devices[0].device_kind}",
            num_devices=len(devices),
            system=platform.platform(),
            versions={"torchax-serve": __version__, "python": platform.python_version()}
            | {name: importlib.metadata.version(name) for name in PACKAGES},
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            cores_in_use=psutil.cpu_percent(interval=1.0) / 100 * (psutil.cpu_count() or 1),
        )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
