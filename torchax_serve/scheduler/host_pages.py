"""Index of the prefixes that lie in host memory: pages which the device had to evict.

As in vLLM's KV offloading, a page is written to the host when the device evicts it, stays there when it is loaded
again, and goes by least recent use. Host side only: integers; `torchax_serve.kv_cache.host_pools` has the arrays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchax_serve.scheduler.page_pool import NULL_PAGE, check_equal
from torchax_serve.scheduler.prefix_cache import PrefixCache, PrefixNode


class PageTransfer(NamedTuple):
    """Moves a page of a group, in every layer of it, between the device and the host."""

    group: int
    device_page: int
    host_page: int
    is_load: bool  # from the host to the device; False: to the host


class HostPages:
    """Host pages ``1 .. num_pages - 1`` of one cache group, by least recent use.

    Args:
        group: Index of the group.
        num_pages: Number of pages, page 0 included, which is not used.
        index: Index of prefixes; a page in host memory is a use of its node.
        transfers: Transfers of the next plan, in the order in which the device must see them; appended to.
    """

    def __init__(self, group: int, num_pages: int, index: PrefixCache, transfers: list[PageTransfer]) -> None:
        self._group, self._index, self._transfers = group, index, transfers
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._nodes: OrderedDict[int, PrefixNode] = OrderedDict()  # by page, least recently used first
        self.num_offloaded = self.num_loaded = 0

    @property
    def num_used(self) -> int:
        """Number of pages with a prefix."""
        return len(self._nodes)

    def offload(self, device_page: int, node: PrefixNode) -> None:
        """Writes the page of `node` to the host before the device reuses it; not if it is there."""
        page = node.host_pages[self._group]
        if page != NULL_PAGE:
            if page in self._nodes:  # else it is locked
                self._nodes.move_to_end(page)
            return
        if not self._free:
            if not self._nodes:
                return  # all are being loaded
            self._evict(next(iter(self._nodes)))
        page = self._free.pop()
        self._nodes[page] = node
        self._index.hold_on_host(self._group, page, node)
        self._transfers.append(PageTransfer(self._group, device_page, page, is_load=False))
        self.num_offloaded += 1

    def lock(self, nodes: Sequence[PrefixNode]) -> None:
        """Keeps the pages of `nodes` until `load`: none that is offloaded takes their place."""
        for node in nodes:
            del self._nodes[node.host_pages[self._group]]

    def load(self, device_page: int, node: PrefixNode) -> None:
        """Loads a locked page of `node`, which stays in host memory as the one used last."""
        page = node.host_pages[self._group]
        self._nodes[page] = node
        self._transfers.append(PageTransfer(self._group, device_page, page, is_load=True))
        self.num_loaded += 1

    def clear(self) -> None:
        """Removes all prefixes."""
        for page in list(self._nodes):
            self._evict(page)

    def _evict(self, page: int) -> None:
        self._free.append(page)
        self._index.drop_on_host(self._group, page, self._nodes.pop(page))

    def check_integrity(self, nodes: Iterable[PrefixNode]) -> None:
        """Checks the pages against the `nodes` of the index.

        Raises:
            AssertionError: they differ, or a page is lost or held twice.
        """
        held = {page: id(node) for node in nodes if (page := node.host_pages[self._group]) != NULL_PAGE}
        check_equal(f"host pages of group {self._group}", held, {page: id(node) for page, node in self._nodes.items()})
        everything = sorted([*self._free, *self._nodes])
        check_equal("used and free host pages", list(range(1, self.num_pages)), everything)
