"""The scheduler against a dictionary of requests: any order of add, abort, schedule, commit, fail and time."""

import dataclasses

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_device import Loop, Oracle

from torchax_serve import InvalidArgumentError
from torchax_serve.scheduler import (
    INVALID_TOKEN,
    CacheGroup,
    Request,
    Scheduler,
    SchedulerConfig,
    SnapshotGroup,
    SpeculativeConfig,
)

GROUPS = [
    (CacheGroup("full", None, 9),),
    (CacheGroup("full", None, 12), CacheGroup("window", 5, 6)),
    (CacheGroup("window", 6, 7),),
    (CacheGroup("full", None, 9, num_host_pages=5),),
    (CacheGroup("full", None, 12, num_host_pages=20), CacheGroup("window", 5, 6, num_host_pages=3)),
    (),
]
VARIANTS = [
    {},
    {"max_num_steps": 3},
    {"max_num_steps": 3, "speculative": SpeculativeConfig(num_speculative_tokens=3, adaptive=False)},
    {"max_num_steps": 2, "speculative": SpeculativeConfig(num_speculative_tokens=5)},
    {"snapshots": SnapshotGroup(3)},
    {"snapshots": SnapshotGroup(4, num_host_snapshots=3), "max_num_steps": 3},
    {"snapshots": SnapshotGroup(1), "enable_prefix_caching": False},
    {
        "snapshots": SnapshotGroup(3),
        "max_num_steps": 2,
        "speculative": SpeculativeConfig(num_speculative_tokens=3, adaptive=False),
    },
    {"allowed_chunk_sizes": (4, 1), "batches_prefill": False, "enable_prefix_caching": False},
]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests on few pages, up to three plans in flight."""

    num_operations = 0

    @initialize(groups=st.sampled_from(GROUPS), variant=st.sampled_from(VARIANTS))
    def begin(self, groups, variant):
        if variant.keys() >= {"snapshots", "speculative"}:
            groups = tuple(dataclasses.replace(group, num_behind=3) for group in groups)
        config = SchedulerConfig(
            groups=groups,
            page_size=4,
            max_num_seqs=3,
            max_model_len=40,
            max_num_batched_tokens=16,
            min_prefill_chunk=4,
            **variant,
        )
        self.scheduler = Scheduler(config)
        self.loop = Loop(self.scheduler)
        self.truth = Oracle(self.loop.device.windows, self.loop.device.has_states).answer
        self.live: dict[int, Request] = {}  # the model
        self.all: dict[int, Request] = {}
        self.dead: set[int] = set()  # ended by the test

    def settle(self):
        SchedulerMachine.num_operations += 1
        for request_id in [*self.loop.reasons]:
            self.live.pop(request_id, None)

    @rule(
        beginning=st.sampled_from([[], [1] * 8, [1] * 9 + [2] * 3]),
        end=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        max_new=st.integers(1, 12),
        priority=st.integers(0, 1),
        deadline=st.sampled_from([None, None, None, 5, 40]),
        queue_deadline=st.sampled_from([None, None, 2, 10]),
        shares=st.sampled_from([True, True, False]),
        stops=st.frozensets(st.integers(0, 49), max_size=3),
    )
    def add(self, beginning, end, max_new, priority, deadline, queue_deadline, shares, stops):
        self.enter(
            prompt_ids=beginning + end,
            max_new_tokens=max_new,
            priority=priority,
            deadline_s=None if deadline is None else self.loop.now + deadline,
            queue_deadline_s=None if queue_deadline is None else self.loop.now + queue_deadline,
            cache_prompt=shares,
            stop_ids=stops,
        )

    @precondition(lambda self: self.live)
    @rule(data=st.data(), max_new=st.integers(1, 12))
    def fork(self, data, max_new):
        parent = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self.enter(prompt_ids=parent.prompt_ids, max_new_tokens=max_new, fork_of=parent.request_id)

    def enter(self, **options):
        request = Request(request_id=len(self.all), **options)
        self.scheduler.add(request)
        with pytest.raises(InvalidArgumentError, match="no live request"):
            self.scheduler.add(request)
        self.all[request.request_id] = self.live[request.request_id] = request
        self.settle()

    @rule(request_id=st.integers(0, 30))
    def abort(self, request_id):
        assert self.scheduler.abort(request_id) == (request_id in self.live)
        if self.live.pop(request_id, None):
            self.dead.add(request_id)
        assert not self.scheduler.abort(request_id)
        self.settle()

    @precondition(lambda self: len(self.loop.flights) < 3)
    @rule(seconds=st.sampled_from([0, 1, 1, 3]))
    def schedule(self, seconds):
        self.loop.now += seconds
        self.loop.schedule()
        self.settle()

    @precondition(lambda self: self.loop.flights)
    @rule(duration=st.sampled_from([None, 0.0, 0.01, 0.02]))
    def commit(self, duration):
        self.loop.commit(duration)
        self.settle()

    @precondition(lambda self: self.loop.flights)
    @rule(data=st.data(), chance=st.integers(0, 5))
    def fail(self, data, chance):
        if chance:
            return
        index = data.draw(st.integers(0, len(self.loop.flights) - 1))
        plan, _ = self.loop.flights[index]
        del self.loop.flights[index]
        del self.loop.device.writers[index]
        expected = {row.request_id for row in plan.rows} & self.live.keys()
        outcomes = self.scheduler.fail(plan)
        assert {outcome.request_id for outcome in outcomes} == expected
        assert all(outcome.finish_reason == "error" and not outcome.token_ids for outcome in outcomes)
        with pytest.raises(InvalidArgumentError, match="in flight"):
            self.scheduler.fail(plan)
        self.dead |= expected
        self.loop.note(outcomes)
        self.settle()

    @precondition(lambda self: self.loop.flights)
    @rule(data=st.data(), chance=st.integers(0, 5))
    def cannot_sample(self, data, chance):
        if chance:
            return
        plan, sampled = self.loop.flights[0]
        index = data.draw(st.integers(0, len(plan.rows) - 1))
        row = plan.rows[index]
        if plan.drafts is None:
            sampled[index, 0] = INVALID_TOKEN
        elif not sampled.tokens[index]:
            return
        else:
            sampled.tokens[index] = (INVALID_TOKEN, *sampled.tokens[index][1:])
        was_live = row.request_id in self.live
        self.loop.commit()
        if row.samples_token and was_live:
            assert self.loop.reasons[row.request_id] == "error"
            self.dead.add(row.request_id)
        self.settle()

    @invariant()
    def agrees(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        assert len(self.scheduler) == len(self.live)
        stats = self.scheduler.stats()
        assert stats.num_running + stats.num_waiting == len(self.live)
        assert stats.num_in_flight == len(self.loop.flights)
        assert all(
            (self.scheduler.find(request_id) is not None) == (request_id in self.live) for request_id in self.all
        )

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        self.loop.drain()
        for request_id, request in self.all.items():
            truth = self.truth(request.prompt_ids, request.max_new_tokens, request.stop_ids)
            got = self.loop.tokens.get(request_id, [])
            reason = self.loop.reasons.get(request_id)
            if reason == "queue_deadline":
                assert got == []
            elif request_id in self.dead or reason == "deadline":
                assert got == truth[: len(got)]
            else:
                assert got == truth, request_id
                assert reason == ("stop" if truth[-1] in request.stop_ids else "length")


def test_any_order_of_calls_agrees_with_a_dictionary():
    SchedulerMachine.num_operations = 0
    SchedulerMachine.TestCase.settings = settings(
        max_examples=250,
        stateful_step_count=60,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    SchedulerMachine.TestCase("runTest").runTest()
    assert SchedulerMachine.num_operations >= 10_000
