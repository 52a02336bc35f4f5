"""Sizes the cache of an engine: how many bytes it may take, and how many pages fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax

from model_adapters.errors import OutOfMemoryError
from model_adapters.loading.memory import free_host_bytes
from torchax_serve.kv_cache.pools import CacheAllocation, PagedLayerSpec
from torchax_serve.sampling.types import MAX_NUM_TOP
from torchax_serve.scheduler import SpeculativeConfig

HOST_MEMORY_FRACTION = 0.25
"""Fraction of the free host memory that the cache may take on a CPU: other processes use that memory, too."""


DEVICE_MEMORY_FRACTION = 0.9
"""Fraction of an accelerator's memory for weights and cache; the rest is for fragmentation and XLA's own buffers."""


SNAPSHOT_FRACTION = 0.25
"""Fraction of the cache, without the states of running requests, that snapshots of recurrent states may take."""


SNAPSHOTS_PER_SLOT = 4
"""Most snapshots of recurrent states for each request at once: each request leaves one or two."""


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """The engine's options resolved for a model. Lengths and sizes are in tokens."""

    max_model_len: int  # prompt and answer of one request
    max_num_seqs: int
    page_size: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int | None  # None: chosen from the free memory
    max_num_steps: int = 1  # decode steps in one dispatch
    batch_invariant: bool = False
    kv_cache_dtype: str | None = None  # "int8" or "fp8"; None: the model's dtype
    speculative: SpeculativeConfig | None = None  # None: no step verifies drafts
    sampler_table_bytes: int = 0  # tables of the sampler, which are not part of the cache
    max_encoder_len: int = 0  # encoder input of one request; 0: no encoder
    encoder_len_is_default: bool = False  # whether the caller left max_encoder_len open
    source_len: int | None = None  # fixed output length of an audio encoder; None: any length
    enable_prefix_caching: bool = True
    num_top: int = MAX_NUM_TOP  # top log-probabilities that programs return

    def max_usable_bytes(self, shapes: Sequence[PagedLayerSpec]) -> int:
        """Returns the bytes of pages needed if every slot holds a request of `max_model_len` tokens."""
        if not shapes:
            return 0
        plan = CacheAllocation.from_budget(shapes, 1 << 60, self.page_size, self.max_model_len)
        pages = {group.window: group.most_pages(self.max_model_len, self.page_size) for group in plan.groups}
        return sum((pages[s.window] * self.max_num_seqs + 1) * s.page_bytes(self.page_size) for s in shapes)

    def plan(self, shapes: Sequence[PagedLayerSpec], budget_bytes: int) -> CacheAllocation:
        """Returns the allocation with the most pages that fit into `budget_bytes`."""
        if not shapes:
            return CacheAllocation((), (), self.page_size, self.max_model_len)
        return CacheAllocation.from_budget(shapes, budget_bytes, self.page_size, self.max_model_len)

    def probe_plan(self, shapes: Sequence[PagedLayerSpec], num_pages: int = 8) -> CacheAllocation:
        """Returns an allocation of a few pages, for tracing, compiling and probes."""
        return self.plan(shapes, sum(num_pages * shape.page_bytes(self.page_size) for shape in shapes))

    def check_states(self, state_bytes: int, budget_bytes: int, share: int = 1) -> None:
        """Raises OutOfMemoryError if all requests' states exceed the cache's memory over `share`."""
        if state_bytes > budget_bytes // share:
            raise OutOfMemoryError(
                f"expected memory for the states of {self.max_num_seqs} requests, {state_bytes} bytes, got "
                f"{budget_bytes} bytes; raise kv_cache_memory_bytes, or lower max_num_seqs"
                + (" or max_encoder_len" if self.max_encoder_len else "")
            )

    def num_snapshots(self, snapshot_bytes: int, budget_bytes: int, *, has_pages: bool) -> int:
        """Returns how many snapshots of recurrent states fit, with the unused snapshot 0.

        Args:
            snapshot_bytes: Bytes of the states of one request.
            budget_bytes: Bytes of the cache that the states of running requests leave.
            has_pages: Whether pages need the rest.
        """
        if not self.enable_prefix_caching:
            return 1
        most = SNAPSHOTS_PER_SLOT * self.max_num_seqs
        room = int(budget_bytes * SNAPSHOT_FRACTION) if has_pages else budget_bytes
        return 1 + min(most, room // snapshot_bytes)

    def choose_cache_bytes(self, useful: int, temporary: Callable[[], int]) -> int:
        """Returns the bytes of the cache: as requested, or as many as can be used, or as are free.

        Args:
            useful: Maximum number of bytes that the cache can use.
            temporary: Returns the temporary bytes of the largest step, by XLA's memory analysis.

        Raises:
            OutOfMemoryError: nothing is left for the cache.
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
    """Rounds host memory down by at most a fifth, so that nearly equal numbers become equal.

    The free memory of a host changes from start to start, and pools of another size would be other programs to compile.
    """
    step = max(1, 1 << max(num_bytes.bit_length() - 3, 0))
    return num_bytes // step * step if _device_stats() is None else num_bytes


def _device_stats() -> dict[str, int] | None:
    """Returns memory statistics of the default device; None for a CPU."""
    device = jax.local_devices()[0]
    return (device.memory_stats() if device.platform != "cpu" else None) or None


class _Sharing:
    """How many models of this process divide the free memory among their caches."""

    num_models = 1


def share_free_memory(num_models: int) -> None:
    """Has each cache that is made from now on take its part of the free memory."""
    _Sharing.num_models = num_models


def free_bytes() -> int:
    """Returns the bytes that the cache may take once the weights are loaded."""
    stats = _device_stats()
    if stats is None:
        return int(free_host_bytes() * HOST_MEMORY_FRACTION) // _Sharing.num_models
    return (int(stats["bytes_limit"] * DEVICE_MEMORY_FRACTION) - stats["bytes_in_use"]) // _Sharing.num_models
