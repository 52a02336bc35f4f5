"""The policy of a step: which rows, how many tokens of each, which requests are preempted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from torchax_serve.scheduler.config import SchedulerConfig
from torchax_serve.scheduler.page_allocator import PageAllocator, SequencePages
from torchax_serve.scheduler.page_pool import PageCopy
from torchax_serve.scheduler.prefill_budget import PrefillBudget
from torchax_serve.scheduler.request import RequestState, Status
from torchax_serve.scheduler.request_queues import RequestQueues
from torchax_serve.scheduler.speculation import SpeculativePlanner
from torchax_serve.scheduler.steady_decode import SteadyDecodeBatch
from torchax_serve.scheduler.step_plan import DraftRows, PlanRow, StepPlan

BURST_DECODE_DELAY = 8
"""Steps for which new requests of a burst delay decoding, so that their prompts are prefilled together."""


LEAST_FUSED_S, ARRIVALS_FRACTION = 0.05, 0.125
"""Several decode steps in a dispatch take at most this fraction of the time since a request arrived, and this many
seconds at least: where one has arrived, the next may be near, and would wait for the end of the dispatch."""


@dataclasses.dataclass(slots=True)
class PlanBuilder:
    """Rows of a plan, and what they leave of its limits."""

    prefill_limit: int  # prompt tokens that this step may take
    outstanding: list[int]  # by group, pages that running requests still need for their prompts
    decode_rows: list[PlanRow] = dataclasses.field(default_factory=list)
    decoding: list[RequestState] = dataclasses.field(default_factory=list)
    prefill_rows: list[PlanRow] = dataclasses.field(default_factory=list)
    prefilling: list[RequestState] = dataclasses.field(default_factory=list)
    copies: list[PageCopy] = dataclasses.field(default_factory=list)
    fresh_slots: list[int] = dataclasses.field(default_factory=list)
    prefill_left: int = 0  # of the limit

    def __post_init__(self) -> None:
        self.prefill_left = self.prefill_limit

    def wanted_chunk(self, config: SchedulerConfig, missing: int) -> int:
        """Returns how many of a prompt's `missing` tokens the step is to compute if there are pages.

        Where only some lengths exist, no prompt is cut into shorter ones for what others leave of a step: each chunk
        reads all weights, and equal ones share a program.
        """
        if not self.prefill_left or (self.prefill_rows and not config.batches_prefill):
            return 0
        wanted, most = (config.chunk_len(min(limit, missing)) for limit in (self.prefill_left, self.prefill_limit))
        return wanted if config.allowed_chunk_sizes is None or wanted == most else 0


class StepPlanner:
    """Turns the queues into the next plan.

    Running requests come first, in order of rank: each decodes one token or computes a chunk of its prompt. One that
    lacks a page preempts running requests of lower rank, lowest first, or else waits for a later step. Then waiting
    requests start, strictly in order, while there are slots, tokens, and pages for their complete prompt.

    The chunk of a prompt in a step is the least of these numbers of tokens:

    * the step's prefill limit, less what the rows before have taken of it. The limit is what `PrefillBudget` allows,
      filled up to the bucket of the step; in a burst, and where no row decodes, the complete token budget;
    * what is missing of the prompt;
    * what there are pages for, now or after a preemption.

    It is then cut to a size that the executor has (`SchedulerConfig.chunk_len`), and in front of an image that would
    not be in it completely (`RequestState.uncut_len`).
    """

    def __init__(
        self, config: SchedulerConfig, allocator: PageAllocator, queues: RequestQueues, prefill_budget: PrefillBudget
    ) -> None:
        self._config = config
        self._allocator = allocator
        self._queues = queues
        self._prefill_budget = prefill_budget
        self._steady_batch: SteadyDecodeBatch | None = None  # of the last plan
        self.speculation: SpeculativePlanner | None = None
        if config.speculative is not None:
            self.speculation = SpeculativePlanner(config.speculative, config, allocator, queues, prefill_budget)
        self._now_s = 0.0  # of the plan that is made
        self._fused_s = 0.0  # most seconds of several decode steps in its dispatch
        self.last_arrival_s = -math.inf
        self.holds_waiting = False  # no request begins; preempted ones continue
        self.num_planned = 0
        self.num_prompt_tokens = 0  # of requests let in, each time they were
        self.num_hit_tokens = 0  # of those, found in the cache

    def plan(self, now: float) -> tuple[StepPlan, list[RequestState]] | None:
        """Returns the next plan and the states of its rows.

        None if no row can be planned at `now` seconds.
        """
        self._now_s = now
        since_s = now - self.last_arrival_s
        self._fused_s = min(self._config.max_fused_decode_s, max(LEAST_FUSED_S, ARRIVALS_FRACTION * since_s))
        if self.speculation is not None:
            drafted = self.speculation.plan(self._fused_s)
            if drafted is not None:
                self._steady_batch = None
                rows, states, drafts, num_steps = drafted
                return self._build(rows, len(rows), num_steps, drafts=drafts), states
            if self.speculation.waits:
                return None
        return self._repeat_last_plan() or self._plan_rows()

    def _repeat_last_plan(self) -> tuple[StepPlan, list[RequestState]] | None:
        """Returns a plan with the rows of the last one; None if anything is to be decided."""
        steady = self._steady_batch
        if steady is None or not steady.is_valid or self._queues.waiting:
            return None
        if steady.steps_to_first_finish <= 0 or steady.first_recompute <= 0:
            return None
        num_decode = len(steady.states)
        num_steps = 1
        if not steady.waits_for_tokens:
            limits = steady.longest, steady.steps_to_last_finish, steady.first_recompute
            num_steps = self._steps_within(num_decode, *limits)
        if not steady.reserve(num_steps, self._allocator):
            return None
        # The result is not needed: no prompt waits. The budget counts its calls as steps.
        self._prefill_budget.next_limit(num_decode, self._config.max_num_batched_tokens - num_decode)
        return self._build(steady.advance(num_steps), num_decode, num_steps), steady.states

    def check_integrity(self) -> None:
        """Checks the data of the last plan.

        Raises:
            AssertionError: it differs from the states of the requests.
        """
        if self._steady_batch is not None and self._steady_batch.is_valid:
            self._steady_batch.check_integrity()

    def _plan_rows(self) -> tuple[StepPlan, list[RequestState]] | None:
        """Returns a plan with rows chosen from the queues; None if no row can be planned."""
        num_decode, prompt = 0, None
        for state in self._queues.running:
            if state.wants_decode:
                num_decode += 1
            elif prompt is None and state.wants_prefill:
                prompt = state
        token_budget = self._config.max_num_batched_tokens - num_decode
        age = self._burst_age(prompt) if num_decode else None
        is_burst = age is not None
        holds_decode = age is not None and age < BURST_DECODE_DELAY
        if is_burst:
            limit = self._config.max_num_batched_tokens if holds_decode else token_budget
        else:
            limit = self._round_up_to_bucket(
                num_decode,
                self._prefill_budget.next_limit(num_decode, token_budget, self._queues.prompts(self._now_s)),
                token_budget,
            )
        first = prompt or next(iter(self._queues.waiting), None)
        if limit and first is not None and first.request.spans:
            limit = min(max(limit, first.least_chunk), token_budget)
        num_steps = self._num_steps(num_decode)
        builder = self._fill(limit, holds_decode, num_steps)
        states = builder.decoding + builder.prefilling
        if not states and (holds_decode or limit < token_budget):
            builder = self._fill(token_budget)  # no prompt fits, or no row decodes: there is no decode latency to keep
            states = builder.decoding + builder.prefilling
        self._steady_batch = None
        if not states:
            return None
        running, rows = self._queues.running, (*builder.decode_rows, *builder.prefill_rows)
        if len(builder.decoding) == len(running) and not self._queues.waiting:
            self._steady_batch = SteadyDecodeBatch(states, running, self._config.page_size)
        plan = self._build(rows, len(builder.decode_rows), num_steps, builder.fresh_slots, builder.copies)
        if not is_burst:
            self._prefill_budget.charge(plan.step, plan.num_decode, plan.num_prefill_tokens)
        return plan, states

    def _build(
        self,
        rows: Sequence[PlanRow],
        num_decode: int,
        num_steps: int,
        fresh_slots: Sequence[int] = (),
        copies: Sequence[PageCopy] = (),
        drafts: DraftRows | None = None,
    ) -> StepPlan:
        transfers = tuple(self._allocator.transfers)
        self._allocator.transfers.clear()
        plan = StepPlan(
            step=self.num_planned,
            rows=rows,
            num_decode=num_decode,
            num_steps=num_steps,
            fresh_slots=tuple(fresh_slots),
            page_copies=tuple(copies),
            page_tables=self._allocator.page_tables,
            page_transfers=transfers,
            drafts=drafts,
        )
        self.num_planned += 1
        return plan

    def _round_up_to_bucket(self, num_decode: int, limit: int, token_budget: int) -> int:
        """Returns `limit` prompt tokens plus those that fill the padding of the step at no cost."""
        if not limit:
            return 0
        fits = next(
            (bucket for bucket in self._config.token_buckets if bucket >= num_decode + limit), num_decode + limit
        )
        return min(fits - num_decode, token_budget)

    def _burst_age(self, prompt: RequestState | None) -> int | None:
        """Returns the age in steps of the burst that the next prompt belongs to; None if to none.

        The age counts from the first token of a running request; the prompt belongs to the burst if it arrived before.
        `prompt` is that of the first running request which still has one to compute; None: of the first that waits.

        Within a burst, decode latency is not protected: a batch that fills up sooner is finished sooner. In the first
        steps no row decodes, so that rows that begin together end together and all steps between are full. That lasts
        for as many steps as requests run at once: an early request in a long queue does not wait for all.
        """
        first = prompt or next(iter(self._queues.waiting), None)
        if first is None:
            return None
        started = [state.started_step for state in self._queues.running if state.started_step is not None]
        if not started:
            return 0
        age = self.num_planned - min(started)
        return age if age <= self._config.max_running and first.arrived_step <= min(started) else None

    def _fill(self, prefill_limit: int, holds_decode: bool = False, num_steps: int = 1) -> PlanBuilder:
        """Returns the rows of running requests, then of waiting ones that start, with pages."""
        builder = PlanBuilder(prefill_limit, [0] * len(self._config.groups))
        page_size = self._config.page_size
        growing: list[tuple[SequencePages, int]] = []  # for several steps; there are pages for all
        for state in tuple(self._queues.running):
            start, pages = state.num_planned, state.pages
            if state.status is not Status.RUNNING:
                continue  # it had to make room
            if start < state.num_prefill_tokens:
                self._continue_prefill(builder, state)
            elif state.wants_decode and not holds_decode:
                assert pages is not None
                if state.steps_to_recompute <= 0:
                    self._queues.preempt(state)
                    continue
                end = start + num_steps
                if end > pages.num_pages * page_size:
                    if num_steps > 1:
                        growing.append((pages, end))
                    elif not self._grow(state, end):
                        continue
                builder.decode_rows.append(PlanRow(state.request.request_id, pages.slot, start, 1, None, True))
                builder.decoding.append(state)
                state.num_planned = end
                state.num_output_placeholders += num_steps
                state.num_in_flight += 1
        self._allocator.grow_all(growing)
        self._start_waiting(builder)
        return builder

    def _grow(self, state: RequestState, length: int) -> int:
        """Grows `state` to `length` tokens or as near as possible, at least by one.

        Returns the length that it has grown to; 0 if it cannot grow.
        """
        assert state.pages is not None
        grown = self._allocator.max_growth(state.pages, length)
        if grown <= state.num_planned:
            if not self._make_room(state):
                return 0
            grown = self._allocator.max_growth(state.pages, length)
        self._allocator.grow_all([(state.pages, grown)])
        return grown

    def _make_room(self, state: RequestState) -> bool:
        """Preempts until `state` can grow by a token; False if it has to wait, or has ended."""
        assert state.pages is not None
        needed = state.num_planned + 1
        while self._allocator.max_growth(state.pages, needed) < needed:
            if self._queues.num_draining:
                return False  # pages are on their way back
            last = next(reversed(self._queues.running))
            if last is not state:
                self._queues.preempt(last)
                continue
            if len(self._queues.running) == 1 and not state.num_in_flight:
                self._queues.finish_outside_step(state, "length")  # it has all pages there are
            return False
        return True

    def _continue_prefill(self, builder: PlanBuilder, state: RequestState) -> None:
        chunk_len = 0
        wanted = builder.wanted_chunk(self._config, state.num_prefill_tokens - state.num_planned)
        if wanted:
            grown = self._grow(state, state.num_planned + wanted)
            chunk_len = state.uncut_len(state.num_planned, self._config.chunk_len(grown - state.num_planned))
            if chunk_len:
                self._add_prefill_row(builder, state, chunk_len)
        if state.wants_prefill and state.pages is not None:
            missing = state.pages.pages_missing(self._config, state.num_prefill_tokens)
            builder.outstanding = [a + b for a, b in zip(builder.outstanding, missing, strict=True)]

    def _add_prefill_row(self, builder: PlanBuilder, state: RequestState, num_tokens: int) -> None:
        assert state.pages is not None
        start, end = state.num_planned, state.num_planned + num_tokens
        samples = end == state.num_prefill_tokens
        ids = tuple(state.tokens[start:end])
        lens = state.rope_len, state.prompt_len
        states, snapshots = state.pages.states, self._allocator.snapshots
        rows = None
        if states is not None and snapshots is not None:
            rows = snapshots.rows_of(states, start, end, min(state.prompt_len, state.num_prefill_tokens - 1))
        row = PlanRow(state.request.request_id, state.pages.slot, start, num_tokens, ids, samples, *lens, rows)
        builder.prefill_rows.append(row)
        builder.prefilling.append(state)
        builder.prefill_left -= num_tokens
        state.num_planned = end
        state.num_output_placeholders += samples
        state.num_in_flight += 1

    def _start_waiting(self, builder: PlanBuilder) -> None:
        """Adds rows of waiting requests, preempted ones among them, in order of rank.

        The first that lacks a slot, tokens or pages ends it: no request behind it starts earlier.
        """
        for state in () if self._is_full(builder) else tuple(self._queues.waiting):
            if self._is_full(builder):
                return
            if self.holds_waiting and state.status is not Status.PREEMPTED:
                continue
            if state.pages is not None or state.num_in_flight:
                return  # preempted, and its last tokens are not known yet; later requests wait for it
            state.grow_rope()
            if self._config.unfit(len(state.tokens)) is not None:
                self._queues.finish_outside_step(state, "length")  # preempted when it had all but outgrown the cache
                continue
            parent = self._parent(state)
            # The whole prompt, though its last token is computed again: a parent that is a fork itself has the page
            # that is to be copied only once a step of its own is committed.
            if parent is not None and parent.num_computed < state.prompt_len:
                continue  # it takes no page from those behind it
            if not builder.wanted_chunk(self._config, len(state.tokens)):
                return
            pages = self._allocate_slot(builder, state, parent)
            if pages is None:
                return
            wanted = self._config.chunk_len(min(builder.prefill_left, state.num_prefill_tokens - state.num_planned))
            length = self._allocator.max_growth(pages, state.num_planned + wanted)
            self._allocator.grow_all([(pages, length)])
            chunk_len = self._config.chunk_len(length - state.num_planned)
            self._add_prefill_row(builder, state, state.uncut_len(state.num_planned, chunk_len))
            missing = pages.pages_missing(self._config, state.num_prefill_tokens)
            builder.outstanding = [a + b for a, b in zip(builder.outstanding, missing, strict=True)]

    def _is_full(self, builder: PlanBuilder) -> bool:
        has_slot = self._allocator.num_free_slots and len(self._queues.running) < self._config.max_running
        return not (has_slot and builder.prefill_left and (self._config.batches_prefill or not builder.prefill_rows))

    def _parent(self, state: RequestState) -> RequestState | None:
        """Returns the request whose computed prompt `state` can share, now or later.

        None if `state` must begin by itself.
        """
        request = state.request
        can_share = (
            request.cache_prompt and self._config.enable_prefix_caching and 1 < state.prompt_len == len(state.tokens)
        )
        if request.fork_of is None or not can_share:
            return None
        parent = self._queues.find(request.fork_of)
        can_share = parent is not None and parent.request.cache_prompt and parent.rope_len == state.rope_len
        return parent if can_share else None

    def _allocate_slot(
        self, builder: PlanBuilder, state: RequestState, parent: RequestState | None
    ) -> SequencePages | None:
        """Starts `state` in a slot, on the pages that it shares; returns them, or None if it waits.

        It shares those of `parent`, or of the prefix cache. It waits unless enough pages remain for its prompt and for
        those of running requests.
        """
        num_running = len(self._queues.running)
        spare = [num + num_running for num in builder.outstanding]  # a page for each, or the next step would preempt
        if not self._allocator.has_pages(spare):
            return None  # the common case while pages are short, known before any look-up
        forked = None
        if parent is not None and parent.pages is not None:
            forked = self._allocator.fork(parent.pages, state.prompt_len - 1)
        if forked is not None:
            pages, copies = forked
            builder.copies += copies
            num_computed = state.prompt_len - 1
        else:
            salt = self._config.prefix_salt(state.request.salt, state.rope_len)
            shares = state.request.cache_prompt
            match = self._allocator.match_prefix(state.tokens, salt, shares)
            if not self._allocator.can_allocate(match, len(state.tokens), spare):
                return None
            num_computed = len(match.nodes) * self._config.page_size
            if not state.uncut_len(num_computed, min(builder.prefill_left, len(state.tokens) - num_computed)):
                return None  # the next image waits for a step that has room for all of it
            pages = self._allocator.allocate_slot(match, salt, shares)
        self._queues.start(state, pages, num_computed)
        if state.num_cached is None:
            state.num_cached, state.started_s = num_computed, self._now_s
        builder.fresh_slots.append(pages.slot)
        self.num_prompt_tokens += len(state.tokens)
        self.num_hit_tokens += num_computed
        return pages

    def _num_steps(self, num_decode: int) -> int:
        """Returns the number of decode steps to dispatch at once.

        Several if every running request decodes and nothing waits. There are pages for all of them.
        """
        config, running = self._config, self._queues.running
        if config.max_num_steps == 1 or len(self._queues.waiting) or not 0 < num_decode == len(running):
            return 1
        if any(state.waits_for_tokens for state in running):
            return 1
        longest = max(state.num_planned for state in running)
        to_come = max(state.max_total_len - state.num_planned for state in running) - 1  # the last token is no input
        num_steps = self._steps_within(num_decode, longest, to_come, min(state.steps_to_recompute for state in running))
        return num_steps if num_steps > 1 and self._has_pages(num_steps) else 1

    def _steps_within(self, num_decode: int, longest: int, to_come: int, to_recompute: float) -> int:
        """Returns the number of decode steps of all running requests that a dispatch may take.

        It is at least one, also where there is no page.
        """
        config, affordable = self._config, self._prefill_budget.steps_within(self._fused_s, num_decode)
        return max(1, int(min(config.max_num_steps, affordable, to_come, to_recompute, config.max_model_len - longest)))

    def _has_pages(self, num_tokens: int) -> bool:
        """Returns whether every running request can grow by `num_tokens` tokens."""
        page_size, running = self._config.page_size, self._queues.running
        num_available = self._allocator.num_available
        if len(running) * -(-num_tokens // page_size) <= num_available:
            return True  # the common case, known without a look at each
        lacking = 0
        for state in running:
            assert state.pages is not None
            lacking += max(0, -(-(state.num_planned + num_tokens) // page_size) - state.pages.num_pages)
        return lacking <= num_available
