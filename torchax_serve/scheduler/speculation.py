"""Plans of decode steps that verify drafts, and whether they are worth it.

Drafts are found on the device, and so is where each row stands: the host plans the next dispatch before it knows how
many drafts of the last one were accepted. It counts with the most that can have been, in pages and in lengths, and a
commit corrects that.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from torchax_serve.scheduler.config import SchedulerConfig
from torchax_serve.scheduler.draft_tracker import DraftTracker
from torchax_serve.scheduler.page_allocator import PageAllocator
from torchax_serve.scheduler.prefill_budget import PrefillBudget
from torchax_serve.scheduler.request import RequestState
from torchax_serve.scheduler.request_queues import RequestQueues
from torchax_serve.scheduler.speculative_config import SpeculativeConfig
from torchax_serve.scheduler.step_plan import DraftResult, DraftRows, PlanRow, StepPlan

VERIFY_COST = 1.25
"""Cost of a verify step over a decode step before any was measured."""

MARGIN = 1.03
"""Gain from which on steps speculate: estimates are off by a few percent."""

MIN_GAIN = 0.2
"""Expected accepted drafts of a step from which on a row is drafted for."""

UNSURE_STEPS = 4
"""Verify steps in a dispatch while a row may not repeat itself; none is sent before its result, which may end it."""

SURE_RATE = 0.5
"""Fraction of hits of a row that repeats itself: half of its tokens were drafted right."""

NUM_UNSURE = 4
"""New tokens of a row until it is known whether it repeats itself: without a hit, steps do without drafts by then."""

START_ACCEPTED = 0.6
"""Fraction of the drafts of a draft model that is believed to be accepted before any was verified."""

WEIGHT = 0.1
"""Weight of the newest dispatch in the mean number of accepted drafts of a draft model."""

WINDOW = 8
"""Dispatches that the cost of a verify step is a median of."""

REMEASURE_INTERVAL = 256
"""Decode plans after which a cost that forbids to speculate is measured anew."""


class SpeculativePlanner:
    """Plans verify steps.

    Args:
        speculative: The options.
        config: Sizes of the scheduler.
        allocator: Allocator of pages.
        queues: Requests.
        budget: Knows what a decode step takes.

    Attributes:
        num_in_flight: Number of its plans that are not committed.
        num_drafted, num_accepted: Drafts verified since the start, and those that were accepted.
    """

    def __init__(
        self,
        speculative: SpeculativeConfig,
        config: SchedulerConfig,
        allocator: PageAllocator,
        queues: RequestQueues,
        budget: PrefillBudget,
    ) -> None:
        self._speculative, self._config = speculative, config
        self._allocator, self._queues, self._budget = allocator, queues, budget
        self._is_on_device = False  # tokens and lengths of all running requests are
        self._most_s = config.max_fused_decode_s
        self._verify_s: dict[int, deque[float]] = {}
        self._since_verify = 0
        self._accepted = START_ACCEPTED * speculative.num_speculative_tokens
        self.num_in_flight = self.num_drafted = self.num_accepted = 0
        self.waits = False

    def plan(self, most_s: float) -> tuple[list[PlanRow], list[RequestState], DraftRows, int] | None:
        """Returns rows, their states, their drafts and the number of steps of the next plan.

        None: the next plan does not speculate, or, if `waits` is set then, is not to be made before a commit. Its steps
        take at most `most_s` seconds, or there is one.
        """
        self._most_s = most_s
        states = self._candidates()
        caps = None if states is None else self._caps(states)
        drafted = None
        self.waits = self.num_in_flight > 0
        if states is not None and caps is not None:
            is_unsure = self._is_unsure(states, caps)
            must_know = is_unsure or not self._is_on_device
            if must_know and any(state.num_output_placeholders for state in states):
                self.waits = True
                return None
            drafted = self._reserve(states, caps, UNSURE_STEPS if is_unsure else self._config.max_num_steps)
        if drafted is None:
            if not self.num_in_flight:
                self._leave()
            return None
        self._is_on_device = True
        self._since_verify = 0
        self.num_in_flight += 1
        return drafted

    def _candidates(self) -> list[RequestState] | None:
        """Returns the running requests if all of them decode, and no step has to do anything else."""
        queues = self._queues
        if not len(queues.running) or (len(queues.waiting) and self._allocator.num_free_slots):
            return None
        states = []
        for state in queues.running:
            request = state.request
            if state.num_planned < state.num_prefill_tokens:
                return None
            if request.page_ids is not None:  # verify steps know no positions of images
                return None
            if state.waits_for_tokens and state.num_output_placeholders > 1:
                return None
            if state.num_planned < _end(state):
                states.append(state)
            elif not self.num_in_flight and state.steps_to_recompute <= 0:
                return None  # it is computed anew
        return states or None

    def _caps(self, states: list[RequestState]) -> list[int] | None:
        """Returns the most drafts for each row; None if steps without drafts seem faster."""
        config = self._speculative
        most = config.num_speculative_tokens
        caps, expected = [], 0.0
        for state in states:
            if not state.request.speculates or _needs_sampler(state):
                caps.append(0)
                expected += 1
                continue
            gain = self._gain(state)
            is_drafted = not config.adaptive or gain >= MIN_GAIN
            caps.append(most if is_drafted else 0)
            expected += 1 + gain * is_drafted
        if not any(caps):
            return None
        if config.adaptive and expected < MARGIN * self._cost(len(states)) * len(states):
            return None
        return caps

    def _gain(self, state: RequestState) -> float:
        """Returns the expected accepted drafts of a step of a request."""
        config = self._speculative
        if not config.looks_up:
            return self._accepted
        tracker = state.draft_tracker
        if tracker is None:
            tracker = state.draft_tracker = DraftTracker(config.prompt_lookup_min)
        tracker.update(state.tokens, state.prompt_len)
        return _expected_accepted(tracker.rate, config.num_speculative_tokens)

    def _is_unsure(self, states: list[RequestState], caps: list[int]) -> bool:
        """Returns whether a row with drafts is new, or not known to repeat itself."""
        if not self._speculative.adaptive or not self._speculative.looks_up:
            return False
        drafted = [state for state, cap in zip(states, caps, strict=True) if cap]
        is_new = any(len(state.tokens) - state.prompt_len < NUM_UNSURE for state in drafted)
        trackers = (state.draft_tracker for state in drafted)
        return is_new or any(tracker is not None and tracker.rate < SURE_RATE for tracker in trackers)

    def _cost(self, num_rows: int) -> float:
        """Returns the seconds of a verify step over those of a decode step."""
        self._since_verify += 1
        measured = self._verify_s.get(_bucket(num_rows))
        if self._since_verify > REMEASURE_INTERVAL:
            self._since_verify, self._accepted = 0, START_ACCEPTED * self._speculative.num_speculative_tokens
            if measured:
                measured.clear()
        decode_s = self._budget.decode_step_s(num_rows)
        return statistics.median(measured) / decode_s if measured and decode_s else VERIFY_COST

    def step_s(self, num_rows: int) -> float:
        """Returns the expected seconds of a verify step of so many rows; 0 if unknown."""
        measured = self._verify_s.get(_bucket(num_rows))
        if measured:
            return statistics.median(measured)
        return VERIFY_COST * (self._budget.decode_step_s(num_rows) or 0.0)

    def _reserve(
        self, states: list[RequestState], caps: list[int], most: int
    ) -> tuple[list[PlanRow], list[RequestState], DraftRows, int] | None:
        """Plans as many steps as there is time and pages for; None if there are no pages for one."""
        allocator, page_size = self._allocator, self._config.page_size
        num_steps = self._num_steps(states, most)
        while True:
            ends = [
                min(state.num_planned + num_steps * (cap + 1), _end(state))
                for state, cap in zip(states, caps, strict=True)
            ]
            lacking = 0
            for state, end in zip(states, ends, strict=True):
                assert state.pages is not None
                lacking += max(0, -(-end // page_size) - state.pages.num_pages)
            if lacking <= allocator.num_available:
                break
            if num_steps == 1:
                return None
            num_steps //= 2
        allocator.grow_all([(s.pages, end) for s, end in zip(states, ends, strict=True) if s.pages is not None])
        rows, reserved = [], []
        needs_sampler = [_needs_sampler(state) for state in states]
        for state, end in zip(states, ends, strict=True):
            assert state.pages is not None
            rows.append(PlanRow(state.request.request_id, state.pages.slot, state.num_planned, 1, None, True))
            reserved.append(end - state.num_planned)
            state.num_output_placeholders += end - state.num_planned
            state.num_planned = end
            state.num_in_flight += 1
        histories = None if self._is_on_device else [state.tokens for state in states]
        return rows, list(states), DraftRows(ends, caps, reserved, histories, needs_sampler), num_steps

    def _num_steps(self, states: list[RequestState], most: int) -> int:
        if len(self._queues.waiting) or any(map(_needs_sampler, states)):
            return 1  # one may end, and the next one begin; or the sampler has to come between
        step_s, allowed_s = self.step_s(len(states)), self._most_s
        affordable = allowed_s if math.isinf(allowed_s) else allowed_s / step_s if step_s else 1
        to_come = max(_end(state) - state.num_planned for state in states)
        return max(1, int(min(most, affordable, to_come)))

    def _leave(self) -> None:
        """Gives back the pages for drafts that were not accepted; later plans may need them."""
        if not self._is_on_device:
            return
        self._is_on_device = False
        for state in self._queues.running:
            if state.pages is not None:
                self._allocator.shrink(state.pages, state.num_planned)

    def record(self, plan: StepPlan, result: DraftResult | None, duration_s: float | None) -> None:
        """Takes the result of a plan of verify steps; None: it has failed."""
        self.num_in_flight -= 1
        if result is None:
            self._is_on_device = False
            return
        self.num_drafted += result.num_drafted
        self.num_accepted += result.num_accepted
        if result.num_drafted_rows:
            self._accepted += WEIGHT * (result.num_accepted / result.num_drafted_rows - self._accepted)
        if duration_s is not None and result.num_steps:
            measured = self._verify_s.setdefault(_bucket(len(plan.rows)), deque(maxlen=WINDOW))
            measured.append(duration_s / result.num_steps)


def _end(state: RequestState) -> int:
    """Returns the number of positions that decode steps may compute."""
    return int(min(state.max_total_len - 1, state.recompute_len))


def _needs_sampler(state: RequestState) -> bool:
    """Returns whether the next token needs more than its logits and options of a draw."""
    num_new = len(state.tokens) - state.prompt_len
    return state.waits_for_tokens or num_new < state.request.num_unspeculated


def _bucket(num_rows: int) -> int:
    return (num_rows - 1).bit_length()


def _expected_accepted(rate: float, most: int) -> float:
    """Returns the expected accepted drafts of `most`, if each is right with probability `rate`."""
    return sum(rate**i for i in range(1, most + 1))
