"""The amount of memory, and the part of it that loading took."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import jax

from model_adapters.errors import OutOfMemoryError


def gigabytes(num_bytes: float) -> str:
    """Returns ``"1.23 GB"`` (10^9 bytes); small amounts are in MB or kB."""
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def _cgroup_free_bytes(root: Path) -> int | None:
    """Returns the bytes that a container's control group still allows; None without a limit."""
    for folder, limit, used, cache in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            allowed, taken = (folder / limit).read_text().strip(), int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        # version 2 says "max" for no limit, version 1 a number near 2**63; pages of files are given back when needed
        if allowed.isdigit() and int(allowed) < 2**60:
            return max(0, int(allowed) - taken + int(stat.get(cache, 0)))
    return None


def free_host_bytes(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the free bytes of main memory for this process.

    They are those of the machine, or of its container if less.
    """
    import psutil  # type: ignore[import-untyped]  # a process that runs a bundle may not have it

    free = psutil.virtual_memory().available
    allowed = _cgroup_free_bytes(cgroup_root)
    return free if allowed is None else min(free, allowed)


def free_device_bytes(device: jax.Device) -> int | None:
    """Returns the free bytes of an accelerator.

    None if its runtime does not report them, and for the CPU.
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def check_fits(weights_bytes: int, largest_bytes: int, *, what: str, device: jax.Device, on_one_device: bool) -> None:
    """Raises `OutOfMemoryError` before anything is read where the weights of `what` cannot fit.

    Args:
        weights_bytes: all weights, in the dtype they will have.
        largest_bytes: the largest single tensor; where weights go to an accelerator the host holds a few of these.
        what: the model's name, for the message.
        device: the default device.
        on_one_device: Whether `device` holds all weights; a caller that places them may spread them over several.
    """
    remedy = "free memory, choose a smaller dtype or a smaller model"
    on_host = device.platform == "cpu"
    free_there = free_device_bytes(device)
    if on_one_device and free_there is not None and weights_bytes > free_there:
        raise OutOfMemoryError(
            f"the weights of {what} need {gigabytes(weights_bytes)}, {device} has {gigabytes(free_there)}: {remedy}"
        )
    needed, free = weights_bytes if on_host else 2 * largest_bytes, free_host_bytes()
    if needed > free:
        raise OutOfMemoryError(
            f"loading {what} needs {gigabytes(needed)} of main memory, {gigabytes(free)} are free: {remedy}"
        )


class PeakMemory:
    """Growth of this process's resident memory since construction.

    `sample()` is to be called where memory is likely to be high.
    """

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._before = self._process.memory_info().rss
        self._high_water_before = _high_water_bytes()
        self._highest = self._before

    def sample(self) -> None:
        """Measures once."""
        self._highest = max(self._highest, self._process.memory_info().rss)

    @property
    def growth_bytes(self) -> int:
        """The highest growth seen; exact on Linux where the process never had more memory than now."""
        self.sample()
        high_water = _high_water_bytes()
        highest = self._highest if high_water <= self._high_water_before else max(self._highest, high_water)
        return highest - self._before


def _high_water_bytes() -> int:
    """Returns the most resident memory this process ever had, as Linux counts it; 0 elsewhere."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc
        return None


def give_back_freed() -> None:
    """Returns free pages within the heap to the system, if the C library can (glibc).

    Merging experts frees thousands of tensors of a few hundred kilobytes each; glibc keeps them, and aligned requests
    do not fit their holes, so that resident memory grew to 1.6 times the checkpoint without this.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
