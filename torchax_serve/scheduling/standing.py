"""Plans that follow from the one before by arithmetic: every request that runs decodes, and nothing else happens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchax_serve.scheduling.cache_book import SequencePages
from torchax_serve.scheduling.pages import expect_equal
from torchax_serve.scheduling.plan import DecodeRows
from torchax_serve.scheduling.request import RequestState


class StandingRows:
    """The rows of such a plan, to be planned again. They hold while the same requests run and nobody else plans.

    What is said of a request here stands in its state, too. Arrays take the host less time than so many objects, and
    most plans of a full batch are of this kind.

    Args:
        states: of all requests that run, in their order; each has pages.
        num_changes: of the list of running requests.
    """

    def __init__(self, states: list[RequestState], num_changes: int) -> None:
        self.states, self.num_changes = states, num_changes
        self._request_ids = [state.request.request_id for state in states]
        self._pages = [state.pages for state in states if state.pages is not None]
        self._slots = np.array([pages.slot for pages in self._pages], np.int32)
        self._num_pages = np.array([pages.num_pages for pages in self._pages])
        self._starts = np.array([state.num_planned for state in states], np.int32)
        self._ends = np.array([state.end_len for state in states])

    @property
    def longest(self) -> int:
        """Tokens of the longest request, those of steps in flight counted."""
        return int(self._starts.max())

    @property
    def has_end(self) -> bool:
        """Whether a request has all its tokens once the steps in flight are done."""
        return bool((self._starts >= self._ends - 1).any())

    @property
    def to_come(self) -> int:
        """Steps until the last request has all its tokens."""
        return int((self._ends - self._starts).max()) - 1

    def growing(self, num_steps: int, page_len: int) -> tuple[Sequence[tuple[SequencePages, int]], int]:
        """Those that need pages for `num_steps` more tokens, with their new length, and how many pages that takes."""
        lengths = self._starts + num_steps
        missing = -(-lengths // page_len) - self._num_pages
        rows = np.flatnonzero(missing > 0)
        growing = [(self._pages[row], length) for row, length in zip(rows, lengths[rows].tolist(), strict=True)]
        return growing, int(missing[rows].sum())

    def advance(self, num_steps: int, page_len: int) -> DecodeRows:
        """Plans `num_steps` of every request; the rows of that plan."""
        for state in self.states:
            state.num_planned += num_steps
            state.num_pending += num_steps
            state.num_in_flight += 1
        rows = DecodeRows(self._request_ids, self._slots, self._starts)
        self._starts = self._starts + np.int32(num_steps)
        self._num_pages = np.maximum(self._num_pages, -(-self._starts // page_len))
        return rows

    def check_integrity(self) -> None:
        """Checks the arrays against the states.

        Raises:
            AssertionError: they differ.
        """
        columns = {
            "slots": (self._slots, [state.slot for state in self.states]),
            "starts": (self._starts, [state.num_planned for state in self.states]),
            "pages": (self._num_pages, [pages.num_pages for pages in self._pages]),
        }
        for name, (array, expected) in columns.items():
            expect_equal(f"{name} of standing rows", expected, array.tolist())
