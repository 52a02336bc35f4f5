"""Plans that follow from the one before are those that would have been made anew."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_device import make_loop, request, truth

from torchax_serve.scheduler import CacheGroup, DecodeBatch, PlanRow

FULL, WINDOW = CacheGroup("full", None, 33), CacheGroup("window", 6, 17)


def asked_for(arrivals):
    return [
        (turn, request(i, prompt_len, max_new, stop_ids=stops))
        for i, (turn, prompt_len, max_new, stops) in enumerate(arrivals)
    ]


def run(asked, aborts, again, *groups, **options):
    """All plans, with the page tables of their moment, and what requests have received."""
    loop = make_loop(*groups, depth=1, **options)
    if not again:
        loop.scheduler._planner._repeat_last_plan = lambda: None
    plans, turn = [], 0
    while turn < 40 or len(loop.scheduler) or loop.flights:
        for when, each in asked:
            if when == turn:
                loop.scheduler.add(each)
        for when, request_id in aborts:
            if when == turn:
                loop.scheduler.abort(request_id)
        num_before = len(loop.plans)
        loop.step()
        plans += [(plan, [table.copy() for table in plan.page_tables]) for plan in loop.plans[num_before:]]
        turn += 1
    return loop, plans


@settings(max_examples=60)
@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 30), st.integers(1, 12), st.integers(1, 30), st.frozensets(st.integers(0, 49), max_size=1)
        ),
        min_size=1,
        max_size=6,
    ),
    aborts=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 5)), max_size=2),
    groups=st.sampled_from([(), (FULL,), (CacheGroup("full", None, 14),), (FULL, WINDOW)]),
    max_num_steps=st.sampled_from([1, 4]),
)
def test_they_are_those_that_would_have_been_made_anew(arrivals, aborts, groups, max_num_steps):
    asked = asked_for(arrivals)
    ours, got = run(asked, aborts, True, *groups, max_num_steps=max_num_steps)
    theirs, expected = run(asked, aborts, False, *groups, max_num_steps=max_num_steps)
    assert len(got) == len(expected)
    for (plan, tables), (other, other_tables) in zip(got, expected, strict=True):
        assert tuple(plan.rows) == tuple(other.rows)
        for name in ("step", "num_decode", "num_steps", "fresh_slots", "page_copies"):
            assert getattr(plan, name) == getattr(other, name)
        assert all(map(np.array_equal, tables, other_tables))
    assert (ours.tokens, ours.reasons) == (theirs.tokens, theirs.reasons)


def test_a_full_batch_is_planned_so_until_a_request_comes_or_ends():
    loop = make_loop(max_num_steps=2)
    first = [request(0, 3, 12), request(1, 5, 30)]
    for each in first:
        loop.scheduler.add(each)
    for _ in range(4):
        loop.step()
    late = request(2, 4, 3)
    loop.scheduler.add(late)
    loop.drain()
    assert loop.tokens == {each.request_id: truth(loop, each) for each in [*first, late]}
    kinds = [isinstance(plan.rows, DecodeBatch) for plan in loop.plans]
    assert kinds[:4] == [False, False, True, True]
    assert not kinds[4], "somebody waits"
    for before, plan in zip(loop.plans, loop.plans[1:], strict=False):
        if isinstance(plan.rows, DecodeBatch):
            assert [row.request_id for row in plan.rows] == [row.request_id for row in before.rows]
    assert sum(kinds) > len(kinds) / 2


def test_rows_in_arrays_are_rows():
    rows = DecodeBatch(["a", 7], np.array([3, 0], np.int32), np.array([12, 40], np.int32))
    expected = (PlanRow("a", 3, 12, 1, None, True), PlanRow(7, 0, 40, 1, None, True))
    assert tuple(rows) == expected == rows[:]
    assert (rows[0], rows[-1], rows[1:]) == (expected[0], expected[1], expected[1:])
    assert len(rows) == 2
    assert all(type(value) is not np.int32 for row in rows for value in row)
