"""Index of the computed prefixes in the cache: chains of pages.

A prefix is found by hash and compared token by token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from torchax_serve.scheduler.page_pool import NULL_PAGE, check_equal
from torchax_serve.scheduler.types import MAX_TOKEN_ID

PageHash = Callable[[int, tuple[int, ...], str], int]


def page_hash(parent_hash: int, tokens: tuple[int, ...], salt: str) -> int:
    """Returns the hash of a chain of pages.

    It covers the chain before, the last page's tokens, and the salt.
    """
    return hash((parent_hash, tokens, salt))


@dataclasses.dataclass(slots=True, eq=False)
class PrefixNode:
    """Last page of a prefix.

    The prefix consists of its tokens and those of its parents, back to the root of its salt.
    """

    key: int
    salt: str
    parent: PrefixNode | None  # None: the root of the salt
    tokens: tuple[int, ...]
    pages: list[int]  # by group, where this page's keys and values are; NULL_PAGE: not in the cache
    host_pages: list[int]  # by group, where they are in host memory; NULL_PAGE: not there
    num_uses: int = 0  # pages held, children, and sequences that continue here
    has_media: bool = False  # whether a token up to its end stands for a part of an image

    def is_stored(self, group: int) -> bool:
        """Returns whether keys and values of `group` are on the device or in host memory."""
        return self.pages[group] != NULL_PAGE or self.host_pages[group] != NULL_PAGE


class PrefixObserver(Protocol):
    """What is told which pages of prefixes come and go."""

    def stored(self, group: int, node: PrefixNode, *, on_host: bool) -> None:
        """Notes that `node` is on the device, or in host memory, from now on."""

    def removed(self, group: int, node: PrefixNode, *, on_host: bool) -> None:
        """Notes that `node` is no longer there."""


class PrefixCache:
    """Nodes by the hash of their chain.

    A hash only finds a candidate: it is the wanted node if it has the same tokens and the very same parent. Two chains
    whose hashes collide therefore never mix; the later one is simply not entered.
    """

    def __init__(
        self, num_groups: int, hash_function: PageHash = page_hash, observer: PrefixObserver | None = None
    ) -> None:
        self._num_groups = num_groups
        self._hash, self._observer = hash_function, observer
        self._nodes: dict[int, PrefixNode] = {}
        self._roots: dict[str, PrefixNode] = {}

    def __len__(self) -> int:
        """Nodes, roots not counted."""
        return len(self._nodes)

    def root(self, salt: str) -> PrefixNode:
        """Returns the empty prefix of `salt`.

        Unless it is pinned, it is removed with its last child.
        """
        if salt not in self._roots:
            self._roots[salt] = self._node(0, salt, None, ())
        return self._roots[salt]

    def _node(self, key: int, salt: str, parent: PrefixNode | None, tokens: tuple[int, ...]) -> PrefixNode:
        null_pages = [NULL_PAGE] * self._num_groups
        has_media = parent is not None and (parent.has_media or max(tokens) > MAX_TOKEN_ID)
        return PrefixNode(key, salt, parent, tokens, null_pages, list(null_pages), has_media=has_media)

    def find(self, parent: PrefixNode, tokens: tuple[int, ...]) -> PrefixNode | None:
        """Returns the node of `tokens` behind `parent`; None if there is none."""
        node = self._nodes.get(self._hash(parent.key, tokens, parent.salt))
        return node if node is not None and node.parent is parent and node.tokens == tokens else None

    def walk(self, salt: str, tokens: list[int], num_pages: int, page_size: int) -> list[PrefixNode]:
        """Returns the nodes of the first pages of `tokens`, at most `num_pages`.

        They end at the first page that has no node.
        """
        nodes: list[PrefixNode] = []
        node = self._roots.get(salt)
        while node is not None and len(nodes) < num_pages:
            begin = len(nodes) * page_size
            node = self.find(node, tuple(tokens[begin : begin + page_size]))
            if node is not None:
                nodes.append(node)
        return nodes

    def follow(self, pinned: PrefixNode, tokens: tuple[int, ...]) -> PrefixNode | None:
        """Moves a sequence's pin to the node of `tokens` behind `pinned`, made if need be.

        None, and the pin is given up, if the hash belongs to another chain.
        """
        key = self._hash(pinned.key, tokens, pinned.salt)
        node = self._nodes.get(key)
        if node is None:
            # What the sequence was to its parent, the node now is.
            node = self._node(key, pinned.salt, pinned, tokens)
            node.num_uses = 1
            self._nodes[key] = node
            return node
        self.unpin(pinned)
        return self.pin(node) if node.parent is pinned and node.tokens == tokens else None

    def pin(self, node: PrefixNode) -> PrefixNode:
        """Keeps `node`, and returns it, while a sequence continues there."""
        node.num_uses += 1
        return node

    def unpin(self, node: PrefixNode) -> None:
        """Removes a use of a node; a node without uses is removed.

        Its parents are removed, too, if only it used them.
        """
        current: PrefixNode | None = node
        while current is not None:
            current.num_uses -= 1
            if current.num_uses:
                return
            if current.parent is None:
                del self._roots[current.salt]
            else:
                del self._nodes[current.key]
            current = current.parent

    def hold(self, group: int, page: int, node: PrefixNode) -> None:
        """Notes that `page` of `group` has the node's keys and values."""
        node.pages[group] = page
        node.num_uses += 1
        if self._observer is not None:
            self._observer.stored(group, node, on_host=False)

    def drop(self, group: int, page: int, node: PrefixNode) -> None:
        """Notes that `page` of `group` no longer has them."""
        check_equal("page that is dropped", node.pages[group], page)
        node.pages[group] = NULL_PAGE
        if self._observer is not None:
            self._observer.removed(group, node, on_host=False)
        self.unpin(node)

    def hold_on_host(self, group: int, page: int, node: PrefixNode) -> None:
        """Notes that host page `page` of `group` has the node's keys and values."""
        node.host_pages[group] = page
        node.num_uses += 1
        if self._observer is not None:
            self._observer.stored(group, node, on_host=True)

    def drop_on_host(self, group: int, page: int, node: PrefixNode) -> None:
        """Notes that host page `page` of `group` no longer has them."""
        check_equal("host page that is dropped", node.host_pages[group], page)
        node.host_pages[group] = NULL_PAGE
        if self._observer is not None:
            self._observer.removed(group, node, on_host=True)
        self.unpin(node)

    def nodes(self) -> list[PrefixNode]:
        """Returns all nodes, roots not among them."""
        return list(self._nodes.values())

    def check_integrity(self, pins: list[PrefixNode], prefixes: list[dict[int, PrefixNode]]) -> None:
        """Checks uses and pages against all `pins` and the prefixes in the pool of each group.

        Raises:
            AssertionError: they differ.
        """
        uses: dict[int, int] = {}
        for node in pins:
            uses[id(node)] = uses.get(id(node), 0) + 1
        for node in self._nodes.values():
            uses[id(node)] = uses.get(id(node), 0) + sum(page != NULL_PAGE for page in (*node.pages, *node.host_pages))
            uses[id(node.parent)] = uses.get(id(node.parent), 0) + 1
        for node in [*self._nodes.values(), *self._roots.values()]:
            check_equal(f"uses of the prefix that ends in {node.tokens}", uses.pop(id(node)), node.num_uses)
        check_equal("uses of prefixes that are not in the index", {}, uses)
        for group, by_page in enumerate(prefixes):
            held = {node.pages[group]: id(node) for node in self._nodes.values() if node.pages[group] != NULL_PAGE}
            check_equal(f"pages of group {group} in the index", {p: id(n) for p, n in by_page.items()}, held)
