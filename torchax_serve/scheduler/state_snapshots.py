"""Snapshots of recurrent states: which borders of a prompt are kept, and in which rows.

Pages hold a prefix of attention layers token by token. A recurrent layer has one state for all tokens so far, as large
as hundreds of them, so that only few borders can be kept: near the end of each prompt, where two prompts with
the same beginning part, and now and then in a long one. The first and the second of these are the reachable borders of
vLLM's hybrid cache; Marconi (Pan et al., 2024) admits states by the same thought. Host side only: integers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from torchax_serve.outputs import GroupUsage
from torchax_serve.scheduler.host_pages import HostPages, PageTransfer
from torchax_serve.scheduler.page_pool import NULL_PAGE, PagePool
from torchax_serve.scheduler.prefix_cache import PrefixCache, PrefixNode

if TYPE_CHECKING:
    from torchax_serve.scheduler.config import SnapshotGroup

LONG_PROMPT_INTERVAL = 8192
"""Tokens after which a long prompt leaves a snapshot: one that differs late computes at most as many again."""


LEAST_BRANCH_PAGES = 4
"""Pages that the snapshot of a branch saves at least. The end of each prompt is kept but for one or two."""


class StateRows(NamedTuple):
    """Snapshots that a row of a plan reads and writes, beside the state in its slot.

    The row begins with `source`. The state behind its first `num_tokens` tokens goes to `target`, where the rest of the
    row reads it; without a rest, the next row of the request does.
    """

    source: int = NULL_PAGE  # 0: it begins with the state in its slot
    num_tokens: int = 0  # 0: no state is kept
    target: int = NULL_PAGE


@dataclasses.dataclass(slots=True, eq=False)
class SequenceStates:
    """Snapshots that a running sequence has references to."""

    held: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # tokens of each, ascending, and its id
    source: int = NULL_PAGE  # snapshot that its next tokens begin with; NULL_PAGE: its slot has its state
    branch_len: int = 0  # as of `PrefixMatch`


class StateSnapshots:
    """Reference counts of snapshots ``1 .. num - 1``, which evicted ones leave for host memory.

    Args:
        group: Number of snapshots.
        place: Index of the group in nodes of prefixes and in transfers: behind those of pages.
        page_size: Tokens between borders.
        index: Index of prefixes.
        transfers: Transfers of the next plan, appended to.
    """

    def __init__(
        self, group: SnapshotGroup, place: int, page_size: int, index: PrefixCache, transfers: list[PageTransfer]
    ) -> None:
        self._place, self._page_size, self._index = place, page_size, index
        self._host = HostPages(place, group.num_host_snapshots, index, transfers)
        self.pool = PagePool(group.num_snapshots, self._evict, self._drop)

    def _evict(self, snapshot: int, node: PrefixNode) -> None:
        self._host.offload(snapshot, node)
        self._drop(snapshot, node)

    def _drop(self, snapshot: int, node: PrefixNode) -> None:
        self._index.drop(self._place, snapshot, node)

    def longest(self, nodes: list[PrefixNode]) -> int:
        """Returns how many of `nodes` there are up to the last one with a state."""
        found = (k + 1 for k in range(len(nodes) - 1, -1, -1) if nodes[k].is_stored(self._place))
        return next(found, 0)

    def keeps_branch(self, node: PrefixNode | None, num_tokens: int) -> bool:
        """Returns whether the state at `node`, where two sequences may part, is to be kept.

        It is if another sequence goes on there, and `num_tokens` would not be computed again that are now.
        """
        if node is None or num_tokens < LEAST_BRANCH_PAGES * self._page_size:
            return False
        return node.num_uses > sum(page != NULL_PAGE for page in (*node.pages, *node.host_pages))

    def can_begin(self, node: PrefixNode) -> bool:
        """Returns whether there is a row for the state of `node`."""
        snapshot = node.pages[self._place]
        return bool(snapshot != NULL_PAGE or self.pool.num_available)

    def begin(self, node: PrefixNode | None, length: int, branch_len: int) -> SequenceStates:
        """Returns what a sequence holds that begins with the `length` tokens up to `node`, if any."""
        if node is None:
            return SequenceStates(branch_len=branch_len)
        snapshot = node.pages[self._place]
        if snapshot != NULL_PAGE:
            self.pool.share(snapshot)
        else:
            self._host.lock([node])
            snapshot = self.pool.allocate()
            self._host.load(snapshot, node)
            self.pool.set_prefix(snapshot, node)
            self._index.hold(self._place, snapshot, node)
        return SequenceStates([(length, snapshot)], snapshot, branch_len)

    def rows_of(self, states: SequenceStates, start: int, end: int, limit: int) -> StateRows | None:
        """Returns what the tokens from `start` to `end` of a prompt read and keep besides the slot.

        No state is kept behind more than `limit` tokens: those that were given, but for the last one that is computed,
        whose state decode steps find in the slot.
        """
        source, border = states.source, self._border(states, start, min(end, limit), limit)
        target = self.pool.allocate() if border and self.pool.num_available else NULL_PAGE
        states.source = NULL_PAGE
        if target != NULL_PAGE:
            states.held.append((border, target))
            states.source = target if border == end else NULL_PAGE
            return StateRows(source, border - start, target)
        return None if source == NULL_PAGE else StateRows(source)

    def _border(self, states: SequenceStates, start: int, end: int, limit: int) -> int:
        """Returns the last border in a chunk that is to be kept; 0 for none.

        The last page of a prompt may hold what the next turn of a chat has otherwise: the beginning of an answer.
        """
        last = limit // self._page_size * self._page_size - self._page_size
        regular = end // LONG_PROMPT_INTERVAL * LONG_PROMPT_INTERVAL
        regular = regular // self._page_size * self._page_size
        wanted = (last, states.branch_len, regular)
        return max((border for border in wanted if start < border <= end), default=0)

    def publish(self, states: SequenceStates, node: PrefixNode, length: int) -> None:
        """Enters a state of the sequence behind `length` tokens, if it keeps one there, at `node`."""
        snapshot = next((held for border, held in states.held if border == length), NULL_PAGE)
        if snapshot != NULL_PAGE and node.pages[self._place] == NULL_PAGE:
            self.pool.set_prefix(snapshot, node)
            self._index.hold(self._place, snapshot, node)

    def release(self, states: SequenceStates, num_computed: float) -> None:
        """Gives back the snapshots that no token behind the first `num_computed` reads."""
        while states.held and states.held[0][0] < num_computed:
            self.pool.free(states.held.pop(0)[1])

    def clear(self) -> None:
        """Removes all prefixes."""
        self.pool.clear_prefixes()
        self._host.clear()

    def usage(self) -> GroupUsage:
        """Snapshots in use and cached."""
        pool, host = self.pool, self._host
        return GroupUsage(
            "recurrent states",
            pool.num_usable,
            pool.num_usable - pool.num_available,
            pool.num_cached,
            host.num_pages - 1,
            host.num_used,
            host.num_offloaded,
            host.num_loaded,
        )

    def check_integrity(self, sequences: Iterable[SequenceStates]) -> None:
        """Checks pool and host against what the live `sequences` hold.

        Raises:
            AssertionError: something is lost, or held twice.
        """
        self.pool.check_integrity(snapshot for states in sequences for _, snapshot in states.held)
        self._host.check_integrity(self._index.nodes())
