"""The pages on the device: pools by layer, sized from the memory there is."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.caches.packed_batch import (
    INDEX_KEYS,
    PagedLayout,
    Pool,
    ScaledPool,
    laid_out,
    pages_of,
    with_pages,
)
from model_adapters.device_arrays import to_device
from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.memory import give_back_freed
from model_adapters.ops.cpu.huge_pages import without_memory
from model_adapters.ops.kv_pool import write_pages
from torchax_serve.scheduler import CacheGroup, PageCopy


@dataclasses.dataclass(frozen=True)
class PagedLayerSpec:
    """Paged cache of a layer, or of its indexer: shape and dtype of a row, and the window."""

    num_heads: int
    width: int  # of a key and a value side by side
    dtype: np.dtype
    window: int | None  # None: full attention
    k_dim: int = 0  # columns of the key, the first of a token's; 0: not needed
    shared_dim: int = 0  # columns of the value that are columns of the key as well, and stored once
    indexed_layer: int | None = None  # place of the layer that keeps this, too; None: keys and values of a layer
    part: str = INDEX_KEYS  # what it is that a layer keeps, too
    row_len: int = 1  # tokens that a row of a page is of

    def page_bytes(self, page_size: int) -> int:
        """Returns the bytes of a page of this layer."""
        return self.num_heads * self.num_rows(page_size) * self.width * self.dtype.itemsize

    def num_rows(self, page_size: int) -> int:
        """Returns the rows of a page of `page_size` tokens."""
        return -(-page_size // self.row_len)

    def pool_shape(self, num_pages: int, page_size: int) -> tuple[int, int, int, int]:
        """Returns the shape of a pool of `num_pages` pages of `page_size` tokens."""
        return num_pages, self.num_heads, self.num_rows(page_size), self.width


@dataclasses.dataclass(frozen=True)
class CacheAllocation:
    """Number of pages of each group of layers, computed before anything is allocated.

    Attributes:
        shapes: Paged cache of each layer, behind them what layers keep besides keys and values, as of indexers.
        groups: Groups of layers that share page ids, one for each sliding window.
        page_size: Number of tokens in a page.
        max_len: Maximum number of tokens of a sequence.
    """

    shapes: tuple[PagedLayerSpec, ...]
    groups: tuple[CacheGroup, ...]
    page_size: int
    max_len: int

    @classmethod
    def from_budget(
        cls, shapes: Sequence[PagedLayerSpec], budget_bytes: int, page_size: int, max_len: int
    ) -> CacheAllocation:
        """Returns the most pages that fit into `budget_bytes`, in the proportions of one sequence.

        Raises:
            InvalidArgumentError: not even a sequence of one page fits.
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
        """Number of tokens that fit at once, by the group that limits it."""
        return min(
            (group.num_pages - 1) * self.page_size
            for group in self.groups
            if group.window is None or self._all_windowed
        )

    @property
    def _all_windowed(self) -> bool:
        return all(group.window is not None for group in self.groups)

    def num_full_length_requests(self, length: int) -> int:
        """Returns the number of requests of `length` tokens that fit at once."""
        return min((group.num_pages - 1) // group.most_pages(length, self.page_size) for group in self.groups)

    @property
    def layout(self) -> PagedLayout:
        """Static layout of the cache for a packed trace."""
        windows = [group.window for group in self.groups]
        return PagedLayout(
            groups=tuple(windows.index(shape.window) for shape in self.shapes),
            windows=tuple(shape.window for shape in self.shapes),
            max_len=self.max_len,
            parts=parts_of(self.shapes),
        )


def parts_of(shapes: Sequence[PagedLayerSpec]) -> tuple[tuple[int, str, int], ...]:
    """Returns what layers keep besides keys and values, as `PagedLayout` has it."""
    return tuple((s.indexed_layer, s.part, place) for place, s in enumerate(shapes) if s.indexed_layer is not None)


COPIES_PER_CALL = 16
"""Pages that one program copies; more are several calls. Each takes microseconds, so that padding costs little."""

HeadScales = tuple[np.ndarray, np.ndarray]
"""Scales of the keys and of the values of a layer in 8 bits, float32[num_heads] each."""


def _name(window: int | None) -> str:
    return "full attention" if window is None else f"window of {window}"


class PoolAllocator:
    """Allocates pools and states and copies pages, on one device or a mesh of this host.

    Args:
        sharding: Returns the sharding of a pool by its number of heads; None: the default device.
        states: Returns the sharding of the states of all slots by their shape; None: the default device.
        recurrent: The same for states of heads or channels, with these behind the slots.
        begins_small: As `without_memory` has it, for pools that hold one conversation: with many layers a short one
            would take 2 MiB in each.
    """

    def __init__(
        self,
        sharding: Callable[[int], jax.sharding.NamedSharding] | None = None,
        states: Callable[[tuple[int, ...]], jax.sharding.NamedSharding] | None = None,
        recurrent: Callable[[tuple[int, ...]], jax.sharding.NamedSharding] | None = None,
        *,
        begins_small: bool = False,
    ) -> None:
        self._sharding, self._begins_small = sharding, begins_small
        self._states, self._recurrent = states, recurrent

    def pool(self, shape: tuple[int, int, int, int], dtype: np.dtype, scales: HeadScales | None) -> Pool:
        """Returns the pool of a layer, all zeros; with `scales` for 8 bits."""
        pages = self.zeros(shape, dtype)
        if scales is None:
            return pages
        if self._sharding is None:
            k_scale, v_scale = (jax.device_put(scale, jax.local_devices()[0]) for scale in scales)
            return ScaledPool(pages, k_scale, v_scale)
        return laid_out(ScaledPool(pages, *scales), self._sharding, jax.device_put)  # type: ignore[arg-type]

    def zeros(self, shape: tuple[int, int, int, int], dtype: np.dtype) -> jax.Array:
        """Returns zeros for a pool ``[num_pages, num_heads, page_size, width]``."""
        if self._sharding is not None:
            return jnp.zeros(shape, dtype, device=self._sharding(shape[1]))
        return _zeros(shape, dtype, begins_small=self._begins_small)

    def slot_states(self, shape: tuple[int, ...], dtype: np.dtype, *, is_of_heads: bool = False) -> jax.Array:
        """Returns zeros for a state of each slot ``[num_slots + 1, ...]``."""
        of_shape = self._recurrent if is_of_heads else self._states
        if of_shape is not None:
            return jnp.zeros(shape, dtype, device=of_shape(shape))
        return _zeros(shape, dtype)

    def copy(self, pools: tuple[jax.Array, ...], sources: Sequence[int], targets: Sequence[int]) -> Any:
        """Copies pages within each pool; `pools` are donated."""
        pairs = to_device(sources, np.int32), to_device(targets, np.int32)
        return _copy_pages(pools, *pairs, is_on_mesh=is_on_mesh(pools))


def _zeros(shape: tuple[int, ...], dtype: np.dtype, *, begins_small: bool = False) -> jax.Array:
    """Zeros on the default device; on a CPU they take memory only as they are written."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return jax.device_put(jnp.zeros(shape, dtype), device)
    zeros = jax.device_put(np.zeros(shape, dtype), device, may_alias=False)  # compiles nothing
    return without_memory(zeros, begins_small=begins_small)


class PagedCache:
    """The pools of a `CacheAllocation`: by layer, ``[num_pages, num_heads, page_size, width]``.

    Args:
        plan: Number of pages of each group.
        pages: Allocator of the pools; None: the default device.
        scales: Scales of each layer if the pools are in 8 bits; those behind them, of indexers and heads, are not.
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
        """Bytes of the states by slot, besides the pages."""
        return 0

    @property
    def num_bytes(self) -> int:
        """Bytes of pages and states."""
        return self.plan.num_bytes + self.state_bytes

    def reset(self) -> None:
        """Allocates the pools again, all zeros; also after a failed step has deleted them."""
        self.pools = ()
        self.pools = tuple(
            self._pages.pool(self._shape(n), shape.dtype, scales)
            for n, (shape, scales) in enumerate(itertools.zip_longest(self.plan.shapes, self._scales or ()))
        )
        give_back_freed()  # zeros that pools were made of

    def free_slot(self, slot: int) -> None:
        """Drops what is kept besides pages of the request that had `slot`, which another one gets."""

    def release(self) -> None:
        """Frees the pools until `reset`."""
        self.pools = ()

    @property
    def is_lost(self) -> bool:
        """Whether a failed step has deleted a donated pool."""
        return any(array.is_deleted() for array in jax.tree.leaves(self.pools))

    def _shape(self, layer: int) -> tuple[int, int, int, int]:
        shape, group = self.plan.shapes[layer], self.plan.groups[self.layout.groups[layer]]
        return shape.pool_shape(group.num_pages, self.plan.page_size)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copies pages; none of the targets, which are new pages, is a source."""
        for group in sorted({copy.group for copy in copies}):
            pairs = [(copy.source, copy.target) for copy in copies if copy.group == group]
            pairs += [(0, 0)] * (-len(pairs) % COPIES_PER_CALL)  # the null page onto itself
            for begin in range(0, len(pairs), COPIES_PER_CALL):
                sources, targets = zip(*pairs[begin : begin + COPIES_PER_CALL], strict=True)
                self._copy_in_group(group, sources, targets)

    def warm_up(self) -> None:
        """Compiles the copying of pages, with the null page of each group."""
        self.copy([PageCopy(group, 0, 0) for group in range(len(self.plan.groups))])

    def _copy_in_group(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        layers = [layer for layer, owner in enumerate(self.layout.groups) if owner == group]
        self.set_pages_of_layers(layers, self._pages.copy(self.pages_of_layers(layers), sources, targets))

    def pages_of_layers(self, layers: Sequence[int]) -> tuple[jax.Array, ...]:
        """Returns the pages of some layers, ``[num_pages, num_heads, page_size, width]`` each."""
        return tuple(pages_of(self.pools[layer]) for layer in layers)

    def set_pages_of_layers(self, layers: Sequence[int], pages: Sequence[jax.Array]) -> None:
        """Replaces the pages of some layers, such as donated ones."""
        pools = list(self.pools)
        for layer, each in zip(layers, pages, strict=True):
            pools[layer] = with_pages(pools[layer], each)
        self.pools = tuple(pools)


def copy_pages(
    pools: tuple[jax.Array, ...], sources: jax.Array, targets: jax.Array, *, is_on_mesh: bool = True
) -> tuple[jax.Array, ...]:
    """Copies the pages at `sources` int32[n] to `targets` int32[n] in each pool; to be traced."""
    return tuple(write_pages(pool, targets, pool[sources], is_on_mesh=is_on_mesh) for pool in pools)


def set_pages(
    pools: tuple[jax.Array, ...], pages: jax.Array, values: tuple[jax.Array, ...], *, is_on_mesh: bool = True
) -> tuple[jax.Array, ...]:
    """Replaces the pages at `pages` int32[n] by the `values` ``[n, ...]`` of each pool.

    It is to be traced.
    """
    pairs = zip(pools, values, strict=True)
    return tuple(write_pages(pool, pages, each, is_on_mesh=is_on_mesh) for pool, each in pairs)


def is_on_mesh(pools: Sequence[jax.Array]) -> bool:
    """Returns whether arrays are on several devices."""
    return any(len(pool.sharding.device_set) > 1 for pool in pools)


_copy_pages = jax.jit(copy_pages, donate_argnums=0, static_argnames="is_on_mesh")
