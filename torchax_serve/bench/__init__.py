"""Speed and memory of a model on JAX, side by side with a peer in one run: what ``torchax-serve bench`` shows."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchax_serve.bench.compare import bench
    from torchax_serve.bench.machine import Bandwidth, Machine, measure_bandwidth
    from torchax_serve.bench.report import BenchReport, Case, Measurement, ModelFacts, Timing
    from torchax_serve.bench.settings import BenchSettings

__all__ = [
    "Bandwidth",
    "BenchReport",
    "BenchSettings",
    "Case",
    "Machine",
    "Measurement",
    "ModelFacts",
    "Timing",
    "bench",
    "measure_bandwidth",
]

_HOME = {
    "Bandwidth": "machine",
    "BenchReport": "report",
    "Case": "report",
    "Machine": "machine",
    "Measurement": "report",
    "ModelFacts": "report",
    "Settings": "settings",
    "Timing": "report",
    "bench": "compare",
    "measure_bandwidth": "machine",
}


def __getattr__(name: str) -> Any:
    # The command line checks `BenchSettings` before torch and jax are imported.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value
