"""Spans of a prompt, such as images whose tokens see each other, are computed in one step each."""

import itertools
import random

import pytest

from model_adapters.errors import InvalidArgumentError
from torchax_serve.scheduler import CacheGroup, Request, Scheduler, SchedulerConfig
from torchax_serve.scheduler.types import MAX_TOKEN_ID

BUDGET = 24


def scheduler(**options):
    defaults = {"page_size": 4, "max_num_seqs": 4, "max_model_len": 200, "max_num_batched_tokens": BUDGET}
    return Scheduler(SchedulerConfig(groups=(CacheGroup("full", None, 200),), **{**defaults, **options}))


def chunks_of(made, requests):
    """Runs requests to their end; returns the beginnings and ends of all prefill rows, by request."""
    found = {request.request_id: [] for request in requests}
    for request in requests:
        made.add(request)
    for step in itertools.count():
        plan = made.schedule(float(step))
        if plan is None:
            break
        assert sum(row.num_tokens for row in plan.rows) <= BUDGET
        for row in plan.prefill_rows:
            found[row.request_id].append((row.context_len, row.context_len + row.num_tokens))
        made.commit(plan, [1] * len(plan.rows), float(step), 0.01)
        made.check_integrity()
    assert not len(made)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_chunk_ends_inside_a_span(seed):
    rng = random.Random(seed)
    requests = []
    for number in range(8):
        spans, end = [], 0
        for _ in range(rng.randrange(4)):
            begin = end + rng.randrange(6)
            end = begin + rng.randint(2, 21)  # the most that is left by three other requests that decode
            spans.append((begin, end))
        ids = [rng.randrange(3) for _ in range(end + rng.randint(1, 9))]
        requests.append(
            Request(request_id=number, prompt_ids=ids, max_new_tokens=rng.randint(1, 30), spans=tuple(spans))
        )
    found = chunks_of(scheduler(), requests)
    for request in requests:
        ends = {end for _, end in found[request.request_id]}
        assert len(request.prompt_ids) in ends
        assert not any(begin < end < after for end in ends for begin, after in request.spans)


def test_a_span_is_not_held_up_by_requests_that_decode():
    made = scheduler()
    running = [Request(request_id=number, prompt_ids=[1] * 4, max_new_tokens=150) for number in range(3)]
    for request in running:
        made.add(request)
    now = 0.0
    for _ in range(20):  # a step is measured to be slow, so that prompts get few tokens
        plan = made.schedule(now)
        now += 0.01 + 0.004 * plan.num_prefill_tokens
        made.commit(plan, [1] * len(plan.rows), now, 0.01 + 0.004 * plan.num_prefill_tokens)
    made.add(Request(request_id="image", prompt_ids=[2] * 30, max_new_tokens=2, spans=((5, 26),)))
    for _ in range(60):
        plan = made.schedule(now)
        now += 0.01 + 0.004 * plan.num_prefill_tokens
        made.commit(plan, [1] * len(plan.rows), now, 0.01 + 0.004 * plan.num_prefill_tokens)
        if made.find("image") is None:
            return
    pytest.fail("the image waits for those that decode")


def test_ids_beyond_tokens_are_those_of_features():
    ids = [1, MAX_TOKEN_ID + 7, 2**62]
    with pytest.raises(InvalidArgumentError, match="prompt_ids"):
        Request(request_id=0, prompt_ids=ids, max_new_tokens=1)
    Request(request_id=0, prompt_ids=[1] * len(ids), max_new_tokens=1, page_ids=ids)
