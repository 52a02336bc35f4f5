"""The waiting, running and draining requests, in order."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import operator
from collections.abc import Iterator

from torchax_serve.outputs import FinishReason
from torchax_serve.sampling_params import invalid
from torchax_serve.scheduler.config import SchedulerConfig
from torchax_serve.scheduler.page_allocator import PageAllocator, SequencePages
from torchax_serve.scheduler.page_pool import check_equal
from torchax_serve.scheduler.request import Request, RequestState, Status
from torchax_serve.scheduler.step_plan import RowResult
from torchax_serve.scheduler.types import RequestId

_RANK = operator.attrgetter("rank")


class PriorityList:
    """Request states in the order of their rank: priority, then arrival."""

    def __init__(self) -> None:
        self._states: list[RequestState] = []
        self.num_changes = 0  # so far: while it stays the same, so do the requests
        self.num_prompt_tokens = 0  # of all

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states)

    def __reversed__(self) -> Iterator[RequestState]:
        return reversed(self._states)

    def add(self, state: RequestState) -> None:
        """Inserts `state` by its rank."""
        bisect.insort(self._states, state, key=_RANK)
        self.num_changes += 1
        self.num_prompt_tokens += state.prompt_len

    def remove(self, state: RequestState) -> None:
        """Removes `state`, which must be in the list."""
        index = bisect.bisect_left(self._states, state.rank, key=_RANK)
        assert self._states[index] is state
        del self._states[index]
        self.num_changes += 1
        self.num_prompt_tokens -= state.prompt_len


class RequestQueues:
    """Queues of waiting and running requests, and those that have ended with pages still in use.

    A request that ends or is preempted while plans with it are in flight is *draining*: it keeps its slot and pages,
    which the device still writes to, until the last of those plans is committed.
    """

    def __init__(self, config: SchedulerConfig, allocator: PageAllocator) -> None:
        self.waiting = PriorityList()
        self.running = PriorityList()
        self.ended: list[RowResult] = []  # of requests that ended outside of a commit, until they are asked for
        self.num_preemptions = 0
        self._config = config
        self._allocator = allocator
        self._live: dict[RequestId, RequestState] = {}
        self._draining: dict[int, RequestState] = {}  # by slot
        self._deadlines: list[tuple[float, int, FinishReason, RequestState]] = []  # a heap: when, rank, kind, whose
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_draining(self) -> int:
        """Number of requests whose pages are freed when the plans in flight are committed."""
        return len(self._draining)

    @property
    def num_started(self) -> int:
        """Number of requests that have begun: running, draining, or preempted."""
        return len(self.running) + len(self._draining) + sum(s.status is Status.PREEMPTED for s in self.waiting)

    def prompts(self, now: float) -> Iterator[tuple[float, int]]:
        """Yields, in order, how long each prompt has waited at `now`, and its tokens to compute.

        A request that had its first token and is computed again has not waited for one: minus infinity.
        """
        for state in itertools.chain(self.running, self.waiting):
            if state.pages is not None and not state.wants_prefill:
                continue
            num_tokens = max(len(state.tokens), state.num_prefill_tokens) - state.num_planned
            arrived_s = state.request.arrived_s
            waited_s = 0.0 if arrived_s is None else now - arrived_s
            yield waited_s if state.started_step is None else -math.inf, num_tokens

    def clear_prefix_cache(self) -> None:
        """Removes all cached prefixes; pages that live requests hold are not shared any more."""
        holders = {id(state): state for state in (*self.running, *self._draining.values())}
        self._allocator.clear_prefix_cache(s.pages for s in holders.values() if s.pages is not None)

    def find(self, request_id: RequestId) -> RequestState | None:
        """Returns the state of a request that has not ended; None if there is no such request."""
        return self._live.get(request_id)

    def add(self, request: Request) -> RequestState:
        """Adds a request to the waiting ones.

        Raises:
            InvalidArgumentError: it can never run, its id is taken, or it is no fork of what it says.
        """
        name = f"request {request.request_id!r}"
        if request.request_id in self._live:
            raise invalid(f"{name}: request_id", "one that no live request has", request.request_id, "choose another")
        ids = list(request.known_ids)
        length = len(ids) + 1
        self._config.check_prompt(name, length - 1)
        if request.fork_of is not None:
            parent = self._live.get(request.fork_of)
            asked = (ids, request.salt)
            if parent is None or asked != (parent.tokens[: parent.prompt_len], parent.request.salt):
                expected = "a live request with the same prompt and salt"
                raise invalid(f"{name}: fork_of", expected, request.fork_of, "add it first, or leave fork_of None")
        state = RequestState(
            request,
            (request.priority, self._num_arrived),
            ids,
            length - 1,
            min(length - 1 + request.max_new_tokens, self._config.max_model_len),
            length - 1,
            waits_for_tokens=request.masks is not None,
        )
        rope = self._config.rope
        if rope is not None and rope.recompute_len is not None and state.rope_len <= rope.recompute_len:
            state.recompute_len = rope.recompute_len
        self._num_arrived += 1
        self._live[request.request_id] = state
        self.waiting.add(state)
        self._add_deadline(state, "deadline", request.deadline_s)
        self._add_deadline(state, "queue_deadline", request.queue_deadline_s)
        return state

    def _add_deadline(self, state: RequestState, reason: FinishReason, deadline_s: float | None) -> None:
        """Adds a deadline to the heap.

        Drops those far away of ended requests once they are most of it.
        """
        if deadline_s is None:
            return
        if len(self._deadlines) > 4 * len(self._live) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[3].missed(entry[2])]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_s, state.rank[1], reason, state))

    def start(self, state: RequestState, pages: SequencePages, num_computed: int) -> None:
        """Starts a waiting request on `pages`, whose first `num_computed` tokens are in the cache."""
        self.waiting.remove(state)
        state.status, state.pages = Status.RUNNING, pages
        state.num_computed = state.num_planned = num_computed
        state.publish_due_len = 0
        state.num_prefill_tokens = len(state.tokens)
        self.running.add(state)

    def preempt(self, state: RequestState) -> None:
        """Lets a running request wait again, in its old place; what it has computed is given up.

        Its outputs stay in `RequestState.tokens`. When it starts again they are prefilled with the prompt, except pages
        that are still in the prefix cache, and the sampler is given them anew.
        """
        self.running.remove(state)
        state.status = Status.PREEMPTED
        state.num_computed = state.num_planned = state.num_prefill_tokens = 0
        self.waiting.add(state)
        state.num_preemptions += 1
        self.num_preemptions += 1
        self._release_when_idle(state)

    def finish(self, state: RequestState, reason: FinishReason) -> None:
        """Ends a live request."""
        is_waiting = state.status is not Status.RUNNING
        (self.waiting if is_waiting else self.running).remove(state)
        state.status, state.finish_reason = Status.FINISHED, reason
        del self._live[state.request.request_id]
        if state.pages is not None and state.pages.slot not in self._draining:
            self._release_when_idle(state)

    def step_done(self, state: RequestState) -> None:
        """Notes that a plan in flight with a row of `state` was committed or has failed.

        Behind the last one, pages of a draining request are freed.
        """
        state.num_in_flight -= 1
        if not state.num_in_flight and state.pages is not None and state.pages.slot in self._draining:
            del self._draining[state.pages.slot]
            self._free_pages(state)

    def _release_when_idle(self, state: RequestState) -> None:
        assert state.pages is not None
        if state.num_in_flight:
            self._draining[state.pages.slot] = state
        else:
            self._free_pages(state)

    def _free_pages(self, state: RequestState) -> None:
        assert state.pages is not None
        self._allocator.release(state.pages)
        state.pages = None

    def expire(self, now: float) -> None:
        """Ends every request whose deadline is `now` or before.

        A deadline for waiting ends those that have not begun by then.
        """
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, reason, state = heapq.heappop(self._deadlines)
            if state.missed(reason):
                self.finish_outside_step(state, reason)

    def finish_outside_step(self, state: RequestState, reason: FinishReason) -> None:
        """Ends a live request outside of a commit; its result is stored for `pop_finished`."""
        self.finish(state, reason)
        self.ended.append(RowResult(state.request.request_id, None, (), reason))

    def check_integrity(self, in_flight: list[RequestState]) -> None:
        """Checks the states against each other and against those `in_flight`.

        A state is in flight as often as there are plans with it.

        Raises:
            AssertionError: a request is lost, listed twice, or holds what it should not.
        """
        listed = [*self.waiting, *self.running]
        check_equal("live requests", sorted(map(id, self._live.values())), sorted(map(id, listed)))
        for ranked in (self.waiting, self.running):
            check_equal("order of ranks", sorted(state.rank for state in ranked), [state.rank for state in ranked])
            check_equal("tokens of prompts", sum(state.prompt_len for state in ranked), ranked.num_prompt_tokens)
        draining = list(self._draining.values())
        for state in {id(state): state for state in [*listed, *draining, *in_flight]}.values():
            what = f"request {state.request.request_id!r}"
            num = sum(other is state for other in in_flight)
            check_equal(f"{what}: plans in flight", num, state.num_in_flight)
            is_running = state.status is Status.RUNNING
            holds = is_running or any(other is state for other in draining)
            check_equal(f"{what}: holds pages", holds, state.pages is not None)
            if is_running:
                ahead = state.num_computed <= state.num_planned < len(state.tokens) + state.num_output_placeholders
                check_equal(f"{what}: computed <= planned < known", True, ahead)
        self._allocator.check_integrity([s.pages for s in [*self.running, *draining] if s.pages is not None])
