"""What an engine tells while it works: whether it moves, and how much of a prompt was cached."""

import asyncio
import dataclasses
import threading
import time

import pytest
from engine_models import tiny_model

from torchax_serve import EngineOptions, SamplingParams, serve
from torchax_serve.compilation.compile_lock import CompileLock, num_compiling
from torchax_serve.engine.progress import ProgressClock

SMALL = EngineOptions(max_model_len=64, max_num_seqs=4, page_size=8, max_num_batched_tokens=32)


@pytest.fixture(scope="module")
def model():
    with serve(tiny_model("llama"), engine=SMALL) as served:
        yield served


def run(model, prompt, num_tokens=4, **params):
    params = SamplingParams(max_new_tokens=num_tokens, temperature=0, **params)
    stream = model.iter_tokens(prompt, model.generation_config, params=params)
    list(stream)
    return stream.handle


def test_an_idle_engine_is_not_due(model):
    run(model, [5, 6, 7])
    model._runtimes[0].steps.executables.background.wait()  # what it compiles ahead
    before = model.engine.progress()
    assert before.is_alive and not before.is_due and not before.is_compiling
    run(model, [5, 6, 7])
    assert model.engine.progress().num_moves > before.num_moves


def test_a_stalled_engine_is_due_and_still(model):
    go_on = threading.Event()
    model.engine._run_on_engine_thread(lambda: go_on.wait(10))
    stream = model.iter_tokens([5, 6], model.generation_config, params=SamplingParams(max_new_tokens=2))
    time.sleep(0.3)
    progress = model.engine.progress()
    assert progress.is_due and progress.still_s > 0.2
    go_on.set()
    assert len(list(stream)) == 2
    until = time.monotonic() + 5
    while model.engine.progress().is_due:
        assert time.monotonic() < until


@pytest.mark.parametrize("becomes_due", ["request", "command"])
def test_an_engine_that_was_idle_for_long_is_still_from_its_next_work_on(becomes_due, model, monkeypatch):
    """As a watchdog may look between a request and the round that takes it, and would end the process."""
    run(model, [5, 6, 7])
    model._runtimes[0].steps.executables.background.wait()
    engine, now = model.engine, time.monotonic() + 1000
    while engine.progress().is_due:
        time.sleep(0.01)
    monkeypatch.setattr(engine.progress, "_clock", lambda: now)
    with engine._wake:  # which its thread needs to wake up
        assert not engine.progress().is_due and engine.progress().still_s > 900
        if becomes_due == "request":
            with engine.submitted_together():
                stream = model.iter_tokens([5, 6], model.generation_config, params=SamplingParams(max_new_tokens=2))
                assert engine.progress()[1:3] == (0, True)
        else:
            engine._run_on_engine_thread(lambda: None)
        assert engine.progress()[1:3] == (0, True)
    if becomes_due == "request":
        assert len(list(stream)) == 2


def test_compiling_is_told_apart():
    assert num_compiling() == 0
    with CompileLock():
        assert num_compiling() == 1
    assert num_compiling() == 0


def test_a_thread_that_has_ended_is_not_alive():
    clock = ProgressClock(lambda: True, lambda: 5.0)
    thread = threading.Thread(target=lambda: None)
    thread.start()
    clock.watch(thread)
    thread.join()
    assert clock() == (0, 0.0, True, False, False)


def test_times_and_preemptions_of_a_request():
    """Each of two that run together needs 6 pages of 2048 bytes in the end, and the cache has 8."""
    options = dataclasses.replace(SMALL, max_num_seqs=2, kv_cache_memory_bytes=9 * 2048)
    with serve(tiny_model("llama"), engine=options) as model:
        model.engine._run_on_engine_thread(lambda: time.sleep(0.3))
        params = SamplingParams(max_new_tokens=40, temperature=0)
        streams = [model.stream([5, 6, number], params) for number in range(3)]
        assert all(stream.stats.queued_s is None for stream in streams)
        for stream in streams:
            list(stream)
        stats = [stream.stats for stream in streams]
        assert all(0.2 < each.queued_s <= each.ttft_s <= each.total_s for each in stats)
        assert sum(each.num_preemptions for each in stats) == model.stats().scheduler.num_preemptions >= 1
        assert model.stream([5, 6, 0], params).stats.num_preemptions == 0


def test_a_reader_in_an_event_loop_leaves_its_block(model):
    params = SamplingParams(max_new_tokens=50)

    async def read():
        async with model.stream([5, 6, 7], params) as texts:
            await anext(texts)
        async with model.iter_tokens([5, 6, 7], model.generation_config, params=params) as tokens:
            await anext(tokens)
            await anext(tokens)
        return texts

    texts = asyncio.run(read())
    assert texts.stats.finish_reason == "abort"
    assert len(texts.token_ids) == 1
    until = time.monotonic() + 5
    while model.engine.progress().is_due:
        assert time.monotonic() < until
    assert model.engine.stats().scheduler.num_running == 0
    with pytest.raises(ZeroDivisionError), model.iter_tokens([5, 6, 7], params=params) as failing:
        next(failing)
        1 / 0  # noqa: B018
    while model.engine.progress().is_due:
        assert time.monotonic() < until


def test_cached_tokens_of_a_request(model):
    prompt = list(range(3, 33))
    assert run(model, prompt).num_cached_tokens == 0
    assert run(model, prompt).num_cached_tokens == 24  # complete pages of 8 tokens
    assert run(model, prompt, cache_salt="other").num_cached_tokens == 0
