"""Snapshots of recurrent states: which borders are kept, what is found, and what goes first. The device checks them."""

import random

import pytest
from scheduler_device import Loop, Oracle, make_config

from torchax_serve import InvalidArgumentError
from torchax_serve.scheduler import CacheGroup, Request, Scheduler, SnapshotGroup, SpeculativeConfig
from torchax_serve.scheduler.state_snapshots import LONG_PROMPT_INTERVAL

PAGES = CacheGroup("full", None, 65)
PAGE = 4


def make(*groups, num=9, **options):
    options = {"snapshots": SnapshotGroup(num), "max_model_len": 200} | options
    config = make_config(*groups, **options)
    return Loop(Scheduler(config), depth=1)


def ask(loop, ids, max_new=3):
    """Runs one request to its end; returns the tokens of its prompt that were found."""
    before, request_id = loop.scheduler.stats().num_hit_tokens, len(loop.tokens)
    loop.scheduler.add(Request(request_id=request_id, prompt_ids=ids, max_new_tokens=max_new))
    loop.drain()
    assert loop.tokens[request_id] == Oracle(loop.device.windows, has_states=True).answer(ids, max_new)
    return loop.scheduler.stats().num_hit_tokens - before


def numbers(start, length):
    return [start + i % 7 for i in range(length)]


@pytest.mark.parametrize("groups", [(PAGES,), (), (PAGES, CacheGroup("window", 6, 33))])
def test_a_prompt_is_found_but_for_its_last_page(groups):
    """So that what a template opens behind a prompt, and the next turn has otherwise, is not part of what is found."""
    loop = make(*groups)
    for length in (1, 4, 5, 8, 9, 12, 13, 40, 41):
        ids = numbers(10 * length, length)
        assert ask(loop, ids) == 0
        expected = max(0, (length - 1) // PAGE * PAGE - PAGE)
        assert ask(loop, ids) == expected
        assert ask(loop, [*ids[: expected or 1], 1, 2, 3, 4, 5]) == expected


@pytest.mark.parametrize("groups", [(PAGES,), ()])
def test_the_third_prompt_of_a_shared_beginning_finds_it(groups):
    loop, shared = make(*groups), numbers(0, 22)
    assert [ask(loop, shared + numbers(20 + i, 30)) for i in range(4)] == [0, 0, 20, 20]


def test_a_conversation_computes_what_is_new():
    loop, ids = make(PAGES), numbers(0, 30)
    for _ in range(3):
        found = ask(loop, ids, max_new=5)
        answer = loop.tokens[len(loop.tokens) - 1]
        assert len(ids) - found <= 30 or not loop.scheduler.stats().num_hit_tokens
        ids = ids + answer + numbers(40, 10)
    assert len(ids) - ask(loop, ids) <= 5 + 10 + 2 * PAGE


def test_a_long_prompt_leaves_some_on_its_way():
    length = 2 * LONG_PROMPT_INTERVAL + 50
    groups = (CacheGroup("full", None, length // PAGE + 40),)
    loop = make(*groups, max_model_len=length + 50, max_num_batched_tokens=4096)
    ids = numbers(0, length)
    loop.scheduler.add(Request(request_id=0, prompt_ids=ids, max_new_tokens=1))
    kept = []
    while len(loop.scheduler):
        plan = loop.step()
        rows = [] if plan is None or not hasattr(plan, "rows") else plan.rows
        kept += [row.context_len + row.states.num_tokens for row in rows if row.states and row.states.num_tokens]
    last = (length - 1) // PAGE * PAGE - PAGE
    assert kept == [LONG_PROMPT_INTERVAL, 2 * LONG_PROMPT_INTERVAL, last]


@pytest.mark.parametrize("length", [LONG_PROMPT_INTERVAL, LONG_PROMPT_INTERVAL + 1])
def test_the_state_behind_a_whole_prompt_stays_in_its_slot(length):
    """A border where a prompt ends is none: decode steps read the slot."""
    groups = (CacheGroup("full", None, length // PAGE + 40),)
    loop = make(*groups, max_model_len=length + 50, max_num_batched_tokens=4096)
    assert ask(loop, numbers(0, length), max_new=4) == 0
    assert ask(loop, numbers(0, length), max_new=4) >= length - 2 * PAGE


@pytest.mark.parametrize("depth", [0, 1])
def test_pages_of_a_window_stay_while_pending_tokens_see_them(depth):
    """Accepted drafts are computed again, in front of what a window leaves of the tokens before."""
    groups = [CacheGroup(name, window, 65, num_behind=4) for name, window in (("full", None), ("window", 10))]
    drafts = SpeculativeConfig(num_speculative_tokens=4, adaptive=False)
    loop = make(*groups, speculative=drafts)
    loop.depth = depth
    for number in range(3):
        ask(loop, numbers(number, 9), max_new=90)
    assert loop.scheduler.stats().num_accepted_tokens > 50


def test_what_was_used_last_stays():
    loop = make(PAGES, num=3)  # two
    prompts = [numbers(10 * i, 20) for i in range(3)]
    assert [ask(loop, ids) for ids in prompts] == [0, 0, 0]
    assert [ask(loop, prompts[i]) for i in (2, 1, 2)] == [12, 12, 12]
    assert ask(loop, prompts[0]) == 0


def test_evicted_snapshots_are_found_in_host_memory():
    loop = make(PAGES, snapshots=SnapshotGroup(3, num_host_snapshots=9))
    prompts = [numbers(10 * i, 20) for i in range(5)]
    assert [ask(loop, ids) for ids in prompts] == [0] * 5
    assert [ask(loop, ids) for ids in prompts] == [12] * 5
    usage = loop.scheduler.stats().pages[-1]
    assert (usage.name, usage.num_pages, usage.num_host_pages) == ("recurrent states", 2, 8)
    assert usage.num_offloaded >= 3 and usage.num_loaded >= 3


def test_requests_that_share_nothing_keep_nothing():
    loop = make(PAGES)
    for request_id in range(2):
        ids = numbers(0, 20)
        request = Request(request_id=request_id, prompt_ids=ids, max_new_tokens=2, cache_prompt=False)
        loop.scheduler.add(request)
        loop.drain()
    assert loop.scheduler.stats().num_hit_tokens == 0
    assert loop.scheduler.stats().pages[-1].num_cached == 0


def test_prefixes_are_forgotten_when_the_cache_is_cleared():
    loop, ids = make(PAGES), numbers(0, 20)
    ask(loop, ids)
    loop.scheduler.clear_prefix_cache()
    loop.scheduler.check_integrity()
    assert [ask(loop, ids), ask(loop, ids)] == [0, 12]


def test_forks_begin_with_the_snapshot_of_their_prompt():
    loop, ids = make(PAGES), numbers(0, 21)
    loop.scheduler.add(Request(request_id=0, prompt_ids=ids, max_new_tokens=6))
    for request_id in (1, 2):
        loop.scheduler.add(Request(request_id=request_id, prompt_ids=ids, max_new_tokens=6, fork_of=0))
    loop.drain()
    wanted = Oracle(loop.device.windows, has_states=True).answer(ids, 6)
    assert loop.tokens == dict.fromkeys(range(3), wanted)
    assert loop.scheduler.stats().num_hit_tokens == 2 * 16


@pytest.mark.parametrize("seed", range(8))
def test_many_requests_at_once_agree_with_each_alone(seed):
    chance = random.Random(seed)
    groups = [CacheGroup("full", None, 24, num_host_pages=chance.choice([1, 9]))] if seed % 4 else []
    snapshots = SnapshotGroup(chance.choice([2, 3, 6]), chance.choice([1, 3]))
    config = make_config(*groups, max_num_seqs=3, snapshots=snapshots)
    loop = Loop(Scheduler(config), depth=seed % 3)
    wanted = {}
    for request_id in range(80):
        ids = [chance.randrange(4)] * chance.choice([9, 17, 24]) + [chance.randrange(3)] * chance.randrange(1, 9)
        max_new = chance.randint(1, 6)
        loop.scheduler.add(Request(request_id=request_id, prompt_ids=ids, max_new_tokens=max_new))
        wanted[request_id] = Oracle(loop.device.windows, has_states=True).answer(ids, max_new)
        for _ in range(chance.randrange(3)):
            loop.step()
    loop.drain()
    assert loop.tokens == wanted
    assert loop.scheduler.stats().num_hit_tokens > 0


def test_a_number_of_snapshots_is_checked():
    with pytest.raises(InvalidArgumentError, match="num_snapshots: expected a whole number >= 1, got 0"):
        SnapshotGroup(0)
