"""Other weights: pages of before are never found again, and requests that wait can be held."""

import dataclasses

from scheduler_device import make_loop, request

from torchax_serve.scheduler import CacheGroup, Status


def shared(*args, **options):
    return dataclasses.replace(request(*args, **options), cache_prompt=True)


def of_same_prompt(request_id, **options):
    asked = shared(request_id, **options)
    return dataclasses.replace(asked, prompt_ids=[7] * len(asked.prompt_ids))


def test_pages_that_are_cached_are_not_found_after_clearing():
    loop = make_loop()
    loop.scheduler.add(of_same_prompt(0, prompt_len=12, max_new=2))
    while loop.step() is not None:
        pass
    loop.scheduler.clear_prefix_cache()
    loop.scheduler.check_integrity()
    again = loop.scheduler.add(of_same_prompt(1, prompt_len=12, max_new=2))
    loop.step()
    assert again.num_cached == 0


def test_a_request_that_runs_meanwhile_publishes_nothing_of_before_or_after():
    loop = make_loop(max_num_batched_tokens=8)
    first = loop.scheduler.add(of_same_prompt(0, prompt_len=24, max_new=8))
    loop.step()
    assert 0 < first.num_computed < 24, "in the middle of its prompt"
    loop.scheduler.clear_prefix_cache()
    loop.scheduler.check_integrity()
    while first.status is not Status.FINISHED:
        loop.step()
        loop.scheduler.check_integrity()
    again = loop.scheduler.add(of_same_prompt(1, prompt_len=24, max_new=2))
    loop.step()
    assert again.num_cached == 0
    while again.status is not Status.FINISHED:
        loop.step()
    third = loop.scheduler.add(of_same_prompt(2, prompt_len=24, max_new=2))
    loop.step()
    assert third.num_cached > 0, "those that began later share pages as ever"


def test_a_fork_of_a_request_from_before_computes_its_own_prompt():
    loop = make_loop()
    parent = loop.scheduler.add(of_same_prompt(0, prompt_len=12, max_new=8))
    loop.step()
    loop.scheduler.clear_prefix_cache()
    fork = loop.scheduler.add(of_same_prompt(1, prompt_len=12, max_new=4, fork_of=0))
    loop.step()
    assert (parent.status, fork.num_cached) == (Status.RUNNING, 0)
    loop.scheduler.check_integrity()


def test_held_requests_wait_and_those_that_have_begun_go_on():
    loop = make_loop(max_num_seqs=2)
    running = loop.scheduler.add(of_same_prompt(0, prompt_len=4, max_new=6))
    loop.step()
    loop.scheduler.hold_waiting(True)
    held = loop.scheduler.add(of_same_prompt(1, prompt_len=4, max_new=2))
    while running.status is not Status.FINISHED:
        loop.step()
        assert held.status is Status.WAITING
    assert (running.status, loop.scheduler.num_started) == (Status.FINISHED, 0)
    loop.scheduler.hold_waiting(False)
    while held.status is not Status.FINISHED:
        loop.step()
    assert loop.reasons == {0: "length", 1: "length"}


def test_preempted_requests_are_not_held():
    loop = make_loop(CacheGroup("full", None, 7), max_num_seqs=2, depth=1)
    both = [loop.scheduler.add(of_same_prompt(i, prompt_len=6, max_new=14)) for i in range(2)]
    loop.step()
    loop.scheduler.hold_waiting(True)
    for _ in range(200):
        if all(state.status is Status.FINISHED for state in both):
            break
        loop.step()
    assert loop.scheduler.stats().num_preemptions
    assert loop.reasons == {0: "length", 1: "length"}
