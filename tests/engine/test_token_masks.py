"""Requests with token masks: they keep to them, and the requests next to them get the tokens they get alone."""

import numpy as np
import pytest
from engine_models import VOCAB_SIZE, expected_tokens, tiny_model

from model_adapters.errors import NoTokenLeftError
from torchax_serve import EngineOptions, RequestError, SamplingParams, serve

SMALL = EngineOptions(max_model_len=64, max_num_seqs=4, page_size=8, max_num_batched_tokens=32)
PROMPT = [5, 9, 11, 7]


class OnlyAfter:
    """Allows the tokens of a fixed answer, one a step; records what the engine says the answer is so far."""

    def __init__(self, answer, fails_at=None):
        self.answer, self.fails_at, self.seen = answer, fails_at, []

    def fill(self, bitmask, output_ids):
        self.seen.append(list(output_ids))
        if len(output_ids) == self.fails_at:
            raise ValueError("no mask")
        bitmask[:] = 0
        token = self.answer[len(output_ids)]
        bitmask[token // 32] = np.array(1 << (token % 32), np.uint32).view(np.int32)


@pytest.fixture(scope="module", params=["llama", "mamba"])
def model(request):
    with serve(tiny_model(request.param), engine=SMALL) as served:
        served.engine.check_integrity = True
        yield served, request.param


def start(served, prompt, num_tokens, masks=None, **params):
    config = served.generation_config
    return served.iter_tokens(
        prompt, config, params=SamplingParams(max_new_tokens=num_tokens, **{"temperature": 0, **params}), masks=masks
    )


@pytest.mark.parametrize("params", [{}, {"temperature": 1.5, "seed": 3}, {"presence_penalty": 0.5, "logprobs": 2}])
def test_a_masked_request_writes_what_its_masks_allow(model, params):
    served, _ = model
    answer = [31, 32, 63, 64, 0, VOCAB_SIZE - 1, 40, 40]
    masks = OnlyAfter(answer)
    assert list(start(served, PROMPT, len(answer), masks, **params)) == answer
    assert masks.seen == [answer[:length] for length in range(len(answer))]


def test_requests_next_to_it_get_the_tokens_they_get_alone(model):
    served, name = model
    answer = [7] * 12
    streams = [start(served, [5 + index, 9], 20) for index in range(3)]
    masked = start(served, PROMPT, len(answer), OnlyAfter(answer))
    assert list(masked) == answer
    for index, stream in enumerate(streams):
        assert list(stream) == expected_tokens(name, [5 + index, 9], 20)


def test_a_plain_request_in_the_same_slot_is_not_masked(model):
    served, name = model
    for _ in range(5):
        assert list(start(served, PROMPT, 3, OnlyAfter([1, 2, 3]))) == [1, 2, 3]
        assert list(start(served, PROMPT, 6)) == expected_tokens(name, PROMPT, 6)


def test_a_failing_mask_fails_its_own_request_alone(model):
    served, name = model
    plain = start(served, PROMPT, 12)
    failing = start(served, PROMPT, 12, OnlyAfter([7] * 12, fails_at=4))
    with pytest.raises(RequestError, match="no mask"):
        list(failing)
    assert list(plain) == expected_tokens(name, PROMPT, 12)


def test_masks_and_other_options_that_leave_no_token_are_named(model):
    served, name = model
    plain = start(served, PROMPT, 12)
    with pytest.raises(NoTokenLeftError, match=r"after 0 .*, got allowed_token_ids, masks, which forbid all together"):
        start(served, PROMPT, 4, OnlyAfter([7] * 4), allowed_token_ids=[8, 9], suppress_tokens=[3])
    late = start(served, PROMPT, 4, OnlyAfter([7, 8, 9, 9]), bad_words_ids=[[8, 9]])
    with pytest.raises(NoTokenLeftError, match=r"after 2 .*, got bad_words_ids, masks, which"):
        list(late)
    assert list(plain) == expected_tokens(name, PROMPT, 12)


def test_a_masked_request_goes_on_after_a_preemption(model):
    served, _ = model
    answer = [index % 50 for index in range(40)]
    many = [start(served, [6] * 20, 40, OnlyAfter(answer)) for _ in range(8)]
    assert [list(each) for each in many] == [answer] * 8


def test_a_step_is_sent_before_the_tokens_that_its_masks_follow_from(model, monkeypatch):
    served, _ = model
    runner, events = served.engine._runner, []

    def recorded(name, function):
        def call(*args, **kwargs):
            events.append(name)
            return function(*args, **kwargs)

        return call

    assert list(start(served, PROMPT, 12, OnlyAfter([7] * 12))) == [7] * 12  # a program that is made holds steps up
    served._runtimes[0].steps.executables.background.wait()
    monkeypatch.setattr(runner._executor, "run", recorded("run", runner._executor.run))
    monkeypatch.setattr(runner, "read", recorded("read", runner.read))
    assert list(start(served, PROMPT, 12, OnlyAfter([7] * 12))) == [7] * 12
    assert ("run", "run", "read", "run", "read") in zip(*(events[begin:] for begin in range(5)), strict=False)


def test_a_step_that_fails_before_its_masks_ends_its_requests_alone(model, monkeypatch):
    served, name = model
    read, steps = served.engine._runner.read, []

    def failing(step):
        steps.append(step)
        if len(steps) == 4:
            raise RuntimeError("injected")
        return read(step)

    monkeypatch.setattr(served.engine._runner, "read", failing)
    with pytest.raises(RequestError, match="injected"):
        list(start(served, PROMPT, 20, OnlyAfter([7] * 20)))
    for masks, expected in ((None, expected_tokens(name, PROMPT, 6)), (OnlyAfter([7] * 6), [7] * 6)):
        assert list(start(served, PROMPT, 6, masks)) == expected
