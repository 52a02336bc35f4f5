"""Pages and recurrent states in host memory: of prefixes that the device had to evict."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from torchax_serve.kv_cache.hybrid_cache import HybridCache
from torchax_serve.kv_cache.memory import SNAPSHOT_FRACTION
from torchax_serve.kv_cache.pools import CacheAllocation, PagedCache, is_on_mesh, set_pages
from torchax_serve.scheduler import NULL_PAGE, PageTransfer

PAGES_PER_CALL = 16
"""Pages that one program moves; more are several calls, fewer are padded."""
MAX_PENDING = 4
"""Calls whose pages may be on their way to the host; each holds memory of the device."""

_gather = jax.jit(lambda pools, pages: tuple(pool[pages] for pool in pools))
_set_pages = jax.jit(set_pages, donate_argnums=0, static_argnames="is_on_mesh")


def least_host_bytes(cache: PagedCache) -> int:
    """Returns the bytes of two pages of each layer and of two snapshots, as 0 is not used."""
    pages = 2 * sum(shape.page_bytes(cache.plan.page_size) for shape in cache.plan.shapes)
    return pages + (cache.recurrent.num_bytes(2) if isinstance(cache, HybridCache) else 0)


class HostPools:
    """Pools in host memory by layer, ``[num_host_pages, num_heads, page_size, width]``.

    The operating system gives them memory as pages are first written.

    Pages go to the host while the device computes: they are gathered into arrays of their own, and copied out of these
    when a page is loaded or too many are pending.

    Args:
        cache: Cache of the device.
        plan: Number of host pages of each group, with the groups of `cache`.
        num_snapshots: Number of snapshots of recurrent states, a group behind those of pages; with snapshot 0.
    """

    def __init__(self, cache: PagedCache, plan: CacheAllocation, num_snapshots: int = 1) -> None:
        self._cache, self.plan, self.num_snapshots = cache, plan, num_snapshots
        groups = cache.layout.groups
        self._layers = [[n for n, owner in enumerate(groups) if owner == group] for group in range(len(plan.groups))]
        self._pools = [
            np.zeros(shape.pool_shape(plan.groups[group].num_pages, plan.page_size), shape.dtype)
            for group, shape in zip(groups, plan.shapes, strict=True)
        ]
        self._per_call = [PAGES_PER_CALL] * len(self._layers)
        if isinstance(cache, HybridCache):
            states = cache.recurrent.states
            self._layers.append(list(range(len(self._pools), len(self._pools) + len(states))))
            self._pools += [np.zeros((num_snapshots, *state.shape), state.dtype) for state in states]
            self._per_call.append(1)  # each is as large as hundreds of pages
        self._pending: collections.deque[tuple[int, list[int], tuple[jax.Array, ...]]] = collections.deque()

    @classmethod
    def of_budget(cls, cache: PagedCache, num_bytes: int) -> HostPools:
        """Returns pools that take at most `num_bytes`, which are `least_host_bytes` or more."""
        plan, num_snapshots = cache.plan, 1
        if isinstance(cache, HybridCache):
            each = cache.recurrent.num_bytes(1)
            share = SNAPSHOT_FRACTION if plan.shapes else 1
            room = num_bytes - least_host_bytes(cache) + 2 * each  # that two pages of each layer leave
            num_snapshots += max(1, min(int(num_bytes * share) // each, room // each - 1))
            num_bytes -= num_snapshots * each
        if plan.shapes:
            plan = CacheAllocation.from_budget(plan.shapes, num_bytes, plan.page_size, plan.max_len)
        return cls(cache, plan, num_snapshots)

    def transfer(self, transfers: Sequence[PageTransfer]) -> None:
        """Moves pages, with the result of doing so one after the other."""
        for (group, is_load), same in itertools.groupby(transfers, lambda each: (each.group, each.is_load)):
            pairs = [(each.device_page, each.host_page) for each in same]
            for begin in range(0, len(pairs), self._per_call[group]):
                part = pairs[begin : begin + self._per_call[group]]
                (self._load if is_load else self._offload)(group, part)

    def reset(self) -> None:
        """Drops what is pending, as when the device has lost its pages."""
        self._pending.clear()

    def warm_up(self) -> None:
        """Compiles the programs of each group, with null pages, which nobody reads."""
        for group in range(len(self._layers)):
            self._offload(group, [(NULL_PAGE, NULL_PAGE)])
            self._load(group, [(NULL_PAGE, NULL_PAGE)])

    def _offload(self, group: int, pairs: list[tuple[int, int]]) -> None:
        pages, host_pages = zip(*pairs, strict=True)
        gathered = _gather(self._on_device(group), self._rows(group, pages))
        for array in gathered:
            array.copy_to_host_async()
        self._pending.append((group, list(host_pages), gathered))
        while len(self._pending) > MAX_PENDING:
            self._write_oldest()

    def _write_oldest(self) -> None:
        group, host_pages, gathered = self._pending.popleft()
        for layer, array in zip(self._layers[group], gathered, strict=True):
            for page, values in zip(host_pages, np.asarray(array), strict=False):  # what is behind them is padding
                self._pools[layer][page] = values

    def _load(self, group: int, pairs: list[tuple[int, int]]) -> None:
        while self._pending:
            self._write_oldest()
        last = dict(pairs)  # a page that is a target twice has what came last
        sources = self._padded(group, tuple(last.values()))
        values = tuple(self._pools[layer][sources] for layer in self._layers[group])
        pools = self._on_device(group)
        written = _set_pages(pools, self._rows(group, tuple(last)), values, is_on_mesh=is_on_mesh(pools))
        if self._is_of_pages(group):
            self._cache.set_pages_of_layers(self._layers[group], written)
        else:
            assert isinstance(self._cache, HybridCache)
            self._cache.set_states_of_prefixes(written)

    def _is_of_pages(self, group: int) -> bool:
        return group < len(self.plan.groups)

    def _on_device(self, group: int) -> tuple[jax.Array, ...]:
        if self._is_of_pages(group):
            return self._cache.pages_of_layers(self._layers[group])
        assert isinstance(self._cache, HybridCache)
        return self._cache.states_of_prefixes()

    def _rows(self, group: int, pages: Sequence[int]) -> np.ndarray:
        """Returns the rows of pools in which `pages` of a group are; snapshot i is row -1 - i."""
        padded = self._padded(group, pages)
        return padded if self._is_of_pages(group) else self._on_device(group)[0].shape[0] - 1 - padded

    def _padded(self, group: int, pages: Sequence[int]) -> np.ndarray:
        """Returns int32 of the length of a call: `pages`, the last one repeated."""
        return np.array([*pages, *[pages[-1]] * (self._per_call[group] - len(pages))], np.int32)
