"""Plans with drafts: the tokens of single steps on few pages, lengths known on the device alone, when they are made."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_device import Oracle, make_config, make_loop, request, truth

from torchax_serve import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.scheduler import CacheGroup, SpeculativeConfig
from torchax_serve.scheduler.draft_tracker import DraftTracker

ALWAYS = SpeculativeConfig(num_speculative_tokens=3, adaptive=False)


def speculative_loop(*groups, config=ALWAYS, **options):
    return make_loop(*groups, **({"depth": 1, "max_num_steps": 3, "speculative": config} | options))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("groups", [(), (CacheGroup("full", None, 30), CacheGroup("window", 5, 30))])
def test_requests_get_the_tokens_of_single_steps(groups, depth):
    loop = speculative_loop(*groups, depth=depth)
    asked = [request(i + 3, prompt_len=5 + i, max_new=20 + i) for i in range(4)]
    for each in asked:
        loop.scheduler.add(each)
    loop.drain()
    assert loop.tokens == {each.request_id: truth(loop, each) for each in asked}
    stats = loop.scheduler.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    drafted = [plan for plan in loop.plans if plan.drafts is not None]
    on_device = [plan for plan in drafted if plan.drafts.histories is None]
    assert bool(on_device) and len(drafted) < 20, "steps follow each other without the host's tokens"


@settings(max_examples=60, deadline=None)
@given(
    prompt_lens=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    max_new=st.integers(1, 40),
    stops=st.frozensets(st.integers(0, 49), max_size=6),
    num_pages=st.integers(12, 40),
    num_drafts=st.integers(1, 16),
    depth=st.integers(0, 2),
)
def test_few_pages_and_stop_tokens_cost_no_token(prompt_lens, max_new, stops, num_pages, num_drafts, depth):
    config = SpeculativeConfig(num_speculative_tokens=num_drafts, adaptive=False)
    loop = speculative_loop(CacheGroup("full", None, num_pages), depth=depth, config=config, max_model_len=44)
    asked = [request(i + 3, prompt_len=size, max_new=max_new, stop_ids=stops) for i, size in enumerate(prompt_lens)]
    for each in asked:
        loop.scheduler.add(each)
    loop.drain()
    for each in asked:
        oracle = Oracle(loop.device.windows)
        room = min(each.max_new_tokens, 44 - len(each.prompt_ids))
        assert loop.tokens[each.request_id] == oracle.answer(each.prompt_ids, room, stops)


def test_pages_taken_for_drafts_are_given_back():
    loop = speculative_loop(CacheGroup("full", None, 40), max_num_steps=4)
    loop.scheduler.add(request(7, prompt_len=6, max_new=40))
    while not any(plan.drafts is not None for plan in loop.plans):
        loop.step()
    state = loop.scheduler.find(7)
    assert state.pages.num_pages > -(-state.num_computed // 4) + 1
    loop.scheduler.add(request(8, prompt_len=6, max_new=3))
    while loop.plans[-1].drafts is not None:
        loop.step()
    assert state.pages.num_pages <= -(-(state.num_planned + 1) // 4)
    loop.drain()


@pytest.mark.parametrize("options", [{"speculates": False}, {"num_unspeculated": float("inf")}, {"masks": object()}])
def test_a_request_that_has_no_drafts_is_not_speculated_for(options):
    loop = speculative_loop()
    loop.scheduler.add(request(7, max_new=30, **options))
    loop.drain()
    assert all(plan.drafts is None for plan in loop.plans)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("options", [{"num_unspeculated": float("inf")}, {"masks": object()}])
def test_one_that_needs_the_sampler_shares_steps_one_at_a_time(options, depth):
    loop = speculative_loop(depth=depth)
    asked = [request(7, max_new=30), request(8, max_new=30, **options)]
    for each in asked:
        loop.scheduler.add(each)
    loop.drain()
    plans = [plan for plan in loop.plans if plan.drafts is not None]
    shared = [plan for plan in plans if any(plan.drafts.needs_sampler)]
    assert shared and {plan.num_steps for plan in shared} == {1}
    pairs = [pair for plan in shared for pair in zip(plan.drafts.most, plan.drafts.needs_sampler, strict=True)]
    assert {bool(most) for most, does_need in pairs if does_need} == {False}
    assert loop.tokens == {each.request_id: truth(loop, each) for each in asked}


def test_drafts_begin_behind_the_tokens_that_need_the_sampler():
    loop = speculative_loop()
    loop.scheduler.add(request(7, max_new=30, num_unspeculated=6))
    loop.drain()
    first = next(plan for plan in loop.plans if plan.drafts is not None)
    assert len(first.drafts.histories[0]) - 5 >= 6 and list(first.drafts.needs_sampler) == [False]


def test_one_without_drafts_shares_the_steps_of_others():
    loop = speculative_loop()
    asked = [request(7, max_new=30), request(8, max_new=30, speculates=False)]
    for each in asked:
        loop.scheduler.add(each)
    loop.drain()
    plans = [plan for plan in loop.plans if plan.drafts is not None]
    assert any(list(plan.drafts.most) == [3, 0] for plan in plans)
    assert loop.tokens == {each.request_id: truth(loop, each) for each in asked}


def test_text_that_does_not_repeat_is_not_speculated_for():
    loop = speculative_loop(config=SpeculativeConfig(), max_model_len=256)
    loop.scheduler.add(request(7, max_new=100))
    loop.drain()
    drafted = [index for index, plan in enumerate(loop.plans) if plan.drafts is not None]
    assert len(drafted) < len(loop.plans) / 10, "the first steps, until it is known"


def test_a_tracker_counts_what_lookup_would_find():
    repeats, other = DraftTracker(2), DraftTracker(2)
    repeats.update([1, 2, 3, 4] * 12, 4)
    other.update(list(range(48)), 4)
    assert repeats.rate > 0.9 and other.rate < 0.05
    pieces = DraftTracker(2)
    for end in range(4, 49):
        pieces.update(([1, 2, 3, 4] * 12)[:end], 4)
    assert pieces.rate == repeats.rate


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        ({"num_speculative_tokens": 0}, InvalidArgumentError, "expected a whole number from 1 to 16, got 0"),
        ({"num_speculative_tokens": 17}, InvalidArgumentError, "expected a whole number from 1 to 16, got 17"),
        ({"prompt_lookup_min": 5}, InvalidArgumentError, "prompt_lookup_min: expected a whole number from 1 to 4"),
        ({"adaptive": 1}, InvalidArgumentError, "adaptive: expected True or False, got 1"),
        ({"method": "eagle", "model": "x"}, UnsupportedArgumentError, "those of EAGLE-3 are"),
        ({"method": "draft_model"}, InvalidArgumentError, "model: expected the name or folder of a model, got None"),
        ({"model": "x"}, InvalidArgumentError, "model: expected None with method 'ngram', got 'x'"),
        ({"method": "oracle"}, InvalidArgumentError, "'eagle3' or 'mtp', got 'oracle'"),
        ({"method": ["ngram"]}, InvalidArgumentError, "method: expected 'ngram'"),
        ({"disable_by_batch_size": 4}, InvalidArgumentError, "got 'disable_by_batch_size'; leave it out"),
        ("ngram:4", InvalidArgumentError, "expected a mapping such as"),
    ],
)
def test_bad_options_are_one_line(value, error, says):
    with pytest.raises(error) as found:
        SpeculativeConfig.parse(value)
    assert says in str(found.value) and "\n" not in str(found.value)


def test_an_engine_without_drafts_plans_none():
    assert make_config().speculative is None
    loop = make_loop(depth=1)
    loop.scheduler.add(request(7, max_new=20))
    loop.drain()
    assert all(plan.drafts is None for plan in loop.plans)
    assert loop.scheduler.stats().num_draft_tokens == 0
