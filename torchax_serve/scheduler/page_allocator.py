"""Allocates pages: which page holds which positions of a slot, in all groups of layers.

Host side only: integers. Prefix sharing by chains of full pages is vLLM's automatic prefix caching; that layers with a
window need but the end of a prefix is from its hybrid cache, and that evicted pages go to host memory from its KV
offloading; copy-on-write forks are from the PagedAttention paper (Kwon et al., 2023).

The life of a page. Its id is in one of three states of `PagePool`::

    free --allocate--> used --last reference freed, no prefix----> free
                       used --last reference freed, with prefix--> idle --prefix hit (share)--> used
                                                                   idle --allocate (evict)----> used, for other tokens

* When a step is planned, `allocate_slot`, `fork` and `grow_all` take pages and write their ids into the page table.
  Each sequence with the page in its table holds one reference.
* When a step is committed, `publish_prefix` gives full pages a prefix. So later requests find computed pages only,
  never one that a plan in flight has still to write.
* `release` gives back all pages of a sequence that has ended or is preempted, `shrink` those of rejected drafts,
  `publish_prefix` those behind a window. `release` is called once no plan in flight has a row of the sequence
  (`RequestQueues`): the device writes to the pages until then.
* An idle page is evicted when no page is free, the one that has been idle longest first. If there are host pages its
  keys and values go there, by a transfer in front of the rows of the plan that uses the page again.

Invariant: the references of a page are its occurrences in the tables, a page is in exactly one state, and the null page
in none (`check_integrity`).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from torchax_serve.outputs import GroupUsage
from torchax_serve.scheduler.block_events import BlockEventLog
from torchax_serve.scheduler.config import SchedulerConfig
from torchax_serve.scheduler.host_pages import HostPages, PageTransfer
from torchax_serve.scheduler.page_pool import NULL_PAGE, PageCopy, PagePool, check_equal
from torchax_serve.scheduler.prefix_cache import PageHash, PrefixCache, PrefixNode, page_hash
from torchax_serve.scheduler.state_snapshots import SequenceStates, StateSnapshots


@dataclasses.dataclass(slots=True, eq=False)
class SequencePages:
    """The pages of the sequence in a slot. Their ids are in row `slot` of the page tables."""

    slot: int
    salt: str
    first_needed_page: list[int]  # by group, index of the first page that is not behind the window
    num_pages: int = 0  # entries of the page table, the same in all groups
    num_published: int = 0  # full pages that have been entered into the prefix index, or were found there
    node: PrefixNode | None = None  # the last of those; None: the sequence shares nothing
    states: SequenceStates | None = None  # None: it keeps and reads no snapshots of recurrent states

    def pages_missing(self, config: SchedulerConfig, length: int) -> list[int]:
        """Returns, by group, the pages still needed to reach `length` tokens one by one."""
        grown = -(-length // config.page_size) - self.num_pages
        return [
            min(grown, max(1, group.most_pages(length, config.page_size) - self.num_pages + first))
            for group, first in zip(config.groups, self.first_needed_page, strict=True)
        ]


class PrefixMatch(NamedTuple):
    """The longest prefix of a prompt that is in the cache."""

    nodes: list[PrefixNode]
    first_live: list[int]  # by group, the first node whose page is needed
    branch_len: int = 0  # tokens behind which others go on otherwise, and no recurrent state is kept; 0: none


class PageAllocator:
    """Allocates, grows, forks, publishes and releases the pages and slots of sequences."""

    def __init__(
        self, config: SchedulerConfig, hash_function: PageHash = page_hash, events: BlockEventLog | None = None
    ) -> None:
        self._groups = config.groups
        self._page_size = config.page_size
        self._num_slots = config.max_num_seqs
        self._prefix_caching = config.enable_prefix_caching
        num_groups = len(config.groups)
        self._events = events
        self._index = PrefixCache(num_groups + (config.snapshots is not None), hash_function, events)
        self._pools = [
            PagePool(group.num_pages, functools.partial(self._evict, i), functools.partial(self._index.drop, i))
            for i, group in enumerate(config.groups)
        ]
        self.transfers: list[PageTransfer] = []  # of the next plan, in order; whoever makes it takes them
        self._host = [
            HostPages(i, group.num_host_pages, self._index, self.transfers) for i, group in enumerate(config.groups)
        ]
        self.snapshots: StateSnapshots | None = None
        if config.snapshots is not None:
            shared = self._page_size, self._index, self.transfers
            self.snapshots = StateSnapshots(config.snapshots, num_groups, *shared)
        self._windowed = [i for i, group in enumerate(config.groups) if group.window is not None]
        self._free_slots = list(range(config.max_num_seqs))  # a heap: low slots first keep the batch dense
        self._tables = [np.zeros((config.max_num_seqs, config.pages_per_seq), np.int32) for _ in config.groups]
        self.page_tables = tuple(table.view() for table in self._tables)
        for table in self.page_tables:
            table.flags.writeable = False

    @property
    def num_free_slots(self) -> int:
        """Number of slots that `allocate_slot` and `fork` can allocate."""
        return len(self._free_slots)

    @property
    def num_available(self) -> float:
        """Number of pages that every group can allocate; infinite if there is no group."""
        return min((pool.num_available for pool in self._pools), default=math.inf)

    def match_prefix(self, tokens: list[int], salt: str, shares: bool) -> PrefixMatch:
        """Returns the longest prefix of full pages that every group still has.

        The last token is never part of it. Groups with a window need the pages of the last ``window - 1`` positions
        only, recurrent layers the state behind the last one.
        """
        nodes: list[PrefixNode] = []
        if shares and self._prefix_caching:
            nodes = self._index.walk(salt, tokens, (len(tokens) - 1) // self._page_size, self._page_size)
        for i, group in enumerate(self._groups):
            if group.window is None:
                lacking = (k for k, node in enumerate(nodes) if not node.is_stored(i))
                del nodes[next(lacking, len(nodes)) :]
        branch = nodes[-1] if nodes and len(nodes) < (len(tokens) - 1) // self._page_size else None
        branch_len = len(nodes) * self._page_size
        while nodes:
            if self.snapshots is not None:
                del nodes[self.snapshots.longest(nodes) :]
            first_live = [
                group.first_live_page(len(nodes) * self._page_size, self._page_size) for group in self._groups
            ]
            gap = -1  # the last node that lacks a page it needs
            for i in self._windowed:
                lacking = (k for k in range(len(nodes) - 1, first_live[i] - 1, -1) if not nodes[k].is_stored(i))
                gap = max(gap, next(lacking, -1))
            if gap < 0:
                break
            del nodes[gap:]
        if not nodes:
            first_live = [0] * len(self._groups)
        gain = branch_len - len(nodes) * self._page_size
        if self.snapshots is None or not self.snapshots.keeps_branch(branch, gain):
            branch_len = 0
        return PrefixMatch(nodes, first_live, branch_len)

    def has_pages(self, spare: list[int]) -> bool:
        """Returns whether each group has a free page in addition to `spare`."""
        return all(pool.num_available > num for pool, num in zip(self._pools, spare, strict=True))

    def can_allocate(self, match: PrefixMatch, length: int, spare: list[int]) -> bool:
        """Returns whether each group has enough pages for a new sequence, in addition to `spare`.

        The sequence has `length` tokens and begins with `match`.
        """
        total = -(-length // self._page_size)
        if self.snapshots is not None and match.nodes and not self.snapshots.can_begin(match.nodes[-1]):
            return False
        for i, group in enumerate(self._groups):
            found = [node.pages[i] for node in match.nodes[match.first_live[i] :]]
            most = group.most_pages(length, self._page_size)
            needed = min(total - len(match.nodes), max(1, most - len(found)))
            needed += sum(page == NULL_PAGE or self._pools[i].num_refs(page) == 0 for page in found)
            if needed + spare[i] > self._pools[i].num_available:
                return False
        return True

    def allocate_slot(self, match: PrefixMatch, salt: str, shares: bool) -> SequencePages:
        """Allocates a slot for a sequence that begins with `match`.

        A slot must be free, and `match` made since the allocator last changed. With `shares` the sequence's own pages
        are to be published.
        """
        slot, num_found = heapq.heappop(self._free_slots), len(match.nodes)
        pages = SequencePages(slot, salt, list(match.first_live), num_found, num_found)
        if shares and self._prefix_caching:
            pages.node = self._index.pin(match.nodes[-1] if match.nodes else self._index.root(salt))
            if self.snapshots is not None:
                node = match.nodes[-1] if match.nodes else None
                pages.states = self.snapshots.begin(node, num_found * self._page_size, match.branch_len)
        for i, pool in enumerate(self._pools):
            first = match.first_live[i]
            nodes = match.nodes[first:]
            offloaded = [node for node in nodes if node.pages[i] == NULL_PAGE]
            for node in nodes:
                if node.pages[i] != NULL_PAGE:
                    pool.share(node.pages[i])
            self._load(i, offloaded)
            self._tables[i][pages.slot, first : pages.num_pages] = [node.pages[i] for node in nodes]
        return pages

    def _load(self, group: int, nodes: Sequence[PrefixNode]) -> None:
        """Allocates a page, with a reference, for each of `nodes`, and loads it from host memory."""
        self._host[group].lock(nodes)
        for node in nodes:
            page = self._pools[group].allocate()
            self._host[group].load(page, node)
            self._pools[group].set_prefix(page, node)
            self._index.hold(group, page, node)

    def _evict(self, group: int, page: int, node: PrefixNode) -> None:
        self._host[group].offload(page, node)
        self._index.drop(group, page, node)

    def fork(self, source: SequencePages, length: int) -> tuple[SequencePages, list[PageCopy]] | None:
        """Allocates a slot for a sequence that begins with the first `length` tokens of `source`.

        These tokens must be computed.

        Full pages are shared; the last one, where it is not full, is to be copied. A slot must be free, and a page in
        each group for the copy.

        Returns:
            The new sequence's pages and the copies; None if `source` shares nothing, has given up a page that is
            needed (it is behind its window), or has a recurrent state, which is of all its tokens.
        """
        num_full, has_part = length // self._page_size, length % self._page_size > 0
        first_live = [group.first_live_page(length, self._page_size) for group in self._groups]
        is_gone = any(held > needed for held, needed in zip(source.first_needed_page, first_live, strict=True))
        if self.snapshots is not None or source.node is None or is_gone or source.num_published < num_full:
            return None
        node = source.node
        for _ in range(source.num_published - num_full):
            assert node.parent is not None
            node = node.parent
        slot = heapq.heappop(self._free_slots)
        pages = SequencePages(slot, source.salt, first_live, num_full, num_full, self._index.pin(node))
        copies = []
        for i, (pool, table) in enumerate(zip(self._pools, self._tables, strict=True)):
            for page in table[source.slot, first_live[i] : num_full].tolist():
                pool.share(page)
            table[pages.slot, first_live[i] : num_full] = table[source.slot, first_live[i] : num_full]
            if has_part:
                copies.append(PageCopy(i, int(table[source.slot, num_full]), pool.allocate()))
                table[pages.slot, num_full] = copies[-1].target
        pages.num_pages += has_part
        return pages, copies

    def max_growth(self, pages: SequencePages, length: int) -> int:
        """Returns the number of tokens, at most `length`, for which pages are available."""
        return int(min(length, (pages.num_pages + self.num_available) * self._page_size))

    def grow_all(self, growing: Sequence[tuple[SequencePages, int]]) -> None:
        """Gives each sequence pages for its number of tokens, which `max_growth` must allow."""
        slots: list[int] = []
        columns: list[int] = []
        for pages, length in growing:
            target = max(pages.num_pages, -(-length // self._page_size))
            slots += [pages.slot] * (target - pages.num_pages)
            columns += range(pages.num_pages, target)
            pages.num_pages = target
        if slots:
            self._fill_tables(slots, columns)

    def shrink(self, pages: SequencePages, length: int) -> None:
        """Takes back the pages behind the first `length` tokens."""
        target = -(-length // self._page_size)
        for pool, table in zip(self._pools, self._tables, strict=True):
            row = table[pages.slot]
            for page in reversed(row[target : pages.num_pages].tolist()):
                pool.free(page)
            row[target : pages.num_pages] = NULL_PAGE
        pages.num_pages = min(pages.num_pages, target)

    def append_pages(self, sequences: Sequence[SequencePages], slots: np.ndarray, columns: np.ndarray) -> None:
        """Appends a page to each sequence: entry `columns` in row `slots` of the tables.

        The pages must be available.
        """
        self._fill_tables(slots, columns)
        for pages in sequences:
            pages.num_pages += 1

    def _fill_tables(self, slots: Sequence[int] | np.ndarray, columns: Sequence[int] | np.ndarray) -> None:
        for pool, table in zip(self._pools, self._tables, strict=True):
            table[slots, columns] = pool.allocate_all(len(slots))

    def publish_prefix(self, pages: SequencePages, tokens: list[int], num_computed: int) -> float:
        """Adds computed full pages to the prefix index, then frees pages behind windows.

        Returns:
            The number of computed tokens with which there is more to do.
        """
        num_full = num_computed // self._page_size
        while pages.node is not None and pages.num_published < num_full:
            begin = pages.num_published * self._page_size
            # None: the hash belongs to another prefix. What is behind could not be found, so nothing more is entered.
            pages.node = node = self._index.follow(pages.node, tuple(tokens[begin : begin + self._page_size]))
            if node is not None:
                for i, pool in enumerate(self._pools):
                    page = self._tables[i].item(pages.slot, pages.num_published)
                    if page != NULL_PAGE and node.pages[i] == NULL_PAGE:
                        pool.set_prefix(page, node)
                        self._index.hold(i, page, node)
                pages.num_published += 1
                if self.snapshots is not None and pages.states is not None:
                    self.snapshots.publish(pages.states, node, pages.num_published * self._page_size)
        if self.snapshots is not None and pages.states is not None:
            self.snapshots.release(pages.states, num_computed)
        due: float = (num_full + 1) * self._page_size
        for i in self._windowed:
            live = self._groups[i].first_live_page(num_computed, self._page_size)
            if live > pages.first_needed_page[i]:
                row = self._tables[i][pages.slot]
                for page in reversed(row[pages.first_needed_page[i] : live].tolist()):
                    self._pools[i].free(page)
                row[pages.first_needed_page[i] : live] = NULL_PAGE
                pages.first_needed_page[i] = live
            due = min(due, self._groups[i].last_use(live, self._page_size))
        return due

    def release(self, pages: SequencePages) -> None:
        """Gives the slot and all pages back, the last page first."""
        for i, pool in enumerate(self._pools):
            row = self._tables[i][pages.slot, : pages.num_pages]
            for page in reversed(row[pages.first_needed_page[i] :].tolist()):
                pool.free(page)
            row[:] = NULL_PAGE
        if self.snapshots is not None and pages.states is not None:
            self.snapshots.release(pages.states, math.inf)
        if pages.node is not None:
            self._index.unpin(pages.node)
        heapq.heappush(self._free_slots, pages.slot)

    def clear_prefix_cache(self, sequences: Iterable[SequencePages] = ()) -> None:
        """Removes every published prefix, as when the device has lost what the pages held.

        Live `sequences` publish nothing from then on, so that pages of before are not found by later requests.
        """
        for pool, host in zip(self._pools, self._host, strict=True):
            pool.clear_prefixes()
            host.clear()
        if self.snapshots is not None:
            self.snapshots.clear()
        for pages in sequences:
            if pages.node is not None:
                self._index.unpin(pages.node)
                pages.node = None
        if self._events is not None:
            self._events.cleared()

    def usage(self) -> tuple[GroupUsage, ...]:
        """Pages in use and cached, by group; behind them snapshots of recurrent states."""
        pages = tuple(
            GroupUsage(
                group.name,
                pool.num_usable,
                pool.num_usable - pool.num_available,
                pool.num_cached,
                host.num_pages - 1,
                host.num_used,
                host.num_offloaded,
                host.num_loaded,
                self._page_size,
            )
            for group, pool, host in zip(self._groups, self._pools, self._host, strict=True)
        )
        return pages if self.snapshots is None else (*pages, self.snapshots.usage())

    def check_integrity(self, sequences: Iterable[SequencePages]) -> None:
        """Checks pools, tables, slots and index against the live `sequences`.

        Those are all that have been allocated or forked and not released.

        Raises:
            AssertionError: something is lost, held twice, or where it should not be.
        """
        sequences = list(sequences)
        slots = sorted([*self._free_slots, *(pages.slot for pages in sequences)])
        check_equal("free and used slots", list(range(self._num_slots)), slots)
        for i, (pool, table) in enumerate(zip(self._pools, self._tables, strict=True)):
            expected = np.zeros_like(table)
            references: list[int] = []
            for pages in sequences:
                live = slice(pages.first_needed_page[i], pages.num_pages)
                expected[pages.slot, live] = table[pages.slot, live]
                references += table[pages.slot, live].tolist()
            check_equal(f"page table of group {i} outside of sequences", expected.tolist(), table.tolist())
            pool.check_integrity(references)
        pins = [pages.node for pages in sequences if pages.node is not None]
        pools = list(self._pools)
        if self.snapshots is not None:
            pools.append(self.snapshots.pool)
            self.snapshots.check_integrity(pages.states for pages in sequences if pages.states is not None)
        self._index.check_integrity(pins, [pool.prefixes() for pool in pools])
        for host in self._host:
            host.check_integrity(self._index.nodes())
