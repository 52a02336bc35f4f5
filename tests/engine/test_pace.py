"""The engine keeps a device busy whose pace changes: a real scheduler, and a device that only takes its time."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from engine_requests import engine_request
from transformers import GenerationConfig

from torchax_serve.engine.engine import Engine
from torchax_serve.engine.model_runner import InFlightStep
from torchax_serve.scheduler import CacheGroup, Scheduler, SchedulerConfig

SLOW_S, FAST_S = 0.016, 0.002
MAX_NUM_STEPS = 4


class PacedStep(InFlightStep):
    """A step of a device that only takes its time."""

    ready_s = 0.0

    def is_complete(self):
        return time.monotonic() >= self.ready_s


class PacedRunner:
    """Answers every row with token 1, when a device of `step_s` seconds a step would."""

    num_programs = 0
    num_untimed = 0
    vocab_size = 8
    max_logprobs = 0
    max_encoder_len = None
    span_limits = staticmethod(lambda config: None)
    runs_ahead = True
    cache_is_lost = False
    cache_bytes = 0

    def __init__(self):
        self.step_s = SLOW_S
        self._free_s = 0.0

    def adapter_use(self, name):
        return None

    def close(self):
        pass

    def validate(self, name, request):
        pass

    def execute(self, plan, requests, outputs, masks):
        self._free_s = max(self._free_s, time.monotonic()) + plan.num_steps * self.step_s
        step = PacedStep(plan)
        step.ready_s = self._free_s
        return step

    def read(self, step):
        time.sleep(max(0.0, step.ready_s - time.monotonic()))
        return np.ones((len(step.plan.rows), step.plan.num_steps), np.int32)


@pytest.fixture
def paced():
    config = SchedulerConfig(
        groups=(CacheGroup("full", None, 200),),
        page_size=16,
        max_num_seqs=2,
        max_model_len=2048,
        max_num_batched_tokens=64,
        max_num_steps=MAX_NUM_STEPS,
    )
    runner = PacedRunner()
    engine = Engine(Scheduler(config), runner)
    yield SimpleNamespace(engine=engine, runner=runner)
    engine.close()


def seconds_a_token(tokens, num_tokens):
    """Of the next tokens, over as many as come together with the last of them."""
    begun, num_read = time.monotonic(), 0
    while num_read < num_tokens:
        num_read += len(next(tokens).token_ids)
    return (time.monotonic() - begun) / num_read


def test_a_device_that_was_slow_and_is_not_any_more_is_kept_busy(paced):
    config = GenerationConfig(max_new_tokens=1500)
    tokens = iter(paced.engine.submit(engine_request([5, 6], config, seed=0)))
    assert seconds_a_token(tokens, 20 * MAX_NUM_STEPS) > 0.9 * SLOW_S, "longer than the window of any median"
    paced.runner.step_s = FAST_S
    seconds_a_token(tokens, 40 * MAX_NUM_STEPS)  # in which it is noticed
    assert seconds_a_token(tokens, 40 * MAX_NUM_STEPS) < 0.5 * SLOW_S, "the device's pace, with room for a busy machine"


def test_a_device_that_is_much_quicker_than_its_first_steps_is_kept_busy_at_once(paced):
    """The first steps of a program on a GPU load its kernels; expected times are medians that still hold them."""
    config = GenerationConfig(max_new_tokens=1500)
    tokens = iter(paced.engine.submit(engine_request([5, 6], config, seed=0)))
    seconds_a_token(tokens, 20 * MAX_NUM_STEPS)
    paced.runner.step_s = SLOW_S / 16
    seconds_a_token(tokens, 2 * MAX_NUM_STEPS)  # those in flight
    assert seconds_a_token(tokens, 6 * MAX_NUM_STEPS) < 0.4 * SLOW_S, "well below the 0.75 of waiting it out"
