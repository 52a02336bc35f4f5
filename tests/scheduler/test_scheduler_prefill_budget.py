"""A flood of long prompts: running requests keep their pace, and the flood gets through."""

import math
import random

import pytest

from torchax_serve.scheduler import (
    CacheGroup,
    LatencyGoals,
    PrefillBudget,
    Request,
    Scheduler,
    SchedulerConfig,
)

COSTS = {  # seconds of a step with so many decode rows and prefill tokens
    "linear": lambda rows, tokens: 10e-3 + 20e-6 * rows + 50e-6 * tokens,
    "launch": lambda rows, tokens: 5e-3 + (4e-3 + 30e-6 * tokens if tokens else 0),  # a prefill costs by itself
    "padded": lambda rows, tokens: 8e-3 + 1e-3 * -(-rows // 8) + 4e-3 * -(-tokens // 64),
    "slow": lambda rows, tokens: 10e-3 + 2e-3 * tokens,  # the shortest chunk takes three times as long as a step
    "quadratic": lambda rows, tokens: 10e-3 + 20e-6 * tokens + 2e-7 * tokens**2,
}


def run(cost, num_running, flood, seed=0, spikes=False):
    """Seconds per token of the first `num_running` requests, and how many of the flood's prompts were computed."""
    rng = random.Random(seed)
    config = SchedulerConfig(
        groups=(CacheGroup("full", None, 40_000),),
        page_size=16,
        max_num_seqs=num_running + 4,
        max_model_len=4096,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        max_decode_slowdown=2.0,
    )
    scheduler = Scheduler(config)
    for i in range(num_running):
        scheduler.add(Request(request_id=i, prompt_ids=[1] * 20, max_new_tokens=400))
    now, begun, times, flights, done = 0.0, False, {}, [], 0
    while any(scheduler.find(i) for i in range(num_running)):
        decoding = all(len(scheduler.find(i).output_ids) > 40 for i in range(num_running) if scheduler.find(i))
        begun = begun or decoding
        if flood and begun:
            for _ in range(4 - scheduler.stats().num_waiting):
                scheduler.add(Request(request_id=f"flood {rng.random()}", prompt_ids=[2] * 3000, max_new_tokens=4))
        flights.append(scheduler.schedule(now))
        if len(flights) < 2:
            continue  # the host is a step ahead
        plan = flights.pop(0)
        duration = cost(plan.num_decode, plan.num_prefill_tokens) * rng.uniform(0.95, 1.05)
        compiles = spikes and rng.random() < 0.02
        now += duration
        for outcome in scheduler.commit(plan, [5] * len(plan.rows), now, duration * (200 if compiles else 1)):
            if isinstance(outcome.request_id, int):
                times.setdefault(outcome.request_id, []).append(now)
            elif len(outcome.token_ids) and outcome.finish_reason:
                done += 1
    per_token = [(seen[-1] - seen[41]) / (len(seen) - 42) for seen in times.values()]
    return max(per_token), done


@pytest.mark.parametrize("num_running", [1, 7, 30])
@pytest.mark.parametrize("name", COSTS)
def test_a_flood_of_prompts_at_most_doubles_the_time_per_token(name, num_running):
    alone, _ = run(COSTS[name], num_running, flood=False)
    flooded, num_done = run(COSTS[name], num_running, flood=True)
    assert flooded <= 2 * alone
    assert flooded > 1.5 * alone, "the flood could go faster"
    assert num_done > 0 or name == "slow"  # 3,000 tokens take 6 s there, and the running ones end before


def test_steps_that_compiled_do_not_stop_the_flood():
    cost = COSTS["linear"]
    alone, _ = run(cost, 7, flood=False)
    flooded, num_done = run(cost, 7, flood=True, spikes=True)
    assert flooded <= 2 * alone
    assert num_done >= 3


def test_without_decode_rows_the_whole_budget_is_used():
    pacer = PrefillBudget(16, LatencyGoals(2.0))
    assert pacer.next_limit(0, 5000) == 5000


def test_what_is_not_measured_still_advances():
    pacer = PrefillBudget(16, LatencyGoals(2.0))
    limits = [pacer.next_limit(3, 500) for _ in range(200)]
    assert set(limits) == {0, 16}
    assert limits.count(0) < 8


def test_a_quiet_time_buys_no_burst():
    pacer = PrefillBudget(16, LatencyGoals(2.0))
    for step in range(40):
        pacer.record(step, 4, 0, 1, 0.010)
        pacer.record(step, 4, 100, 1, 0.015)  # 50 microseconds a token
    limits = [pacer.next_limit(4, 10_000) for _ in range(50)]
    assert max(limits) == 180  # 9 ms, of the 10 that are allowed


def test_steps_that_fit_a_time():
    pacer = PrefillBudget(16, LatencyGoals(2.0))
    assert pacer.steps_within(0.1, 4) == 1, "nothing is known"
    assert pacer.steps_within(math.inf, 4) == math.inf, "nothing need be"
    pacer.record(0, 4, 0, 2, 0.050)
    assert pacer.steps_within(0.1, 4) == pytest.approx(4)
    assert pacer.steps_within(0.01, 4) == 1
