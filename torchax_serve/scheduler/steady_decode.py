"""Plans that follow from the previous plan by arithmetic, since all running requests decode.

Nothing else happens in such steps.
"""

from __future__ import annotations

import numpy as np

from torchax_serve.scheduler.page_allocator import PageAllocator
from torchax_serve.scheduler.page_pool import check_equal
from torchax_serve.scheduler.request import RequestState
from torchax_serve.scheduler.request_queues import PriorityList
from torchax_serve.scheduler.step_plan import DecodeBatch


class SteadyDecodeBatch:
    """The rows of such a plan, as arrays that the next plan starts from.

    They are valid while the same requests run and no other plan is made. Everything in the arrays is also in the states
    of the requests. Arrays cost the host less time than as many objects; most plans of a full batch are of this kind.

    Args:
        states: States of all running requests, in their order; each has pages.
        running: The list of running requests.
        page_size: Tokens of a page.
    """

    def __init__(self, states: list[RequestState], running: PriorityList, page_size: int) -> None:
        self.states = states
        self._running, self._num_changes = running, running.num_changes
        self._page_size = page_size
        self._request_ids = [state.request.request_id for state in states]
        self._pages = [state.pages for state in states if state.pages is not None]
        self._slots = np.array([pages.slot for pages in self._pages], np.int32)
        self._num_pages = np.array([pages.num_pages for pages in self._pages])
        self._starts = np.array([state.num_planned for state in states], np.int32)
        # All rows advance alike, so that of many numbers the least or the greatest is enough.
        self.longest = int(self._starts.max())  # tokens of the longest request, those of steps in flight counted
        to_come = [state.max_total_len - 1 - state.num_planned for state in states]
        self.steps_to_first_finish, self.steps_to_last_finish = (
            min(to_come),
            max(to_come),
        )  # steps until a request, or all, have their tokens
        self.first_recompute = min(state.steps_to_recompute for state in states)  # steps until one is computed anew
        self._may_wait = True
        self._free_steps = self._least_room()

    @property
    def waits_for_tokens(self) -> bool:
        """Whether a request does, so that steps are planned one by one; for good if not."""
        self._may_wait = self._may_wait and any(state.waits_for_tokens for state in self.states)
        return self._may_wait

    @property
    def is_valid(self) -> bool:
        """Whether the same requests run as at the beginning."""
        return self._num_changes == self._running.num_changes

    def _least_room(self) -> int:
        """Steps for which every row has pages."""
        return int((self._num_pages * self._page_size - self._starts).min())

    def reserve(self, num_steps: int, allocator: PageAllocator) -> bool:
        """Reserves pages for `num_steps` more tokens of every row; False if there are too few.

        Nothing is reserved then.
        """
        if num_steps <= self._free_steps:
            return True
        missing = -(-(self._starts + num_steps) // self._page_size) - self._num_pages
        if missing.sum() > allocator.num_available:
            return False
        while len(rows := np.flatnonzero(missing > 0)):
            allocator.append_pages(
                [self._pages[row] for row in rows.tolist()], self._slots[rows], self._num_pages[rows]
            )
            self._num_pages[rows] += 1
            missing[rows] -= 1
        self._free_steps = self._least_room()
        return True

    def advance(self, num_steps: int) -> DecodeBatch:
        """Plans `num_steps` of every request, which has pages for them; the rows of that plan."""
        for state in self.states:
            state.num_planned += num_steps
            state.num_output_placeholders += num_steps
            state.num_in_flight += 1
        rows = DecodeBatch(self._request_ids, self._slots, self._starts)
        self._starts = self._starts + np.int32(num_steps)
        self.longest += num_steps
        self.steps_to_first_finish -= num_steps
        self.steps_to_last_finish -= num_steps
        self.first_recompute -= num_steps
        self._free_steps -= num_steps
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
            check_equal(f"{name} of steady rows", expected, array.tolist())
