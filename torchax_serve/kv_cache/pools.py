"""The pages on the device: pools by layer, sized from the memory there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.bridge.host_arrays import to_device
from model_adapters.caches.paged_cache import Int8Pool, PagedLayout, Pool, laid_out, pages_of, with_pages
from model_adapters.errors import InvalidArgumentError
from model_adapters.ops.cpu.huge_pages import without_memory
from torchax_serve.scheduler import CacheGroup, PageCopy


@dataclasses.dataclass(frozen=True)
class PagedLayerSpec:
    """What one attention layer keeps of a token, and how far back it looks."""

    num_heads: int
    width: int  # of a key and a value side by side
    dtype: np.dtype
    window: int | None  # None: full attention

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of this layer."""
        return self.num_heads * page_size * self.width * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class CacheAllocation:
    """How much of what: made from a budget, before anything is allocated.

    Attributes:
        shapes: by layer.
        groups: layers that share page ids, one for each window.
        page_size: tokens of a page.
        max_len: tokens of a sequence at the most.
    """

    shapes: tuple[PagedLayerSpec, ...]
    groups: tuple[CacheGroup, ...]
    page_size: int
    max_len: int

    @classmethod
    def from_budget(
        cls, shapes: Sequence[PagedLayerSpec], budget_bytes: int, page_size: int, max_len: int
    ) -> CacheAllocation:
        """The most pages in `budget_bytes`, groups in the proportion in which a sequence of `max_len` needs them.

        Raises:
            InvalidArgumentError: there is not even room for one sequence of a page.
        """
        windows = sorted({shape.window for shape in shapes}, key=lambda window: (window is not None, window or 0))
        probe = [CacheGroup(_name(window), window, 2) for window in windows]
        needs = [group.most_pages(max_len, page_size) for group in probe]
        page_bytes = [
            sum(shape.page_bytes(page_size) for shape in shapes if shape.window == window) for window in windows
        ]
        unit = sum(need * size for need, size in zip(needs, page_bytes, strict=True))  # a sequence of max_len
        least = sum(2 * size for size in page_bytes)
        if budget_bytes < least:
            raise InvalidArgumentError(
                f"expected room for at least two pages in each of {len(windows)} groups of layers ({least} bytes), got "
                f"{budget_bytes} bytes; raise kv_cache_memory_bytes, or lower page_size"
            )
        counts = [2 + int((budget_bytes - least) * need / unit) for need in needs]
        # What rounding left goes to the group with the smallest pages.
        left = budget_bytes - sum(n * size for n, size in zip(counts, page_bytes, strict=True))
        smallest = page_bytes.index(min(page_bytes))
        counts[smallest] += left // page_bytes[smallest]
        groups = tuple(CacheGroup(_name(w), w, n) for w, n in zip(windows, counts, strict=True))
        return cls(tuple(shapes), groups, page_size, max_len)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        pages = {group.window: group.num_pages for group in self.groups}
        return sum(pages[shape.window] * shape.page_bytes(self.page_size) for shape in self.shapes)

    @property
    def num_tokens(self) -> int:
        """Tokens that the group with the fewest pages for its need can hold."""
        return min(
            (group.num_pages - 1) * self.page_size for group in self.groups if group.window is None or self._only
        )

    @property
    def _only(self) -> bool:
        return all(group.window is not None for group in self.groups)

    def num_full_length_requests(self, length: int) -> int:
        """Requests of `length` tokens that fit at once."""
        return min((group.num_pages - 1) // group.most_pages(length, self.page_size) for group in self.groups)

    @property
    def layout(self) -> PagedLayout:
        """What a packed trace has to know."""
        windows = [group.window for group in self.groups]
        return PagedLayout(
            groups=tuple(windows.index(shape.window) for shape in self.shapes),
            windows=tuple(shape.window for shape in self.shapes),
            max_len=self.max_len,
        )


HeadScales = tuple[np.ndarray, np.ndarray]
"""Of a layer in int8, float32[num_heads] each: what a step of its keys and of its values stands for."""


def _name(window: int | None) -> str:
    return "full attention" if window is None else f"window of {window}"


class PoolAllocator:
    """Makes pools, copies pages and makes states, on one device or a mesh of this host.

    Args:
        sharding: of a pool with so many heads; None: on the default device.
        states: of the states of all slots, by their shape; None: on the default device.
    """

    def __init__(
        self,
        sharding: Callable[[int], jax.sharding.NamedSharding] | None = None,
        states: Callable[[tuple[int, ...]], jax.sharding.NamedSharding] | None = None,
    ) -> None:
        self._sharding, self._states = sharding, states

    def pool(self, shape: tuple[int, int, int, int], dtype: np.dtype, scales: HeadScales | None) -> Pool:
        """A layer's pool, all zeros; `scales` where it is in int8."""
        pages = self.zeros(shape, dtype)
        if scales is None:
            return pages
        if self._sharding is None:
            k_scale, v_scale = (jax.device_put(scale, jax.local_devices()[0]) for scale in scales)
            return Int8Pool(pages, k_scale, v_scale)
        return laid_out(Int8Pool(pages, *scales), self._sharding, jax.device_put)  # type: ignore[arg-type]

    def zeros(self, shape: tuple[int, int, int, int], dtype: np.dtype) -> jax.Array:
        """A pool ``[num_pages, num_heads, page_size, width]``."""
        if self._sharding is not None:
            return jnp.zeros(shape, dtype, device=self._sharding(shape[1]))
        return _zeros(shape, dtype)

    def slot_states(self, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        """A state of one shape for each slot ``[num_slots + 1, ...]``."""
        if self._states is not None:
            return jnp.zeros(shape, dtype, device=self._states(shape))
        return _zeros(shape, dtype)

    def copy(self, pools: tuple[jax.Array, ...], sources: Sequence[int], targets: Sequence[int]) -> Any:
        """`pools`, which are given away, with pages copied in each."""
        return _copy_pages(pools, to_device(sources, np.int32), to_device(targets, np.int32))


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Zeros on the default device; on a CPU they take memory only as they are written."""
    made = jax.device_put(jnp.zeros(shape, dtype), jax.local_devices()[0])
    return without_memory(made) if made.platform() == "cpu" else made


class PagedCache:
    """The pools of a `CacheAllocation`: by layer, ``[num_pages, num_heads, page_size, width]``.

    Args:
        plan: how many pages of what.
        pages: makes them; None: on the default device.
        scales: by layer, of pools in int8.
    """

    def __init__(
        self, plan: CacheAllocation, pages: PoolAllocator | None = None, scales: Sequence[HeadScales] | None = None
    ) -> None:
        self.plan = plan
        self._pages = pages or PoolAllocator()
        self._scales = scales
        self.layout = plan.layout
        self.pages_per_seq = -(-plan.max_len // plan.page_size)
        self.pools: tuple[Pool, ...] = ()
        self.reset()

    @property
    def state_bytes(self) -> int:
        """Bytes of what is kept by slot beside the pages."""
        return 0

    def reset(self) -> None:
        """Makes the pools anew, all zeros: also after a step has failed and taken them with it."""
        self.pools = ()
        self.pools = tuple(
            self._pages.pool(self._shape(n), shape.dtype, None if self._scales is None else self._scales[n])
            for n, shape in enumerate(self.plan.shapes)
        )

    @property
    def is_lost(self) -> bool:
        """Whether a pool has been given to a step that did not give it back."""
        return any(array.is_deleted() for array in jax.tree.leaves(self.pools))

    def _shape(self, layer: int) -> tuple[int, int, int, int]:
        shape, group = self.plan.shapes[layer], self.plan.groups[self.layout.groups[layer]]
        return group.num_pages, shape.num_heads, self.plan.page_size, shape.width

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copies pages, all at once as if every source were read first."""
        for group in sorted({copy.group for copy in copies}):
            pairs = [(copy.source, copy.target) for copy in copies if copy.group == group]
            pairs += [(0, 0)] * (_power_of_two(len(pairs)) - len(pairs))  # the null page onto itself
            sources, targets = zip(*pairs, strict=True)
            layers = [layer for layer, owner in enumerate(self.layout.groups) if owner == group]
            copied = self._pages.copy(tuple(pages_of(self.pools[layer]) for layer in layers), sources, targets)
            pools = list(self.pools)
            for layer, pages in zip(layers, copied, strict=True):
                pools[layer] = with_pages(pools[layer], pages)
            self.pools = tuple(pools)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def copy_pages(pools: tuple[jax.Array, ...], sources: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
    """To be traced: each pool with the pages int32[n] at `sources` copied to `targets`."""
    return tuple(pool.at[targets].set(pool[sources]) for pool in pools)


_copy_pages = jax.jit(copy_pages, donate_argnums=0)
