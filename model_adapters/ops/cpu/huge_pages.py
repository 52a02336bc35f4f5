"""Memory in pages of 2 MiB, where the system has them.

A stream of memory stops at the end of each page to look the next one up, which costs a tenth of the time with pages of
4 KiB (2 cores of Zen 4, reading weights or keys and values).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

import jax
import numpy as np

from model_adapters.bridge.host_arrays import XLA_CPU_ALIGNMENT

HUGE_PAGE_BYTES = 2 << 20
_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14
_MADV_COLLAPSE = 25  # of Linux 6.1 and later: copies what is there into huge pages, at once


class HugePages:
    """Memory for `num_bytes` bytes of weights that are read one behind the other, in such pages."""

    def __init__(self, num_bytes: int) -> None:
        memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # no Linux, or pages of one size alone
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(memory, np.uint8)
        self._next = -self._bytes.ctypes.data % HUGE_PAGE_BYTES

    def take(self, num_bytes: int) -> np.ndarray:
        """The next uint8[num_bytes], at the beginning of a line of the cache."""
        begin, self._next = self._next, self._next + num_bytes + -num_bytes % XLA_CPU_ALIGNMENT
        return self._bytes[begin : begin + num_bytes]


def in_huge_pages(array: jax.Array) -> jax.Array:
    """`array`, on one CPU device, moved into such pages at its own addresses; as it was, where the system refuses."""
    _advise(array, _MADV_COLLAPSE)
    return array


def without_memory(zeros: jax.Array) -> jax.Array:
    """`zeros`, an array of zeros on one CPU device, with its memory given back to the system until it is written.

    Memory of a process that is private and anonymous, as XLA's is, reads as zeros after that, and comes back in huge
    pages, part by part. Where the system refuses, the array keeps its memory.
    """
    _advise(zeros, _MADV_DONTNEED, _MADV_HUGEPAGE)
    return zeros


def _advise(array: jax.Array, *advice: int) -> None:
    """Tells Linux about all whole huge pages within `array`; other systems are told nothing."""
    array.block_until_ready()  # nothing is there before it is written
    begin = array.unsafe_buffer_pointer()
    first = begin + -begin % HUGE_PAGE_BYTES
    num_bytes = (begin + array.nbytes - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if sys.platform == "linux" and num_bytes > 0:
        for each in advice:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), each)
