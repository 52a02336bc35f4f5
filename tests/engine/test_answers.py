"""Several answers to one prompt: they share its pages, and each has the tokens that it has by itself."""

import threading
import time
import weakref

import pytest
from engine_models import VOCAB_SIZE, expected_tokens, tiny_model
from test_engine_hostile import is_idle

from model_adapters.errors import QueueFullError, RequestError
from torchax_serve import EngineOptions, SamplingParams, serve

PROMPT = [3 + index * 7 % (VOCAB_SIZE - 3) for index in range(40)]  # five pages of 8
SAMPLED = {"temperature": 1.0, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def model():
    options = EngineOptions(max_model_len=64, max_num_seqs=4, page_size=8, max_num_waiting=8)
    with serve(tiny_model("llama"), engine=options) as served:
        served.engine.check_integrity = True
        yield served


def counts(model):
    scheduler = model.stats().scheduler
    return scheduler.num_prompt_tokens, scheduler.num_hit_tokens


def test_answers_are_those_of_separate_requests_and_the_prompt_is_computed_once(model):
    before = counts(model)
    answers = model.generate_batch([PROMPT], SamplingParams(n=4, seed=5, cache_salt="together", **SAMPLED))
    prompt_tokens, hit_tokens = (now - then for now, then in zip(counts(model), before, strict=True))
    assert prompt_tokens == 4 * 40
    assert hit_tokens == 3 * 39  # of each further answer all but the last token, whose logits it needs
    assert len({tuple(answer.token_ids) for answer in answers}) > 1
    for index, answer in enumerate(answers):
        alone = SamplingParams(seed=5 + index, cache_salt=f"alone {index}", **SAMPLED)
        assert model.generate_batch([PROMPT], alone)[0].token_ids == answer.token_ids
    assert is_idle(model)


def test_answers_enter_together_however_long_their_submission_takes(model, monkeypatch):
    submit = model.engine.submit

    def slowly(request):
        handle = submit(request)
        time.sleep(0.2)  # the first one would end meanwhile
        return handle

    monkeypatch.setattr(model.engine, "submit", slowly)
    before = counts(model)
    model.generate_batch([PROMPT], SamplingParams(n=4, cache_salt="slowly", **SAMPLED))
    assert counts(model)[1] - before[1] == 3 * 39
    with model.engine.submitted_together():
        dropped, closed, read = (model.stream(PROMPT, SamplingParams(**SAMPLED)) for _ in range(3))
        del dropped
        closed.close()
        gone = weakref.ref(model.iter_tokens(PROMPT, params=SamplingParams(**SAMPLED)).handle)
        assert gone() is None  # no command holds what has no reader
    assert list(closed) == [] and closed.stats.finish_reason == "abort"
    list(read)
    assert len(read.token_ids) == 6
    assert is_idle(model)


def test_requests_of_a_block_get_an_error_if_the_engine_is_closed_meanwhile():
    with serve(tiny_model("llama"), engine=EngineOptions(max_model_len=64)) as served:
        with served.engine.submitted_together():
            stream = served.stream(PROMPT, SamplingParams(**SAMPLED))
            served.engine.close("for a test")
        with pytest.raises(RequestError, match="for a test"):
            list(stream)


def test_pages_of_the_prompt_are_shared(model):
    params, config = SamplingParams(temperature=0, max_new_tokens=6, cache_salt="pages"), model.generation_config
    first = model.iter_tokens(PROMPT, config, params=params)
    answers = [first, *(model.iter_tokens(PROMPT, config, params=params, fork_of=first) for _ in range(3))]
    num_used, tokens = [], [[] for _ in answers]
    for _ in range(6):
        for found, answer in zip(tokens, answers, strict=True):
            found.append(next(answer))
            num_used.append(model.stats().scheduler.pages[0].num_used)
    assert tokens == [expected_tokens("llama", PROMPT, 6)] * 4
    assert max(num_used) <= 4 + 4 * 2  # the complete pages once, the last two of each answer; unshared: 4 * 6
    assert [answer.handle.num_cached_tokens for answer in answers] == [0, 39, 39, 39]
    assert is_idle(model)


def test_an_answer_goes_on_without_the_first_one(model):
    params, config = SamplingParams(temperature=0, max_new_tokens=6), model.generation_config
    first = model.iter_tokens(PROMPT, config, params=params)
    second = model.iter_tokens(PROMPT, config, params=params, fork_of=first)
    first.close()
    assert list(second) == expected_tokens("llama", PROMPT, 6)
    assert list(model.iter_tokens(PROMPT, config, params=params, fork_of=first)) == expected_tokens("llama", PROMPT, 6)


def test_each_answer_counts_in_the_queue(model):
    go_on = threading.Event()
    model.engine._run_on_engine_thread(lambda: go_on.wait(30))
    held = [model.stream(PROMPT, SamplingParams(max_new_tokens=2)) for _ in range(12)]  # four run, eight wait
    with pytest.raises(QueueFullError):
        model.generate_batch([PROMPT], SamplingParams(n=2, **SAMPLED))
    go_on.set()
    for stream in held:
        stream.close()
    assert is_idle(model)
    answers = model.generate_batch([PROMPT] * 2, SamplingParams(n=20, seed=1, **SAMPLED))  # more than have room
    assert len(answers) == 40
    assert [each.token_ids for each in answers[:20]] == [each.token_ids for each in answers[20:]]
