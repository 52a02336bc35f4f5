"""Log of the prefixes that enter and leave the cache, for those who route requests by them.

The events are vLLM's (`vllm.distributed.kv_events`): a block is a page, named by a hash of all tokens up to its end.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from torchax_serve.scheduler.config import CacheGroup
from torchax_serve.scheduler.prefix_cache import PrefixNode

DEVICE, HOST = "GPU", "CPU"
"""vLLM's words for the memory of any accelerator and for that of the host."""


def stable_page_hash(parent_hash: int, tokens: tuple[int, ...], salt: str) -> int:
    """Returns 64 bits of SHA-256 over a chain of pages, equal in all processes."""
    digest = hashlib.sha256(parent_hash.to_bytes(8, "big"))
    digest.update(np.asarray(tokens, "<i8").tobytes())
    digest.update(salt.encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest()[:8], "big")


@dataclasses.dataclass(slots=True)
class StoredBlocks:
    """Consecutive pages of a prefix that can be found from now on."""

    group: int
    medium: str
    block_hashes: list[int]
    parent_hash: int | None  # of the page before; None: the first one begins the prompt
    token_ids: list[int]
    salt: str


@dataclasses.dataclass(slots=True)
class RemovedBlocks:
    """Pages that can no longer be found."""

    group: int
    medium: str
    block_hashes: list[int]


@dataclasses.dataclass(slots=True)
class ClearedBlocks:
    """No page can be found any more."""


BlockEvent = StoredBlocks | RemovedBlocks | ClearedBlocks


class BlockEventLog:
    """Events since the last `take`, in their order within each group and medium.

    Pages of a prompt from its first image on are left out: their tokens do not say what they hold.

    Args:
        groups: Groups of layers; states of recurrent layers are none of them.
        page_size: Tokens of a page.
    """

    def __init__(self, groups: Sequence[CacheGroup], page_size: int) -> None:
        self.groups, self.page_size = tuple(groups), page_size
        self._events: list[BlockEvent] = []
        self._last: dict[tuple[int, str], StoredBlocks | RemovedBlocks] = {}  # by group and medium: more is added to it

    def __len__(self) -> int:
        return len(self._events)

    def stored(self, group: int, node: PrefixNode, *, on_host: bool) -> None:
        """Adds that `node` can be found on the device, or in host memory."""
        if group >= len(self.groups) or node.has_media:
            return
        medium = HOST if on_host else DEVICE
        assert node.parent is not None
        last = self._last.get((group, medium))
        if isinstance(last, StoredBlocks) and last.block_hashes[-1] == node.parent.key and last.salt == node.salt:
            last.block_hashes.append(node.key)
            last.token_ids += node.tokens
            return
        parent = None if node.parent.parent is None else node.parent.key
        self._add(StoredBlocks(group, medium, [node.key], parent, list(node.tokens), node.salt))

    def removed(self, group: int, node: PrefixNode, *, on_host: bool) -> None:
        """Adds that `node` can no longer be found there."""
        if group >= len(self.groups) or node.has_media:
            return
        medium = HOST if on_host else DEVICE
        last = self._last.get((group, medium))
        if isinstance(last, RemovedBlocks):
            last.block_hashes.append(node.key)
        else:
            self._add(RemovedBlocks(group, medium, [node.key]))

    def _add(self, event: StoredBlocks | RemovedBlocks) -> None:
        self._events.append(event)
        self._last[event.group, event.medium] = event

    def cleared(self) -> None:
        """Adds that nothing can be found; what was not taken before is moot."""
        self._events, self._last = [ClearedBlocks()], {}

    def take(self) -> list[BlockEvent]:
        """Returns the events, and begins anew."""
        events, self._events, self._last = self._events, [], {}
        return events
