"""Thousands of random requests on scarce pages: every token exact, every page back."""

import random

import pytest
from scheduler_device import Loop, Oracle
from thorough import thorough

from torchax_serve.scheduler import CacheGroup, Request, Scheduler, SchedulerConfig

PREFIXES = [[7, 3] * 7, [7, 3] * 5 + [1, 1], [5] * 19]


def random_request(rng: random.Random, request_id: int) -> Request:
    """Some begin alike, some stop early, some keep to themselves. At most 30 + 30 tokens."""
    prompt = rng.choice([[], *PREFIXES]) + [rng.randrange(4) for _ in range(rng.randrange(1, 12))]
    max_new = rng.randrange(1, 31)
    return Request(
        request_id=request_id,
        prompt_ids=prompt,
        max_new_tokens=max_new,
        min_new_tokens=rng.choice([0, 0, min(3, max_new)]),
        stop_ids=frozenset(rng.sample(range(50), 2)) if rng.random() < 0.3 else frozenset(),
        priority=rng.choice([0, 0, 0, 1]),
        deadline_s=None,
        salt=rng.choice(["", "", "tenant"]),
        cache_prompt=rng.random() > 0.1,
    )


def forks_of(request: Request, rng: random.Random) -> list[Request]:
    """Two further answers to the same prompt."""
    return [
        Request(
            request_id=request.request_id + i,
            prompt_ids=request.prompt_ids,
            max_new_tokens=rng.randrange(1, 31),
            salt=request.salt,
            fork_of=request.request_id,
        )
        for i in (1, 2)
    ]


CONFIGS = {  # the longest request has 59 tokens to compute: 15 pages
    "full": {"groups": (CacheGroup("full", None, 17),)},
    "window": {"groups": (CacheGroup("full", None, 18), CacheGroup("sliding", 9, 11)), "max_num_steps": 4},
    "windows only": {"groups": (CacheGroup("one", 5, 8), CacheGroup("more", 13, 11))},
    "recurrent": {
        "groups": (CacheGroup("full", None, 17),),
        "allowed_chunk_sizes": (16, 8, 4, 1),
        "batches_prefill": False,
        "enable_prefix_caching": False,
    },
    "few rows": {"groups": (CacheGroup("full", None, 24),), "max_rows_per_step": 3, "max_num_steps": 8},
}


@pytest.mark.parametrize(
    ("name", "num_requests"),
    [
        thorough("full", 1000),
        ("window", 1000),
        thorough("windows only", 300),
        ("recurrent", 300),
        thorough("few rows", 300),
    ],
)
def test_every_finished_request_is_token_exact(name: str, num_requests: int) -> None:
    rng = random.Random(name)
    config = SchedulerConfig(
        page_size=4, max_num_seqs=8, max_model_len=64, max_num_batched_tokens=40, min_prefill_chunk=8, **CONFIGS[name]
    )
    scheduler = Scheduler(config)
    loop = Loop(scheduler)
    requests: dict[int, Request] = {}
    doomed: set[int] = set()
    aborted: set[int] = set()
    while len(requests) < num_requests or len(scheduler):
        while len(requests) < num_requests and len(scheduler) < 24 and rng.random() < 0.7:
            request = random_request(rng, len(requests))
            for sibling in [request, *(forks_of(request, rng) if rng.random() < 0.15 else ())]:
                scheduler.add(sibling)
                requests[sibling.request_id] = sibling
                if rng.random() < 1 / 3:
                    doomed.add(sibling.request_id)
        loop.depth = rng.choice([0, 1, 1, 1, 2])
        for request_id in rng.sample(sorted(doomed), min(len(doomed), rng.choice([0, 0, 1, 2]))):
            if scheduler.abort(request_id):
                aborted.add(request_id)
                assert not scheduler.abort(request_id)
            doomed.discard(request_id)
        loop.step()
        if rng.random() < 0.01:
            loop.drain()  # a lull
    loop.drain()
    oracle = Oracle(loop.device.windows)
    for request_id, request in requests.items():
        stops, min_new = request.stop_ids, request.min_new_tokens
        truth = oracle.answer(request.prompt_ids, request.max_new_tokens, stops, min_new)
        got = loop.tokens.get(request_id, [])
        if request_id in aborted:
            assert got == truth[: len(got)]
        else:
            assert got == truth
            stopped = truth[-1] in stops and len(truth) > min_new
            assert loop.reasons[request_id] == ("stop" if stopped else "length")
    stats = scheduler.stats()
    assert len(aborted) > num_requests / 6
    assert stats.num_preemptions > num_requests / 100, "pages were meant to be scarce"
    if config.enable_prefix_caching:
        assert stats.num_hit_tokens > stats.num_prompt_tokens / 10
        assert loop.device.num_copies > num_requests / 100, "forks were meant to copy pages"
    else:
        assert stats.num_hit_tokens == loop.device.num_copies == 0
    if config.max_num_steps > 1:
        assert any(plan.num_steps > 1 for plan in loop.plans)
