"""Measures the bandwidth of memory, which bounds a step of a model."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.loading.memory import free_host_bytes

BUFFER_BYTES = 2**30  # many times the largest caches
_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """Measured memory bandwidth.

    Attributes:
        bytes_per_s: Rate of the fastest method.
        method: Name of the fastest method.
        tried: Bytes per second of each method.
        buffer_bytes: Bytes read at a time.
    """

    bytes_per_s: float
    method: str
    tried: dict[str, float]
    buffer_bytes: int

    def better(self, other: Bandwidth) -> Bandwidth:
        """Returns the faster of two measurements: other programs can only slow one down."""
        tried = {name: max(rate, other.tried[name]) for name, rate in self.tried.items()}
        return _best(tried, self.buffer_bytes)


def measure_bandwidth(buffer_bytes: int | None = None) -> Bandwidth:
    """Returns the bandwidth of the fastest of several methods on the default device.

    Each method reads a buffer much larger than the caches.

    Args:
        buffer_bytes: Size of the buffer; None for 1 GiB, or a quarter of the free memory if that is less.
    """
    size = min(BUFFER_BYTES, free_host_bytes() // 4) if buffer_bytes is None else buffer_bytes
    if jax.default_backend() != "cpu":
        ways = {"jnp.sum of float32": _jax_sum(jnp.ones(size // 4, jnp.float32))}
        return _measured(ways, size)
    import torch

    buffer = np.ones(size // 4, np.float32)
    tensor, parts = torch.from_numpy(buffer), np.array_split(buffer, num_cores())
    with ThreadPoolExecutor(num_cores()) as threads:
        ways = {
            "jnp.sum of float32": _jax_sum(jnp.asarray(buffer)),
            "torch.sum of float32": lambda: tensor.sum().item(),
            # numpy lets go of the interpreter in a reduction
            f"numpy.max of float32 in {num_cores()} threads": lambda: list(threads.map(np.max, parts)),
        }
        return _measured(ways, size)


def num_cores() -> int:
    """Returns the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _jax_sum(array: jax.Array) -> Callable[[], object]:
    total = jax.jit(jnp.sum)
    return lambda: total(array).block_until_ready()


def _measured(ways: dict[str, Callable[[], object]], size: int) -> Bandwidth:
    return _best({name: size // 4 * 4 / fastest_s(read, _ROUNDS) for name, read in ways.items()}, size)


def _best(tried: dict[str, float], size: int) -> Bandwidth:
    method = max(tried, key=lambda name: tried[name])
    return Bandwidth(tried[method], method, tried, size)


def fastest_s(call: Callable[[], object], rounds: int) -> float:
    """Returns the seconds of the fastest of `rounds` calls, after one that is not counted."""
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
