"""Speed and memory of a model on JAX, side by side with a peer in one run: what ``torchax-serve bench`` shows."""

from torchax_serve.bench.compare import bench
from torchax_serve.bench.machine import Bandwidth, Machine, measure_bandwidth
from torchax_serve.bench.report import BenchReport, Case, Measurement, ModelFacts, Timing
from torchax_serve.bench.settings import Settings

__all__ = [
    "Bandwidth",
    "BenchReport",
    "Case",
    "Machine",
    "Measurement",
    "ModelFacts",
    "Settings",
    "Timing",
    "bench",
    "measure_bandwidth",
]
