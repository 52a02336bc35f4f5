"""Records which replica has computed which prefix, and which replicas there are.

Plain Python, without Ray.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable, Mapping

BLOCK_CHARS = 128
MAX_BLOCKS = 64
"""Largest number of blocks of a prefix; longer prefixes hardly distinguish replicas further."""
MOST_KNOWN = 1 << 16
_replicas: dict[str, list[str]] = {}  # by deployment, as Ray tells the router of this process


def note_replicas(deployment: str, replicas: Iterable[str]) -> None:
    """Records the ids of a deployment's replicas."""
    _replicas[deployment] = list(replicas)


def known_replicas(deployment: str) -> list[str]:
    """Returns the ids of a deployment's replicas, as they were noted last in this process."""
    return list(_replicas.get(deployment, ()))


class PrefixAffinity:
    """Map from prefixes to replicas, by chains of digests of text blocks.

    The least recently used prefixes are dropped. This estimates the content of the engines' prefix caches without
    asking them. It follows the affinity of SGLang's router and of Ray's prefix router, with a chain of digests instead
    of a tree.
    """

    def __init__(self, most_known: int = MOST_KNOWN) -> None:
        self._most_known = most_known
        self._owners: collections.OrderedDict[bytes, str] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def record(self, text: str, replica: str) -> None:
        """Records that `replica` computes `text`."""
        for key in _chain(text):
            self._owners[key] = replica
            self._owners.move_to_end(key)
        while len(self._owners) > self._most_known:
            self._owners.popitem(last=False)

    def replica_for(self, text: str, replicas: Iterable[str]) -> str | None:
        """Returns the replica that was last sent the longest prefix of `text`.

        None if no replica was sent any.
        """
        there, found = set(replicas), None
        for key in _chain(text):
            owner = self._owners.get(key)
            if owner is None:
                break
            if owner in there:
                found = owner
        return found


def choose_replica(owner: str | None, loads: Mapping[str, int], most_ahead: int) -> list[str]:
    """Returns the replicas in the order in which a request should try them.

    Args:
        owner: Replica of the request's prefix.
        loads: Number of running requests by replica.
        most_ahead: Largest number of requests by which a preferred owner may be busier than the idlest replica.
    """
    order = sorted(loads, key=lambda replica: loads[replica])
    if owner is not None and loads[owner] - loads[order[0]] <= most_ahead:
        order.remove(owner)
        order.insert(0, owner)
    return order


def _chain(text: str) -> Iterable[bytes]:
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, min(len(text), BLOCK_CHARS * MAX_BLOCKS), BLOCK_CHARS):
        block = text[start : start + BLOCK_CHARS]
        if len(block) < BLOCK_CHARS and start:
            return
        digest.update(block.encode("utf-8", "surrogatepass"))
        yield digest.copy().digest()
