"""Memory in huge pages of 2 MiB, where the system has them.

Sequential reads wait at the end of each page for its address translation, which costs a tenth of the time with pages
of 4 KiB (2 cores of Zen 4, reading weights or keys and values).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

import jax
import numpy as np

from model_adapters.device_arrays import XLA_CPU_ALIGNMENT

HUGE_PAGE_BYTES = 2 << 20
_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14
_MADV_COLLAPSE = 25  # of Linux 6.1 and later: copies what is there into huge pages, at once


class HugePages:
    """Allocates huge pages for `num_bytes` bytes of weights that are read one after the other."""

    def __init__(self, num_bytes: int) -> None:
        memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(memory, np.uint8)
        self._next = -self._bytes.ctypes.data % HUGE_PAGE_BYTES

    def take(self, num_bytes: int) -> np.ndarray:
        """Returns the next uint8[num_bytes], aligned to a cache line."""
        begin, self._next = self._next, self._next + num_bytes + -num_bytes % XLA_CPU_ALIGNMENT
        return self._bytes[begin : begin + num_bytes]


def in_huge_pages(array: jax.Array) -> jax.Array:
    """Moves ``array[...]`` on a CPU device into huge pages at its addresses, if possible."""
    _advise(array, _MADV_COLLAPSE)
    return array


def without_memory(zeros: jax.Array) -> jax.Array:
    """Releases the memory of ``zeros[...]`` on a CPU device until it is written.

    Private anonymous memory of a process, as XLA's is, then reads as zeros and is allocated again in huge pages as it
    is written. If the system cannot release it, the array keeps its memory.
    """
    _advise(zeros, _MADV_DONTNEED, _MADV_HUGEPAGE)
    return zeros


def _advise(array: jax.Array, *advice: int) -> None:
    """Calls ``madvise`` on all complete huge pages within `array`, on Linux."""
    array.block_until_ready()  # its memory may not be allocated before
    begin = array.unsafe_buffer_pointer()
    first = begin + -begin % HUGE_PAGE_BYTES
    num_bytes = (begin + array.nbytes - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if sys.platform == "linux" and num_bytes > 0:
        for each in advice:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), each)
