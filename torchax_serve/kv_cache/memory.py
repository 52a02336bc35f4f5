"""What the two roads of the engine share: sizes, memory, and the result of choosing one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax

from model_adapters.errors import OutOfMemoryError
from model_adapters.loading.memory import free_host_bytes
from torchax_serve.kv_cache.pools import CacheAllocation, PagedLayerSpec

if TYPE_CHECKING:
    pass


HOST_MEMORY_FRACTION = 0.25
"""Part of the free host memory that the cache may take where the host is the device: others live there too."""


DEVICE_MEMORY_FRACTION = 0.9


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """What the engine's options come to for a model; tokens where nothing else is said."""

    max_model_len: int  # of a request
    max_num_seqs: int
    page_size: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int | None  # None: chosen
    max_num_steps: int = 1  # of decoding in one dispatch
    batch_invariant: bool = False
    kv_cache_dtype: str | None = None  # "int8"; None: the model's
    sampler_table_bytes: int = 0  # of the sampler, beside the cache
    max_encoder_len: int = 0  # of an encoder's input; 0 where there is no encoder
    encoder_len_is_default: bool = False  # nobody has asked for it
    source_len: int | None = None  # of every output of an encoder of sounds; None of texts

    def max_usable_bytes(self, shapes: Sequence[PagedLayerSpec]) -> int:
        """Bytes of pages that requests in all slots can use at the most."""
        if not shapes:
            return 0
        plan = CacheAllocation.from_budget(shapes, 1 << 60, self.page_size, self.max_model_len)
        pages = {group.window: group.most_pages(self.max_model_len, self.page_size) for group in plan.groups}
        return sum((pages[s.window] * self.max_num_seqs + 1) * s.page_bytes(self.page_size) for s in shapes)

    def plan(self, shapes: Sequence[PagedLayerSpec], budget_bytes: int) -> CacheAllocation:
        """The most pages in `budget_bytes`; none where nothing is kept in pages."""
        if not shapes:
            return CacheAllocation((), (), self.page_size, self.max_model_len)
        return CacheAllocation.from_budget(shapes, budget_bytes, self.page_size, self.max_model_len)

    def probe_plan(self, shapes: Sequence[PagedLayerSpec], num_pages: int = 8) -> CacheAllocation:
        """A plan of a few pages, to trace, compile or try with."""
        return self.plan(shapes, sum(num_pages * shape.page_bytes(self.page_size) for shape in shapes))

    def choose_cache_bytes(self, useful: int, temporary: Callable[[], int]) -> int:
        """What was asked for, or as much as is of use, or as there is.

        Args:
            useful: bytes that the cache can use at the most.
            temporary: asks the compiler what the largest step takes beside weights and cache.

        Raises:
            OutOfMemoryError: there is no room beside a step.
        """
        if self.kv_cache_memory_bytes is not None:
            return self.kv_cache_memory_bytes
        free = free_bytes() - self.sampler_table_bytes
        if free <= 0:
            raise OutOfMemoryError(
                f"expected memory for the sampler's tables of {self.max_num_seqs} requests, {self.sampler_table_bytes} "
                f"bytes, got {free + self.sampler_table_bytes} bytes; lower max_num_seqs"
            )
        if useful <= free // 8:
            return useful
        taken = temporary()
        if taken >= free:
            raise OutOfMemoryError(
                f"expected memory for a step of {self.max_num_batched_tokens} tokens, which takes "
                f"{taken / 1e6:.0f} MB beside the weights, got {free / 1e6:.0f} MB; lower max_num_batched_tokens or "
                "max_model_len"
            )
        return min(useful, _step_down(free - taken))


def _step_down(num_bytes: int) -> int:
    """At least four fifths of `num_bytes`, and the same for nearly the same: of a host, what is free changes.

    Pools of another size are other programs, so that every start would compile them anew.
    """
    step = max(1, 1 << max(num_bytes.bit_length() - 3, 0))
    return num_bytes // step * step if _device_stats() is None else num_bytes


def _device_stats() -> dict[str, int] | None:
    """Memory of the default device; None where it is the host's."""
    device = jax.local_devices()[0]
    return (device.memory_stats() if device.platform != "cpu" else None) or None


def free_bytes() -> int:
    """Bytes that the cache may take, weights already there."""
    stats = _device_stats()
    if stats is None:
        return int(free_host_bytes() * HOST_MEMORY_FRACTION)
    return int(stats["bytes_limit"] * DEVICE_MEMORY_FRACTION) - stats["bytes_in_use"]
