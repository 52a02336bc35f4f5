"""Scheduler: decides which tokens of which requests the next step computes.

It knows no model and no device. Continuous batching is Orca's (Yu et al., 2022), chunked prefill with decode
Sarathi-Serve's (Agrawal et al., 2024), preemption by recomputation vLLM's (Kwon et al., 2023).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from model_adapters.errors import InvalidArgumentError
from torchax_serve.outputs import FinishReason, SchedulerStats
from torchax_serve.sampling_params import invalid
from torchax_serve.scheduler.block_events import BlockEventLog, stable_page_hash
from torchax_serve.scheduler.config import SchedulerConfig
from torchax_serve.scheduler.page_allocator import PageAllocator
from torchax_serve.scheduler.prefill_budget import LatencyGoals, PrefillBudget
from torchax_serve.scheduler.prefix_cache import PageHash, page_hash
from torchax_serve.scheduler.request import Request, RequestState, Status
from torchax_serve.scheduler.request_queues import RequestQueues
from torchax_serve.scheduler.step_plan import RowResult, StepPlan
from torchax_serve.scheduler.step_planner import StepPlanner
from torchax_serve.scheduler.types import RequestId

INVALID_TOKEN = -1
"""What the device reports where it could not sample, as from logits that are not finite: the request fails."""


class _InFlightPlan(NamedTuple):
    plan: StepPlan
    states: list[RequestState]  # in the order of the plan's rows


class Scheduler:
    """Plans steps for requests of any mix.

    The caller loops over `schedule`, the device, `commit`, and may run any number of plans ahead of the commits; plans
    run on the device in the order in which they were made and are committed in that order. Not thread-safe: one
    thread calls it.

    A request ends with the reason "stop" (a stop token), "length" (`max_new_tokens` or `max_model_len` is reached, or
    the request needs more pages than there are), "deadline", "queue_deadline", "abort" or "error".

    Args:
        config: Sizes and policy.
        hash_function: Hash of pages by which prefixes are found; None: a stable one where there are `events`.
        events: Log of the pages that can be found; None: none is kept.
    """

    def __init__(
        self, config: SchedulerConfig, hash_function: PageHash | None = None, events: BlockEventLog | None = None
    ) -> None:
        self.config, self.events = config, events
        default_hash = page_hash if events is None else stable_page_hash
        self._allocator = PageAllocator(config, hash_function or default_hash, events)
        self._queues = RequestQueues(config, self._allocator)
        goals = LatencyGoals(config.max_decode_slowdown, config.tpot_target_s, config.ttft_target_s)
        self._prefill_budget = PrefillBudget(config.min_prefill_chunk, goals)
        self._planner = StepPlanner(config, self._allocator, self._queues, self._prefill_budget)
        self._in_flight: deque[_InFlightPlan] = deque()
        self.num_new_tokens = 0  # since the start, accepted

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._queues)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the prompts of waiting requests."""
        return self._queues.waiting.num_prompt_tokens

    def add(self, request: Request) -> RequestState:
        """Adds `request` to the waiting ones; returns its state, which is read-only for callers.

        Raises:
            InvalidArgumentError: it can never run (prompt and one token exceed `max_model_len`, or all pages of a
                group), its id is that of a live request, or it is no fork of the request it names.
        """
        state = self._queues.add(request)
        state.arrived_step = self._planner.num_planned
        if request.arrived_s is not None:
            self._planner.last_arrival_s = request.arrived_s
        return state

    def find(self, request_id: RequestId) -> RequestState | None:
        """Returns the state of a request that has not ended; None if there is none of that id."""
        return self._queues.find(request_id)

    def abort(self, request_id: RequestId, reason: FinishReason = "abort") -> bool:
        """Ends a request in any state; returns False if no live request has that id.

        The request has no further result. `reason` is "stop" where the caller has seen a stop string.
        """
        state = self._queues.find(request_id)
        if state is not None:
            self._queues.finish(state, reason)
        return state is not None

    def schedule(self, now: float) -> StepPlan | None:
        """Returns the next step, at `now` seconds on the scheduler's clock.

        None if there is nothing to do: there are no requests, or all of them wait for a commit. Requests may have ended
        by their deadline or for lack of pages: see `pop_finished`.
        """
        self._queues.expire(now)
        planned = self._planner.plan(now)
        if planned is None:
            return None
        self._in_flight.append(_InFlightPlan(*planned))
        return planned[0]

    def expected_seconds(self, plan: StepPlan) -> float:
        """Returns the expected seconds of a plan, measured on earlier ones; 0 if unknown."""
        if plan.drafts is not None and self._planner.speculation is not None:
            return plan.num_steps * self._planner.speculation.step_s(plan.num_decode)
        return self._prefill_budget.step_s(plan.num_decode, plan.num_prefill_tokens, plan.num_steps) or 0.0

    def commit(self, plan: StepPlan, tokens: Any, now: float, duration_s: float | None = None) -> list[RowResult]:
        """Takes the result of the oldest plan in flight.

        Args:
            plan: That plan.
            tokens: `DraftResult` of a plan with drafts. Else sampled ids, int[num_rows] or int[num_rows, num_steps] in
                the order of ``plan.rows``; what stands at rows that do not sample is not looked at. `INVALID_TOKEN`
                fails its request.
            now: Seconds on the scheduler's clock; requests past their deadline end (see `pop_finished`).
            duration_s: How long the device was busy with the step, from which `PrefillBudget` learns; None where it is
                not known, or says nothing about later steps because the step was compiled first.

        Returns:
            A result for every row that brought its request tokens or an end.

        Raises:
            InvalidArgumentError: another plan is the oldest, or `tokens` have another shape.
        """
        if not self._in_flight or self._in_flight[0].plan is not plan:
            oldest = f"step {self._in_flight[0].plan.step}" if self._in_flight else "none"
            raise invalid("plan", f"the oldest in flight ({oldest})", f"step {plan.step}", "commit plans in order")
        by_row: Iterable[tuple[int, ...]]
        if plan.drafts is None:
            sampled = _checked_tokens(plan, tokens)
            num_plain = plan.num_decode if (sampled[: plan.num_decode] >= 0).all() else 0
            by_row = zip(*sampled.T.tolist(), strict=True)  # tuples cost less than as many lists
        else:
            num_plain, by_row = 0, tokens.tokens
        if duration_s is not None and not duration_s >= 0:
            raise invalid("duration_s", "seconds >= 0", duration_s, "None if it was not measured")
        entry = self._in_flight.popleft()
        self._record(plan, tokens, duration_s)
        results = []
        # Nearly all rows are decode rows that go on: those take `append_plain`. All others take `_apply_result`, which
        # does the same and also finds the end of a request and commits prefill and draft rows.
        for index, (state, row_tokens) in enumerate(zip(entry.states, by_row, strict=True)):
            if index < num_plain and state.append_plain(row_tokens):
                if state.num_computed >= state.publish_due_len:
                    self._publish(state, state.num_computed)
                self.num_new_tokens += plan.num_steps
                results.append(RowResult(state.request.request_id, index, row_tokens, None))
                continue
            if state.status is not Status.FINISHED:
                outcome = self._apply_result(plan, index, state, row_tokens)
                if outcome is not None:
                    results.append(outcome)
            self._queues.step_done(state)
        self._queues.expire(now)
        return results

    def _record(self, plan: StepPlan, tokens: Any, duration_s: float | None) -> None:
        """Records how long a plan took; `tokens` is None if it has failed."""
        if plan.drafts is not None and self._planner.speculation is not None:
            self._planner.speculation.record(plan, tokens, duration_s)
            duration_s = None  # a verify step's, not a decode step's
        self._prefill_budget.record(plan.step, plan.num_decode, plan.num_prefill_tokens, plan.num_steps, duration_s)

    def _apply_result(
        self, plan: StepPlan, index: int, state: RequestState, sampled: tuple[int, ...]
    ) -> RowResult | None:
        """Applies the result of a row to its request: accepted tokens, and computed cache.

        Tokens behind the one that ends the request are dropped.
        """
        row = plan.rows[index]
        reason: FinishReason | None = None
        accepted: tuple[int, ...] = ()
        most = plan.num_steps if plan.drafts is None else plan.drafts.reserved[index]
        if row.samples_token:
            state.num_output_placeholders -= most
            accepted, reason = self._accept_tokens(state, sampled)
        num_computed = row.context_len + row.num_tokens + max(0, len(accepted) - 1)
        if plan.drafts is not None:
            num_computed = len(state.tokens) - 1
            state.num_planned -= most - len(accepted) if state.status is Status.RUNNING else 0
        if reason != "error":
            self._publish(state, num_computed)
        if state.status is Status.RUNNING:
            state.num_computed = num_computed
        if reason is not None:
            self._queues.finish(state, reason)
        return RowResult(row.request_id, index, accepted, reason) if row.samples_token else None

    def _publish(self, state: RequestState, num_computed: int) -> None:
        assert state.pages is not None
        state.publish_due_len = self._allocator.publish_prefix(state.pages, state.tokens, num_computed)

    def _accept_tokens(
        self, state: RequestState, sampled: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Appends sampled tokens to the request, up to the one that ends it.

        Returns the accepted tokens, and the reason if the request ends.
        """
        request, tokens = state.request, state.tokens
        num_new, room = len(tokens) - state.prompt_len, state.max_total_len - len(tokens)
        reason: FinishReason | None = "length" if len(sampled) >= room else None
        accepted = sampled[:room]
        if min(accepted, default=0) < 0:
            reason = "error"
            accepted = accepted[: next(i for i, token in enumerate(accepted) if token < 0)]
        if not request.stop_ids.isdisjoint(accepted):
            for i in range(max(0, request.min_new_tokens - num_new), len(accepted)):
                if accepted[i] in request.stop_ids:
                    reason, accepted = "stop", accepted[: i + 1]
                    break
        if accepted and state.started_step is None:
            state.started_step = self._planner.num_planned
        tokens += accepted
        self.num_new_tokens += len(accepted)
        return accepted, reason

    def fail(self, plan: StepPlan, reason: FinishReason = "error") -> list[RowResult]:
        """Ends the requests of any plan in flight, whose step has raised; all others go on.

        If the device has lost the cache with it, abort the others too and call `clear_prefix_cache`.

        Raises:
            InvalidArgumentError: the plan is not in flight.
        """
        entry = next((entry for entry in self._in_flight if entry.plan is plan), None)
        if entry is None:
            raise InvalidArgumentError(
                f"plan: expected one in flight, got step {plan.step}; it was committed or failed"
            )
        self._in_flight.remove(entry)
        self._record(plan, None, None)
        results = []
        for index, (row, state) in enumerate(zip(plan.rows, entry.states, strict=True)):
            if state.status is not Status.FINISHED:
                self._queues.finish(state, reason)
                results.append(RowResult(row.request_id, index, (), reason))
            self._queues.step_done(state)
        if plan.page_transfers:
            self.clear_prefix_cache()  # pages may lack what was to be loaded
        return results

    def pop_finished(self) -> list[RowResult]:
        """Returns, once each, the results of requests that ended outside of a commit.

        They ended by deadline or for want of pages.
        """
        ended, self._queues.ended = self._queues.ended, []
        return ended

    def clear_prefix_cache(self) -> None:
        """Removes all cached prefixes.

        Pages that live requests have filled are not found by later ones.
        """
        self._queues.clear_prefix_cache()

    def hold_waiting(self, hold: bool) -> None:
        """Lets no further request begin while `hold` is true; those that have begun go on."""
        self._planner.holds_waiting = hold

    @property
    def num_started(self) -> int:
        """Number of requests that have begun and whose slots are not free yet."""
        return self._queues.num_started

    def stats(self) -> SchedulerStats:
        """Counts for people to look at."""
        speculation = self._planner.speculation
        return SchedulerStats(
            num_running=len(self._queues.running),
            num_waiting=len(self._queues.waiting),
            num_in_flight=len(self._in_flight),
            pages=self._allocator.usage(),
            num_preemptions=self._queues.num_preemptions,
            num_prompt_tokens=self._planner.num_prompt_tokens,
            num_hit_tokens=self._planner.num_hit_tokens,
            num_new_tokens=self.num_new_tokens,
            num_draft_tokens=0 if speculation is None else speculation.num_drafted,
            num_accepted_tokens=0 if speculation is None else speculation.num_accepted,
        )

    def check_integrity(self) -> None:
        """Checks every invariant of requests, pages, slots and prefixes.

        Raises:
            AssertionError: one does not hold; with both sides.
        """
        self._queues.check_integrity([state for entry in self._in_flight for state in entry.states])
        self._planner.check_integrity()


def _checked_tokens(plan: StepPlan, tokens: Any) -> np.ndarray:
    array = np.asarray(tokens)
    shape = (len(plan.rows), plan.num_steps)
    if array.shape == shape[:1] and plan.num_steps == 1:
        array = array[:, None]
    if array.shape != shape or not np.issubdtype(array.dtype, np.integer):
        raise invalid(
            "tokens", f"whole numbers of shape {shape}", f"{array.dtype}{array.shape}", "a row for each of the plan"
        )
    return array
