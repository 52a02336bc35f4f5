"""Which replica has computed which beginning: plain Python, no Ray."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

BLOCK_CHARS = 128
MOST_BLOCKS = 64
"""Of a prompt's beginning; what lies behind tells replicas apart no further."""
MOST_KNOWN = 1 << 16


def prefix_key(request: Mapping[str, Any]) -> str:
    """The text by which requests share computed pages: what a chat template would make of messages begins alike."""
    prompt = request.get("prompt")
    return prompt if isinstance(prompt, str) else json.dumps(request.get("messages"), ensure_ascii=False)


class PrefixAffinity:
    """Where beginnings were sent, by chains of blocks of text; the least recently used are forgotten.

    The engines' own caches know what they have; this is a guess from the outside that costs no question. It follows the
    affinity that SGLang's router and Ray's own prefix router have, with a chain of digests in place of a tree.
    """

    def __init__(self, most_known: int = MOST_KNOWN) -> None:
        self._most_known = most_known
        self._owners: collections.OrderedDict[bytes, str] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def record(self, text: str, replica: str) -> None:
        """`replica` computes `text` now."""
        for key in _chain(text):
            self._owners[key] = replica
            self._owners.move_to_end(key)
        while len(self._owners) > self._most_known:
            self._owners.popitem(last=False)

    def replica_for(self, text: str, replicas: Iterable[str]) -> str | None:
        """The one of `replicas` that was last sent the longest beginning of `text`; None if none was sent any."""
        there, found = set(replicas), None
        for key in _chain(text):
            owner = self._owners.get(key)
            if owner is None:
                break
            if owner in there:
                found = owner
        return found


def choose_replica(owner: str | None, loads: Mapping[str, int], most_ahead: int) -> list[str]:
    """Replicas in the order in which a request should try them.

    Args:
        owner: of the request's beginning.
        loads: requests under way, by replica.
        most_ahead: by how many requests the owner may be busier than the idlest one and is still preferred.
    """
    order = sorted(loads, key=lambda replica: loads[replica])
    if owner is not None and loads[owner] - loads[order[0]] <= most_ahead:
        order.remove(owner)
        order.insert(0, owner)
    return order


def _chain(text: str) -> Iterable[bytes]:
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, min(len(text), BLOCK_CHARS * MOST_BLOCKS), BLOCK_CHARS):
        block = text[start : start + BLOCK_CHARS]
        if len(block) < BLOCK_CHARS and start:
            return
        digest.update(block.encode("utf-8", "surrogatepass"))
        yield digest.copy().digest()
