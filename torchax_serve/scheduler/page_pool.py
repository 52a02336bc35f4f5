"""Pages of one cache group: used with a reference count, idle with a cached prefix, or free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from model_adapters.errors import InvalidArgumentError, OutOfMemoryError

NULL_PAGE = 0
"""The page of unused places of page tables, whose content counts for nothing. Never allocated."""


def check_equal(what: str, expected: object, got: object) -> None:
    """Raises `AssertionError` with both values unless they are equal.

    The function checks invariants of this project.
    """
    if expected != got:
        raise AssertionError(f"{what}: expected {expected}, got {got}")


class PagePool:
    """Reference counts over pages ``1 .. num_pages - 1``, with least-recently-used eviction.

    A page is in one of three states: *used* (one reference or more), *idle* (no reference, but a prefix that
    may be used again), *free*. `allocate` takes free pages first, then the page that has been idle longest.
    As in vLLM, pages of a finished sequence are given back last page first, so that of a chain the end goes first.

    Args:
        num_pages: Number of pages, the null page included.
        on_evict: Called with a page and its prefix when the page is reused.
        on_clear: The same when all prefixes are removed; None: `on_evict`.
    """

    def __init__(
        self,
        num_pages: int,
        on_evict: Callable[[int, Any], None],
        on_clear: Callable[[int, Any], None] | None = None,
    ) -> None:
        self.num_pages = num_pages
        self._on_evict, self._on_clear = on_evict, on_clear or on_evict
        self._num_refs = [0] * num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first
        self._prefix_of: dict[int, Any] = {}  # what a page remembers, for used and idle pages

    @property
    def num_usable(self) -> int:
        """Number of pages that can be allocated at all."""
        return self.num_pages - 1

    @property
    def num_available(self) -> int:
        """Number of pages that `allocate` can return: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Number of pages with a prefix and no reference."""
        return len(self._idle)

    def num_refs(self, page: int) -> int:
        """References to `page`."""
        return self._num_refs[page]

    def allocate(self) -> int:
        """Allocates a page with one reference and no prefix.

        If no page is free, the page that has been idle for longest is evicted.

        Raises:
            OutOfMemoryError: every page is in use.
        """
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._on_evict(page, self._prefix_of.pop(page))
        else:
            raise OutOfMemoryError(f"expected a page that is free, got {self.num_usable} in use; free one first")
        self._num_refs[page] = 1
        return page

    def allocate_all(self, num_pages: int) -> list[int]:
        """Allocates `num_pages` pages, as `allocate` does one by one.

        Raises:
            OutOfMemoryError: there are fewer; none is taken.
        """
        if num_pages > self.num_available:
            raise OutOfMemoryError(f"expected {num_pages} free pages, got {self.num_available}; free some first")
        taken = self._free[: -num_pages - 1 : -1]
        del self._free[len(self._free) - len(taken) :]
        for page in taken:
            self._num_refs[page] = 1
        return taken + [self.allocate() for _ in range(num_pages - len(taken))]

    def share(self, page: int) -> None:
        """Adds a reference to a page that is used or idle.

        Raises:
            InvalidArgumentError: the page is free, or no page of this pool.
        """
        if not NULL_PAGE < page < self.num_pages or not (self._num_refs[page] or page in self._idle):
            raise InvalidArgumentError(f"expected a page that is used or idle, got page {page}; allocate it first")
        if not self._num_refs[page]:
            del self._idle[page]
        self._num_refs[page] += 1

    def free(self, page: int) -> None:
        """Drops one reference of a page.

        With the last reference the page becomes idle if it has a prefix, else free.

        Raises:
            InvalidArgumentError: the page has no reference, or is no page of this pool.
        """
        if not NULL_PAGE < page < self.num_pages or self._num_refs[page] < 1:
            raise InvalidArgumentError(f"expected a page in use, got page {page}; it was freed before")
        self._num_refs[page] -= 1
        if not self._num_refs[page]:
            if page in self._prefix_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def set_prefix(self, page: int, prefix: Any) -> None:
        """Assigns `prefix` to a used page; `on_evict` receives the prefix when the page is reused.

        Raises:
            InvalidArgumentError: the page is not in use, or has a prefix already.
        """
        if not self._num_refs[page] or page in self._prefix_of:
            raise InvalidArgumentError(f"expected a used page without a prefix, got page {page}; allocate another")
        self._prefix_of[page] = prefix

    def clear_prefixes(self) -> None:
        """Evicts every idle page and removes the prefixes of used ones."""
        for page, prefix in self._prefix_of.items():
            self._on_clear(page, prefix)
        self._prefix_of.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def prefixes(self) -> dict[int, Any]:
        """Returns a copy of the prefixes, by page."""
        return dict(self._prefix_of)

    def check_integrity(self, references: Iterable[int]) -> None:
        """Checks the pool against all `references` that its users hold.

        A page occurs in them as often as it is referred to.

        Raises:
            AssertionError: they differ, or the three states do not partition the pages.
        """
        counts = [0] * self.num_pages
        for page in references:
            counts[page] += 1
        check_equal("references by page", counts, self._num_refs)
        check_equal("references to the null page", 0, counts[NULL_PAGE])
        used = [page for page, num in enumerate(self._num_refs) if num]
        everything = sorted([*used, *self._free, *self._idle])
        check_equal("used, free and idle pages", list(range(1, self.num_pages)), everything)
        unknown = [page for page in self._prefix_of if not self._num_refs[page] and page not in self._idle]
        check_equal("free pages that remember a prefix", [], unknown)
        check_equal("idle pages without a prefix", [], [page for page in self._idle if page not in self._prefix_of])


class PageCopy(NamedTuple):
    """Copies a page of a group, in every layer of it, before the step computes."""

    group: int
    source: int
    target: int
