"""Memory in pages of 2 MiB: whoever gets some may write it, and arrays stay what and where they are."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from model_adapters.ops.cpu import huge_pages
from model_adapters.ops.cpu.huge_pages import HUGE_PAGE_BYTES, HugePages, in_huge_pages, without_memory


def test_memory_is_handed_out_by_the_line_and_once():
    memory = HugePages(3 * 192)
    parts = [memory.take(size) for size in (192, 100, 192)]
    assert [part.ctypes.data % 64 for part in parts] == [0, 0, 0]
    for value, part in enumerate(parts):
        part[:] = value
    assert [set(part.tolist()) for part in parts] == [{0}, {1}, {2}]


@pytest.mark.parametrize("num_bytes", [1, HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + 4])
def test_an_array_keeps_its_numbers_and_its_place(num_bytes):
    array = jnp.asarray(np.arange(num_bytes, dtype=np.uint32).astype(np.uint8))
    address, expected = array.unsafe_buffer_pointer(), np.array(array)
    moved = in_huge_pages(array)
    assert moved.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(moved, expected)


def test_pages_lie_within_the_array(monkeypatch):
    calls = []

    class System:
        def madvise(self, begin, size, advice):
            calls.append((begin.value, size.value))
            return -1  # refused: nothing changes

    monkeypatch.setattr(huge_pages.ctypes, "CDLL", lambda name: System())
    monkeypatch.setattr(huge_pages.sys, "platform", "linux")
    array = jnp.zeros(3 * HUGE_PAGE_BYTES, jnp.uint8)
    in_huge_pages(array)
    ((begin, size),) = calls
    assert begin % HUGE_PAGE_BYTES == size % HUGE_PAGE_BYTES == 0
    assert array.unsafe_buffer_pointer() <= begin
    assert begin + size <= array.unsafe_buffer_pointer() + array.nbytes
    assert size >= 2 * HUGE_PAGE_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for the memory back")
def test_zeros_take_memory_only_as_they_are_written():
    process, num_bytes = psutil.Process(), 128 << 20
    before = process.memory_info().rss
    zeros = without_memory(jnp.zeros(num_bytes, jnp.uint8))
    assert process.memory_info().rss - before < num_bytes // 4
    written = jax.jit(lambda array: array.at[: 8 << 20].set(7), donate_argnums=0)(zeros)
    written.block_until_ready()
    assert process.memory_info().rss - before < num_bytes // 2
    assert int(written[: 8 << 20].sum(dtype=jnp.int32)) == 7 * (8 << 20)
    assert not written[8 << 20 :].any()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for the memory back")
def test_zeros_of_many_layers_take_no_memory_at_their_ends():
    process, num_bytes = psutil.Process(), 2 * HUGE_PAGE_BYTES - 4096  # less than two complete huge pages
    before = process.memory_info().rss
    pools = [without_memory(jnp.zeros(num_bytes, jnp.uint8)) for _ in range(16)]
    assert process.memory_info().rss - before < 16 * num_bytes // 4
    assert not any(int(pool.max()) for pool in pools)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for the memory back")
def test_what_begins_small_takes_what_is_written_at_its_beginning():
    process, num_bytes = psutil.Process(), 4 * HUGE_PAGE_BYTES
    write = jax.jit(lambda array: array.at[:4096].set(7), donate_argnums=0)
    write(jnp.zeros(num_bytes, jnp.uint8)).block_until_ready()  # compiled before memory is counted
    pools = [without_memory(jnp.zeros(num_bytes, jnp.uint8), begins_small=True) for _ in range(16)]
    before = process.memory_info().rss
    pools = [write(pool) for pool in pools]
    jax.block_until_ready(pools)
    assert process.memory_info().rss - before < 16 * HUGE_PAGE_BYTES // 4
    assert all(int(pool.sum(dtype=jnp.int32)) == 7 * 4096 for pool in pools)
