"""Memory in huge pages of 2 MiB, where the system has them.

Sequential reads wait at the end of each page for its address translation, which costs a tenth of the time with pages
of 4 KiB (2 cores of Zen 4, reading weights or keys and values).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from pathlib import Path

import jax
import numpy as np

from model_adapters.device_arrays import XLA_CPU_ALIGNMENT

HUGE_PAGE_BYTES = 2 << 20
_MADV_DONTNEED, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 4, 14, 15
_MREMAP_TO = 1 | 2  # may move, to a fixed address
_FAILED = ctypes.c_void_p(-1).value
MOVED_BYTES = 8 << 20
"""Number of bytes that `move_into_huge_pages` copies at once, which are in memory twice meanwhile."""
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


def move_into_huge_pages(mapped: np.ndarray) -> int:
    """Replaces the pages of a mapped file, uint8[n], by huge pages with the same content.

    Nobody may write to them.

    Addresses stay, and other threads may read meanwhile: the system exchanges pages under its lock.

    Returns:
        Number of bytes that are in huge pages now; 0 where the system has none.
    """
    if sys.platform != "linux" or "[never]" in _huge_page_setting():
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    begin = mapped.ctypes.data + -mapped.ctypes.data % HUGE_PAGE_BYTES
    end = (mapped.ctypes.data + mapped.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    for address in range(begin, end, MOVED_BYTES):
        if not _exchange(libc, address, min(MOVED_BYTES, end - address)):
            return address - begin
    return max(0, end - begin)


def _huge_page_setting() -> str:
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "[never]"


def _exchange(libc: ctypes.CDLL, address: int, num_bytes: int) -> bool:
    """Exchanges complete huge pages at `address`; returns False if the system refuses."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    size = num_bytes + HUGE_PAGE_BYTES
    memory = libc.mmap(None, ctypes.c_size_t(size), protection, flags, -1, ctypes.c_long(0))
    if memory in (None, _FAILED):
        return False
    first = memory + -memory % HUGE_PAGE_BYTES
    libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), _MADV_HUGEPAGE)
    ctypes.memmove(first, address, num_bytes)
    amount = ctypes.c_size_t(num_bytes)
    moved = libc.mremap(ctypes.c_void_p(first), amount, amount, _MREMAP_TO, ctypes.c_void_p(address))
    rest = [(memory, first - memory), (first + num_bytes, memory + size - first - num_bytes)]
    if moved != address:
        rest = [(memory, size)]
    for begin, length in rest:
        if length:
            libc.munmap(ctypes.c_void_p(begin), ctypes.c_size_t(length))
    return bool(moved == address)


def in_huge_pages(array: jax.Array) -> jax.Array:
    """Moves ``array[...]`` on a CPU device into huge pages at its addresses, if possible."""
    _advise(array, _MADV_COLLAPSE, HUGE_PAGE_BYTES)
    return array


def without_memory(zeros: jax.Array, *, begins_small: bool = False) -> jax.Array:
    """Releases the memory of ``zeros[...]`` on a CPU device until it is written.

    Private anonymous memory of a process, as XLA's is, then reads as zeros and is allocated again in huge pages as it
    is written. If the system cannot release it, the array keeps its memory.

    Args:
        zeros: The array.
        begins_small: Whether to leave the first huge page's worth of it in small pages: a write there then takes a few
            kilobytes instead of 2 MiB.
    """
    _advise(zeros, _MADV_DONTNEED, mmap.PAGESIZE)  # the ends as well: a model has a pool for each layer
    if begins_small:
        _advise(zeros, _MADV_NOHUGEPAGE, mmap.PAGESIZE)  # where all memory is in huge pages
    _advise(zeros, _MADV_HUGEPAGE, HUGE_PAGE_BYTES, skipped_bytes=HUGE_PAGE_BYTES if begins_small else 0)
    return zeros


def _advise(array: jax.Array, advice: int, page_bytes: int, *, skipped_bytes: int = 0) -> None:
    """Calls ``madvise`` on all complete pages of `page_bytes` within `array`, on Linux.

    The first `skipped_bytes` of it stay as they are.
    """
    array.block_until_ready()  # its memory may not be allocated before
    begin = array.unsafe_buffer_pointer()
    first = begin + skipped_bytes
    first += -first % page_bytes
    num_bytes = (begin + array.nbytes - first) // page_bytes * page_bytes
    if sys.platform == "linux" and num_bytes > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), advice)
