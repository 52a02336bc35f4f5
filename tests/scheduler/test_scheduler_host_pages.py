"""Evicted prefixes in host memory: found, loaded, and gone by least recent use. The device checks the contents."""

import random

import pytest
from scheduler_device import Loop, Oracle, make_config

from torchax_serve import InvalidArgumentError
from torchax_serve.scheduler import CacheGroup, Request, Scheduler

FULL = CacheGroup("full", None, 9, num_host_pages=33)  # eight pages on the device, 32 on the host


def prompt(number, length=17):
    return [number] * length


def ask(loop, number, length=17, max_new=3):
    """Runs one request to its end; returns the tokens of its prompt that were found."""
    before, request_id = loop.scheduler.stats().num_hit_tokens, len(loop.tokens)
    loop.scheduler.add(Request(request_id=request_id, prompt_ids=prompt(number, length), max_new_tokens=max_new))
    loop.drain()
    loop.scheduler.check_integrity()
    assert loop.tokens[request_id] == Oracle(loop.device.windows).answer(prompt(number, length), max_new)
    return loop.scheduler.stats().num_hit_tokens - before


def make(*groups, **options):
    return Loop(Scheduler(make_config(*groups, **options)))


def test_prefixes_longer_than_the_device_are_found_again():
    loop, without = make(FULL), make(CacheGroup("full", None, 9))
    for number in range(6):  # each takes five pages
        assert ask(loop, number) == ask(without, number) == 0
    assert [ask(loop, number) for number in range(6)] == [16] * 6
    assert sum(ask(without, number) for number in range(6)) == 0
    usage = loop.scheduler.stats().pages[0]
    assert (usage.num_host_pages, usage.num_used) == (32, 0)
    assert usage.num_loaded == loop.device.num_loads > 0
    assert 20 <= usage.num_offloaded < usage.num_loaded + usage.num_host_pages, "what is there is not written again"


def test_the_host_keeps_what_was_used_last():
    loop = make(CacheGroup("full", None, 9, num_host_pages=9))  # two prefixes, besides those on the device
    for number in range(6):
        ask(loop, number)
    assert ask(loop, 5) == 16
    assert ask(loop, 0) == 0
    assert loop.scheduler.stats().pages[0].num_host_used == 8


def test_pages_that_are_loaded_keep_their_place_while_others_are_offloaded():
    """The host is full of the prefix that is asked for, and the pages it needs are full of another one."""
    loop = make(CacheGroup("full", None, 9, num_host_pages=5))
    ask(loop, 1)
    ask(loop, 2, length=30)  # all eight pages: what was of 1 is on the host, and fills it
    assert loop.scheduler.stats().pages[0].num_host_used == 4
    assert ask(loop, 1) == 16


def test_windows_need_the_end_of_a_prefix_only():
    loop = make(CacheGroup("full", None, 9, num_host_pages=33), CacheGroup("window", 5, 5, num_host_pages=9))
    for number in range(3):
        ask(loop, number)
    assert ask(loop, 0) == 16
    full, window = loop.scheduler.stats().pages
    assert full.num_loaded >= 1 and window.num_loaded <= 2


def test_a_cleared_cache_is_empty_on_the_host_too():
    loop = make(FULL)
    for number in range(4):
        ask(loop, number)
    loop.scheduler.clear_prefix_cache()
    loop.scheduler.check_integrity()
    assert loop.scheduler.stats().pages[0].num_host_used == 0
    assert [ask(loop, number) for number in range(4)] == [0] * 4


@pytest.mark.parametrize("seed", range(8))
def test_many_requests_at_once_agree_with_each_alone(seed):
    chance = random.Random(seed)
    groups = [CacheGroup("full", None, 14, num_host_pages=chance.choice([3, 9, 40]))]
    if seed % 2:
        groups.append(CacheGroup("window", 6, 9, num_host_pages=chance.choice([1, 3, 20])))
    loop = Loop(Scheduler(make_config(*groups, max_num_seqs=3)), depth=seed % 3)
    wanted = {}
    for request_id in range(60):
        ids = prompt(chance.randrange(5), chance.choice([9, 17, 24])) + [chance.randrange(3)] * chance.randrange(4)
        loop.scheduler.add(Request(request_id=request_id, prompt_ids=ids, max_new_tokens=chance.randint(1, 6)))
        wanted[request_id] = Oracle(loop.device.windows).answer(
            ids, loop.scheduler.find(request_id).request.max_new_tokens
        )
        for _ in range(chance.randrange(3)):
            loop.step()
    loop.drain()
    assert loop.tokens == wanted
    assert loop.device.num_loads > 0


def test_a_number_of_pages_is_checked():
    with pytest.raises(InvalidArgumentError, match="num_host_pages: expected a whole number >= 1, got 0"):
        CacheGroup("full", None, 9, num_host_pages=0)
