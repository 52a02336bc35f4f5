"""Who runs when, and how requests end."""

import dataclasses
import math
import subprocess
import sys

import pytest
from scheduler_device import Oracle, make_loop, request, truth

from model_adapters.errors import InvalidArgumentError
from torchax_serve.scheduler import INVALID_TOKEN, CacheGroup, PlanRow, Request, Status
from torchax_serve.scheduler.step_planner import BURST_DECODE_DELAY


def test_neither_jax_nor_torch_is_imported():
    code = (
        "import sys, torchax_serve.scheduler; "
        "print({'jax', 'torch', 'transformers', 'torchax', 'pandas'} & {name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# Order


def test_the_first_plans_of_one_request():
    loop = make_loop(max_num_batched_tokens=8)
    loop.scheduler.add(request(7, prompt_len=10, max_new=2))
    first = loop.step()
    assert [row[:4] for row in first.rows] == [(7, 0, 0, 8)]
    assert first.rows[0].token_ids == (7,) * 8
    assert not first.rows[0].samples_token
    assert first.fresh_slots == (0,)
    second = loop.step()
    assert second.rows[0][:4] == (7, 0, 8, 2)
    assert second.rows[0].samples_token
    assert second.fresh_slots == ()
    third = loop.step()
    assert third.rows == (PlanRow(7, 0, 10, 1, None, True),)
    assert third.num_decode == third.num_steps == 1
    assert third.rows[0].is_decode
    assert loop.step() is None
    assert loop.reasons == {7: "length"}


def test_more_requests_than_slots_wait_and_come_first_come_first_served():
    loop = make_loop(max_num_seqs=2, depth=1)
    asked = [request(i, max_new=3 + i % 3) for i in range(9)]
    for each in asked:
        loop.scheduler.add(each)
    assert loop.scheduler.stats().num_waiting == 9
    loop.drain()
    assert loop.tokens == {each.request_id: truth(loop, each) for each in asked}
    begun = [row.request_id for plan in loop.plans for row in plan.rows if row.context_len == 0]
    assert begun == sorted(begun)
    assert max(len(plan.rows) for plan in loop.plans) == 2


def test_lower_priorities_run_first_and_ties_by_arrival():
    loop = make_loop(max_num_seqs=1)
    for i, priority in enumerate([5, 0, 5, -1, 0]):
        loop.scheduler.add(request(i, priority=priority))
    loop.drain()
    assert list(loop.reasons) == [3, 1, 4, 0, 2]


def test_rows_per_step_can_be_fewer_than_slots():
    loop = make_loop(max_rows_per_step=2)
    for i in range(5):
        loop.scheduler.add(request(i))
    loop.drain()
    assert max(len(plan.rows) for plan in loop.plans) == 2
    assert len(loop.reasons) == 5


def test_prefill_is_cut_into_chunks_beside_decode_rows_under_the_budget():
    loop = make_loop(max_num_batched_tokens=12)
    loop.scheduler.add(request(0, max_new=30))
    loop.step()
    loop.step()  # what comes now is not of its burst
    loop.scheduler.add(request(1, prompt_len=25))
    loop.drain()
    mixed = [plan for plan in loop.plans if plan.decode_rows and plan.prefill_rows]
    assert mixed
    assert all(plan.num_decode + plan.num_prefill_tokens <= 12 for plan in loop.plans)
    chunks = [
        (row.context_len, row.num_tokens) for plan in loop.plans for row in plan.prefill_rows if row.request_id == 1
    ]
    assert len(chunks) > 1
    assert [start for start, _ in chunks] == [sum(num for _, num in chunks[:i]) for i in range(len(chunks))]
    assert sum(num for _, num in chunks) == 25


def test_a_chunk_fills_what_the_step_would_be_padded_with():
    loop = make_loop(max_num_seqs=4, max_model_len=128, max_num_batched_tokens=64, token_buckets=(16, 32, 64))
    loop.scheduler.add(request(1, prompt_len=3, max_new=40))
    loop.step()
    loop.step()  # what comes now is not of its burst
    loop.scheduler.add(request(2, prompt_len=80, max_new=2))
    loop.drain()
    beside = [plan for plan in loop.plans if plan.num_decode and plan.num_prefill_tokens]
    full = [plan.num_decode + plan.num_prefill_tokens for plan in beside[:-1]]
    assert full
    assert set(full) <= {16, 32, 64}
    assert sum(plan.num_prefill_tokens for plan in loop.plans) == 83


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_of_one_burst_begin_to_decode_together(depth):
    loop = make_loop(max_num_seqs=8, max_num_batched_tokens=16, depth=depth)
    asked = [request(i, prompt_len=10, max_new=6) for i in range(8)]
    for each in asked:
        loop.scheduler.add(each)
    loop.drain()
    assert [plan.num_decode for plan in loop.plans] == [0] * 5 + [8] * 5  # prompts of 80 tokens, then tokens 2 to 6
    assert loop.tokens == {each.request_id: truth(loop, each) for each in asked}


def test_a_burst_decodes_beside_prompts_once_it_has_waited():
    loop = make_loop(CacheGroup("full", None, 129), max_num_seqs=8, max_num_batched_tokens=16)
    for i in range(8):
        loop.scheduler.add(request(i, prompt_len=32, max_new=6))
    loop.drain()
    assert not any(plan.num_decode for plan in loop.plans[: 2 + BURST_DECODE_DELAY])  # the first prompt takes two steps
    after = loop.plans[2 + BURST_DECODE_DELAY]
    assert after.num_decode == (2 + BURST_DECODE_DELAY) // 2
    assert after.num_decode + after.num_prefill_tokens == 16


def test_a_burst_decodes_while_the_others_wait_for_a_slot():
    loop = make_loop(max_num_seqs=2, max_num_batched_tokens=16, depth=0)
    for i in range(4):
        loop.scheduler.add(request(i, prompt_len=8, max_new=3))
    loop.drain()
    assert [plan.num_decode for plan in loop.plans] == [0, 2, 2, 0, 2, 2]


@pytest.mark.parametrize("buckets", [(32, 16, 64), (16, 32)])
def test_buckets_out_of_order_or_too_short_are_refused(buckets):
    with pytest.raises(
        InvalidArgumentError, match="token_buckets: expected ascending numbers up to max_num_batched_tokens=64"
    ):
        make_loop(max_num_seqs=4, max_num_batched_tokens=64, token_buckets=buckets)


def test_chunks_of_exact_sizes_and_one_prefill_row_a_plan():
    loop = make_loop(allowed_chunk_sizes=(8, 4, 1), batches_prefill=False, enable_prefix_caching=False)
    asked = [request(i, prompt_len=length) for i, length in enumerate([1, 8, 13, 23])]
    for each in asked:
        loop.scheduler.add(each)
    loop.drain()
    assert loop.tokens == {each.request_id: truth(loop, each) for each in asked}
    assert all(len(plan.prefill_rows) <= 1 for plan in loop.plans)
    loop.scheduler.add(request(4, prompt_len=23))
    loop.drain()  # alone, it has the whole budget
    sizes = [row.num_tokens for plan in loop.plans for row in plan.prefill_rows if row.request_id == 4]
    assert sizes == [8, 8, 4, 1, 1, 1]


def test_a_prompt_is_not_cut_for_what_others_leave_of_a_step():
    # 20 tokens: two chunks of 8, and not a third one of 4 and of a prompt that has 8.
    loop = make_loop(
        allowed_chunk_sizes=(8, 4, 1), enable_prefix_caching=False, max_num_batched_tokens=20, min_prefill_chunk=4
    )
    asked = [request(i, prompt_len=8, max_new=2) for i in range(3)]
    for each in asked:
        loop.scheduler.add(each)
    loop.drain()
    assert loop.tokens == {each.request_id: truth(loop, each) for each in asked}
    assert [[row.num_tokens for row in plan.prefill_rows] for plan in loop.plans][:2] == [[8, 8], [8]]


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 31, 32, 33, 63])
@pytest.mark.parametrize("depth", [0, 1])
def test_prompts_at_the_edges_of_pages_budget_and_length(prompt_len, depth):
    loop = make_loop(CacheGroup("full", None, 18), CacheGroup("window", 7, 18), depth=depth)
    asked = request(1, prompt_len=prompt_len, max_new=70)
    loop.scheduler.add(asked)
    loop.drain()
    assert loop.tokens[1] == truth(loop, asked)[: 64 - prompt_len]
    assert loop.reasons[1] == "length"


# Ends


def test_stop_tokens_end_a_request_but_not_before_the_minimum():
    loop = make_loop(depth=1)
    free = request(3, max_new=20)
    output = truth(loop, free)
    stop = output[4]
    first = output.index(stop)
    loop.scheduler.add(dataclasses.replace(free, request_id=0, stop_ids=frozenset([stop])))
    minimum = dataclasses.replace(free, request_id=1, stop_ids=frozenset(output), min_new_tokens=3, max_new_tokens=9)
    loop.scheduler.add(minimum)
    loop.drain()
    assert loop.tokens == {0: output[: first + 1], 1: output[:4]}
    assert loop.reasons == {0: "stop", 1: "stop"}


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_abort_at_any_moment(depth):
    for moment in range(12):
        loop = make_loop(depth=depth, max_num_batched_tokens=8)
        loop.scheduler.add(request(0, prompt_len=20, max_new=6))
        loop.scheduler.add(other := request(1, prompt_len=5, max_new=8))
        for _ in range(moment):
            loop.step()
        if 0 not in loop.reasons:
            assert loop.scheduler.abort(0)
        assert not loop.scheduler.abort(0)
        assert not loop.scheduler.abort("nobody")
        loop.scheduler.check_integrity()
        loop.drain()
        assert loop.tokens[1] == truth(loop, other)


def test_pages_and_slot_of_the_ended_come_back_when_nothing_in_flight_writes_to_them():
    loop = make_loop(CacheGroup("full", None, 5), max_num_seqs=1, depth=1)
    loop.scheduler.add(request(0, prompt_len=6))
    loop.step()
    loop.schedule()
    assert len(loop.flights) == 2
    loop.scheduler.abort(0)
    loop.scheduler.add(request(1, prompt_len=10))
    for used in (2, 2, 0):
        assert loop.scheduler.stats().pages[0].num_used == used
        if loop.flights:
            assert loop.schedule() is None
            loop.commit()
        loop.scheduler.check_integrity()
    assert loop.schedule().rows[0].slot == 0
    loop.drain()
    assert 0 not in loop.reasons  # the caller has aborted it, and knows


def test_a_stop_in_flight_discards_the_next_token():
    loop = make_loop(depth=1)
    asked = request(2, max_new=9)
    stop = truth(loop, asked)[2]
    loop.scheduler.add(dataclasses.replace(asked, stop_ids=frozenset([stop])))
    loop.drain()
    output = truth(loop, asked)
    assert loop.tokens[2] == output[: output.index(stop) + 1]
    assert loop.scheduler.stats().num_new_tokens == len(loop.tokens[2])
    assert sum(row.samples_token for plan in loop.plans for row in plan.rows) == len(loop.tokens[2]) + 1


def test_known_ends_are_not_planned_beyond():
    loop = make_loop(depth=2)
    loop.scheduler.add(request(0, max_new=3))
    loop.drain()
    assert sum(row.samples_token for plan in loop.plans for row in plan.rows) == 3


def test_deadlines_end_waiting_and_running_requests():
    loop = make_loop(max_num_seqs=1, depth=1)
    loop.scheduler.add(request(0, max_new=50, deadline_s=10.0))
    loop.scheduler.add(request(1, deadline_s=5.0))
    loop.scheduler.add(request(2, deadline_s=100.0))
    loop.scheduler.add(request(3, deadline_s=math.inf))
    for _ in range(4):
        loop.step()
    loop.now = 4.99
    loop.step()
    assert loop.reasons == {}
    loop.now = 5.0
    loop.step()
    assert loop.reasons == {1: "deadline"}
    loop.now = 10.5
    loop.drain()
    assert loop.reasons == {1: "deadline", 0: "deadline", 2: "length", 3: "length"}
    assert 0 < len(loop.tokens[0]) < 50
    loop.now = 200.0  # past the deadline of one that has long ended
    loop.step()
    assert loop.reasons[2] == "length"


def test_deadlines_for_waiting_end_requests_that_have_never_run():
    loop = make_loop(max_num_seqs=2, depth=1)
    for index in range(4):
        loop.scheduler.add(request(index, max_new=20, queue_deadline_s=5.0, deadline_s=100.0))
    loop.step()
    loop.now = 5.0
    loop.drain()
    assert loop.reasons == {0: "length", 1: "length", 2: "queue_deadline", 3: "queue_deadline"}
    assert len(loop.tokens[0]) == len(loop.tokens[1]) == 20


def test_deadlines_for_waiting_spare_preempted_requests():
    loop = make_loop(max_num_seqs=1, depth=1)
    loop.scheduler.add(request(0, max_new=6, queue_deadline_s=5.0))
    loop.step()
    state = loop.scheduler.find(0)
    loop.scheduler._queues.preempt(state)
    loop.now = 6.0
    loop.drain()
    assert loop.reasons == {0: "length"}


def test_deadlines_of_ended_requests_are_dropped():
    loop = make_loop(max_num_seqs=2, depth=1)
    for index in range(400):
        loop.scheduler.add(request(index, max_new=1, queue_deadline_s=1e9, deadline_s=1e9))
        loop.drain()
    assert len(loop.scheduler._queues._deadlines) <= 4 + 64 + 2


def test_deadlines_end_requests_at_a_commit_too():
    loop = make_loop()
    loop.scheduler.add(request(0, deadline_s=2.0))
    loop.schedule()
    loop.now = 3.0
    loop.commit()
    assert loop.reasons == {0: "deadline"}
    assert len(loop.tokens[0]) == 1


def test_a_failing_step_ends_its_requests_and_no_others():
    loop = make_loop(max_num_seqs=2, depth=1)
    for i in range(4):
        loop.scheduler.add(request(i))
    loop.step()
    plan, _ = loop.flights.pop()
    loop.device.landed()
    outcomes = loop.scheduler.fail(plan)
    assert [(outcome.request_id, outcome.finish_reason) for outcome in outcomes] == [(0, "error"), (1, "error")]
    loop.scheduler.check_integrity()
    loop.drain()
    assert loop.reasons == {2: "length", 3: "length"}
    assert loop.tokens[3] == truth(loop, request(3))


def test_a_row_that_cannot_sample_fails_alone():
    loop = make_loop()
    for i in range(2):
        loop.scheduler.add(request(i))
    loop.schedule()
    loop.flights[0][1][0, 0] = INVALID_TOKEN
    loop.commit()
    assert loop.reasons == {0: "error"}
    loop.drain()
    assert loop.tokens == {0: [], 1: truth(loop, request(1))}


def test_what_could_not_be_sampled_from_is_not_found_by_others():
    loop = make_loop()
    asked = Request(request_id=0, prompt_ids=[1] * 9, max_new_tokens=2)
    loop.scheduler.add(asked)
    loop.schedule()
    loop.flights[0][1][0, 0] = INVALID_TOKEN
    loop.commit()
    loop.scheduler.add(asked)
    assert loop.schedule().rows[0].context_len == 0


def test_who_must_not_share_neither_finds_nor_is_found():
    loop = make_loop()
    for i, shares in enumerate([False, True, False, True]):
        loop.scheduler.add(Request(request_id=i, prompt_ids=[1] * 9, max_new_tokens=2, cache_prompt=shares))
        loop.drain()
    loop.scheduler.add(Request(request_id=4, prompt_ids=[2] * 9, max_new_tokens=2, cache_prompt=False))
    loop.scheduler.add(Request(request_id=5, prompt_ids=[2] * 9, max_new_tokens=2, fork_of=4))
    loop.drain()
    first = [next(row.context_len for plan in loop.plans for row in plan.rows if row.request_id == i) for i in range(6)]
    assert first == [0, 0, 0, 8, 0, 0]
    begins = [next(plan.step for plan in loop.plans for row in plan.rows if row.request_id == i) for i in (4, 5)]
    assert begins[0] == begins[1]  # there is nothing to wait for


# Pages run out


def test_the_last_of_the_lowest_priority_makes_room_and_loses_nothing():
    loop = make_loop(CacheGroup("full", None, 11), max_num_seqs=3)
    asked = [request(0, max_new=20, priority=1), request(1, max_new=20), request(2, max_new=20)]
    states = [loop.scheduler.add(each) for each in asked]
    evicted: list[int] = []
    while len(loop.scheduler):
        loop.step()
        evicted += [i for i, state in enumerate(states) if state.status is Status.PREEMPTED and i not in evicted]
        for state in states:
            if state.status is Status.PREEMPTED:
                assert loop.tokens[state.request.request_id] == state.output_ids
    assert evicted[0] == 0
    assert 1 not in evicted
    assert loop.tokens == {each.request_id: truth(loop, each) for each in asked}
    assert next(iter(loop.reasons)) == 1
    loop.drain()


def test_what_a_preempted_request_had_published_is_found_again():
    loop = make_loop(CacheGroup("full", None, 9), max_num_seqs=2)
    for i in range(2):
        loop.scheduler.add(Request(request_id=i, prompt_ids=[i] * 9, max_new_tokens=12))
    loop.drain()
    stats = loop.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.num_hit_tokens > 0
    again = [row for plan in loop.plans for row in plan.prefill_rows if row.request_id == 1][-1]
    assert again.context_len > 0
    assert again.context_len + again.num_tokens > 9  # outputs so far are computed as prompt


def test_who_alone_outgrows_all_pages_ends_with_length():
    for depth in (0, 1):
        loop = make_loop(CacheGroup("full", None, 4), depth=depth)
        asked = request(0, prompt_len=6, max_new=30)
        loop.scheduler.add(asked)
        loop.drain()
        # 12 positions hold the prompt and 6 outputs; the 7th is sampled behind them and cannot be computed further.
        assert loop.tokens[0] == truth(loop, asked)[:7]
        assert loop.reasons[0] == "length"


# Forks and prefixes


def test_a_prefix_is_computed_once():
    loop = make_loop()
    for i in range(3):
        loop.scheduler.add(Request(request_id=i, prompt_ids=[9] * 20 + [i], max_new_tokens=2))
        loop.drain()
    computed = [
        sum(row.num_tokens for plan in loop.plans for row in plan.prefill_rows if row.request_id == i) for i in range(3)
    ]
    assert computed == [21, 1, 1]
    assert loop.scheduler.stats().num_hit_tokens == 40


def test_forks_share_the_prompt_and_copy_its_last_page():
    loop = make_loop(depth=1)
    asked = [Request(request_id=0, prompt_ids=[3] * 11, max_new_tokens=9)]
    asked += [Request(request_id=i, prompt_ids=[3] * 11, max_new_tokens=9, fork_of=0) for i in (1, 2)]
    for each in asked:
        loop.scheduler.add(each)
    loop.drain()
    assert loop.tokens == dict.fromkeys(range(3), truth(loop, asked[0]))
    assert [row.num_tokens for plan in loop.plans for row in plan.prefill_rows] == [11, 1, 1]
    copies = [copy for plan in loop.plans for copy in plan.page_copies]
    assert len(copies) == 2
    assert len({copy.source for copy in copies}) == 1
    assert len({copy.target for copy in copies}) == 2


def test_forks_of_forks_copy_pages_that_are_there():
    loop = make_loop(depth=1)
    for i in range(4):
        fork_of = i - 1 if i else None
        loop.scheduler.add(Request(request_id=i, prompt_ids=[3] * 11, max_new_tokens=9, fork_of=fork_of))
    loop.drain()
    assert loop.tokens == dict.fromkeys(range(4), Oracle((None,)).answer([3] * 11, 9))
    assert loop.device.num_copies == 3


def test_forks_do_not_hold_up_those_behind_them():
    loop = make_loop(max_num_batched_tokens=8)
    loop.scheduler.add(Request(request_id=0, prompt_ids=[3] * 30, max_new_tokens=2))
    loop.scheduler.add(Request(request_id=1, prompt_ids=[3] * 30, max_new_tokens=2, fork_of=0))
    loop.scheduler.add(request(2, prompt_len=2))
    loop.drain()
    first = {
        i: next(k for k, plan in enumerate(loop.plans) if i in [row.request_id for row in plan.rows]) for i in (1, 2)
    }
    assert first[2] < first[1]


# Several steps in one dispatch


def test_several_decode_steps_when_nothing_waits_and_stops_inside_are_cut():
    loop = make_loop(max_num_steps=4, depth=1)
    asked = [request(i, max_new=17 + i) for i in range(3)]
    stop = truth(loop, asked[1])[5]
    asked[1] = dataclasses.replace(asked[1], stop_ids=frozenset([stop]))
    for each in asked:
        loop.scheduler.add(each)
    loop.drain()
    assert loop.tokens == {each.request_id: truth(loop, each) for each in asked}
    assert {plan.num_steps for plan in loop.plans} == {1, 4}
    assert all(plan.num_steps == 1 for plan in loop.plans if plan.prefill_rows)


def test_one_step_at_a_time_while_somebody_waits_or_pages_are_short():
    loop = make_loop(max_num_steps=4, max_num_seqs=1)
    loop.scheduler.add(request(0, max_new=12))
    loop.scheduler.add(request(1, max_new=12))
    while 0 not in loop.reasons:
        assert loop.step().num_steps == 1
    loop.drain()
    assert any(plan.num_steps == 4 for plan in loop.plans)
    edge = make_loop(max_num_steps=8, max_model_len=32)
    edge.scheduler.add(request(0, prompt_len=25, max_new=30))
    edge.scheduler.add(request(1, prompt_len=2, max_new=30))
    edge.drain()
    assert {i: len(tokens) for i, tokens in edge.tokens.items()} == {0: 7, 1: 30}
    assert any(plan.num_steps == 8 for plan in edge.plans)
    short = make_loop(CacheGroup("full", None, 4), max_num_steps=8)
    short.scheduler.add(request(0, prompt_len=8, max_new=12))
    short.drain()
    assert {plan.num_steps for plan in short.plans} == {1}
