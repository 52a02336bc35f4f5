"""Requests that arrive at a rate: times to the first token and per token, beside vLLM's policy on the same device.

The device is a clock: a step takes what was measured of 184 million parameters in bfloat16 on two cores. The other
policy is written out here: first come, first served, prompts first, in whole steps.
"""

import math
import random
import statistics
from typing import NamedTuple

import pytest

from torchax_serve.scheduler import CacheGroup, Request, Scheduler, SchedulerConfig

NUM_REQUESTS, NUM_ROWS, NUM_TOKENS = 64, 32, 256
PROMPT_TOKEN_S = 0.4e-3


def step_s(num_decode, num_prefill, num_steps=1):
    decode = 10.5e-3 + 0.22e-3 * num_decode if num_decode else 6e-3
    return num_steps * decode + PROMPT_TOKEN_S * num_prefill


class Arrival(NamedTuple):
    at_s: float
    prompt_len: int
    num_tokens: int

    def of_scheduler(self, request_id):
        return Request(
            request_id=request_id,
            prompt_ids=[1] * self.prompt_len,
            max_new_tokens=self.num_tokens,
            arrived_s=self.at_s,
        )


class Device:
    """A clock in place of a device, with an engine's host that is at most a step ahead.

    The host plans the next step when a quarter of the last one is still to run, by what the scheduler expects.
    """

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.first_s, self.end_s = {}, {}
        self._flights = []  # plan, seconds when it began, its end, seconds that were expected
        self._has_nothing = False  # to plan, before a step ends
        self.now_s = 0.0

    def _due_s(self):
        if not self._flights:
            return -math.inf
        if self._has_nothing or len(self._flights) == 2:
            return math.inf
        _, began, _, expected = self._flights[0]
        return began + 0.75 * expected

    def next_s(self):
        """When the host plans or reads next; infinite: only when a request arrives."""
        if not self._flights:
            return math.inf if self._has_nothing else self.now_s
        return max(self.now_s, min(self._due_s(), self._flights[0][2]))

    def move(self, now):
        """Plans a step at `now`, or reads the one that has ended."""
        self.now_s = now
        if self._flights and self._flights[0][2] <= now:
            plan, began, end, _ = self._flights.pop(0)
            for result in self.scheduler.commit(plan, [[5] * plan.num_steps] * len(plan.rows), now, end - began):
                self.first_s.setdefault(result.request_id, now)
                if result.finish_reason is not None:
                    self.end_s[result.request_id] = now
            self._has_nothing = False
            return
        plan = self.scheduler.schedule(now)
        self._has_nothing = plan is None
        if plan is not None:
            began = max(now, self._flights[-1][2] if self._flights else now)
            expected = self.scheduler.expected_seconds(plan)
            end = began + step_s(plan.num_decode, plan.num_prefill_tokens, plan.num_steps)
            is_paced = plan.num_steps > 1 or (plan.num_decode and expected > 0.02)
            self._flights.append((plan, began, end, expected if is_paced else 0.0))


class Times(NamedTuple):
    """Medians and percentiles in seconds, and tokens per second of the clock."""

    ttft: float
    ttft_p95: float
    ttft_p99: float
    tpot: float
    tpot_p99: float
    rate: float


def poisson(rate, seed):
    rng, now, requests = random.Random(seed), 0.0, []
    for _ in range(NUM_REQUESTS):
        now += rng.expovariate(rate)
        requests.append(Arrival(now, rng.randint(16, 512), rng.randint(16, 128)))
    return requests


def times_of(requests, first_s, end_s):
    waited = sorted(first_s[i] - each.at_s for i, each in enumerate(requests))
    paces = sorted((end_s[i] - first_s[i]) / (each.num_tokens - 1) for i, each in enumerate(requests))
    most, last = int(0.95 * len(requests)), int(0.99 * len(requests))
    total = sum(each.num_tokens for each in requests) / (max(end_s.values()) - requests[0].at_s)
    return Times(statistics.median(waited), waited[most], waited[last], statistics.median(paces), paces[last], total)


def served(requests, **options):
    config = SchedulerConfig(
        groups=(CacheGroup("full", None, 4096),),
        page_size=16,
        max_num_seqs=NUM_ROWS,
        max_model_len=1024,
        max_num_batched_tokens=NUM_TOKENS,
        enable_prefix_caching=False,
        max_num_steps=16,
        max_fused_decode_s=0.1,
        **options,
    )
    device, now, num_added = Device(Scheduler(config)), 0.0, 0
    while len(device.end_s) < len(requests):
        now = device.next_s()
        if math.isinf(now):
            now = requests[num_added].at_s
        while num_added < len(requests) and requests[num_added].at_s <= now:
            device.scheduler.add(requests[num_added].of_scheduler(num_added))
            num_added += 1
        device.move(now)
    return times_of(requests, device.first_s, device.end_s)


def prompts_first(requests):
    now, num_added, waiting, running = 0.0, 0, [], {}
    first_s, end_s = {}, {}
    while len(end_s) < len(requests):
        while num_added < len(requests) and requests[num_added].at_s <= now:
            waiting.append([num_added, requests[num_added].prompt_len])
            num_added += 1
        if not waiting and not running:
            now = requests[num_added].at_s
            continue
        decoding, left, begun = list(running), NUM_TOKENS - len(running), []
        while waiting and left and len(running) + len(begun) < NUM_ROWS:
            chunk = min(left, waiting[0][1])
            left, waiting[0][1] = left - chunk, waiting[0][1] - chunk
            if not waiting[0][1]:
                begun.append(waiting.pop(0)[0])
        now += step_s(len(decoding), NUM_TOKENS - len(decoding) - left)
        for i in begun:
            running[i], first_s[i] = 0, now
        for i in (*decoding, *begun):
            running[i] += 1
            if running[i] == requests[i].num_tokens:
                end_s[i] = now
                del running[i]
    return times_of(requests, first_s, end_s)


def medians(each):
    return Times(*(statistics.median(values) for values in zip(*each, strict=True)))


@pytest.mark.parametrize("rate", [1, 4, 8])
def test_first_tokens_come_as_soon_as_where_prompts_go_first(rate):
    loads = [poisson(rate, seed) for seed in range(4)]
    ours, other = medians(map(served, loads)), medians(map(prompts_first, loads))
    assert ours.ttft <= 1.2 * other.ttft + 0.03, "what is left of a step when a request arrives"
    assert ours.ttft_p99 <= 1.1 * other.ttft_p99 + 0.05
    assert ours.tpot <= 1.1 * other.tpot
    assert ours.tpot_p99 <= 1.25 * other.tpot_p99
    assert ours.rate >= 0.93 * other.rate


def test_prompts_that_are_held_back_wait_for_each_other():
    load = poisson(6, 0)
    assert served(load, max_decode_slowdown=2.0).ttft > 3 * served(load).ttft


@pytest.mark.parametrize("rate", [1, 4])
@pytest.mark.parametrize("target_s", [0.6, 1.0])
def test_first_tokens_come_in_the_time_that_was_asked_for(rate, target_s):
    loads = [poisson(rate, seed) for seed in range(4)]
    goal, plain = medians(served(load, ttft_target_s=target_s) for load in loads), medians(map(served, loads))
    assert goal.ttft_p95 <= target_s
    assert goal.ttft > 1.2 * plain.ttft, "prompts take the time that they have"


@pytest.mark.parametrize("rate", [2, 8])
def test_tokens_come_at_the_pace_that_was_asked_for(rate):
    loads = [poisson(rate, seed) for seed in range(4)]
    assert medians(served(load, tpot_target_s=0.04) for load in loads).tpot_p99 <= 0.04
    assert medians(served(load, tpot_target_s=0.025) for load in loads).tpot_p99 <= 0.025


def test_a_pace_that_no_step_keeps_still_lets_prompts_in():
    times = served(poisson(2, 0)[:16], tpot_target_s=0.001)
    assert times.tpot <= 0.02, "a tenth of the time is left for prompts"
    assert math.isfinite(times.ttft)
