"""Speed and memory of a model on JAX and of a peer in one run: ``torchax-serve bench``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytree_registry.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from torchax_serve.bench.compare import bench
    from torchax_serve.bench.machine import Machine
    from torchax_serve.bench.report import BenchReport, Case, Measurement, ModelFacts, Timing
    from torchax_serve.bench.settings import BenchSettings
    from torchax_serve.profiling.bandwidth import Bandwidth, measure_bandwidth

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

# The command line checks `BenchSettings` before torch and jax are imported.
__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Bandwidth": "torchax_serve.profiling.bandwidth",
        "BenchReport": ".report",
        "BenchSettings": ".settings",
        "Case": ".report",
        "Machine": ".machine",
        "Measurement": ".report",
        "ModelFacts": ".report",
        "Timing": ".report",
        "bench": ".compare",
        "measure_bandwidth": "torchax_serve.profiling.bandwidth",
    },
)
