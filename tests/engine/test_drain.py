"""Drain and close: what was taken is finished, nothing more is taken, and neither call waits for ever."""

import asyncio
import threading
import time

import pytest
from engine_models import expected_tokens, tiny_model
from test_engine_hostile import request

from model_adapters.errors import InvalidArgumentError, TorchaxServeError
from torchax_serve import EngineOptions, RequestError, serve
from torchax_serve.engine.data_parallel import DataParallelEngines

ENGINE = EngineOptions(max_model_len=512, max_num_seqs=2, page_size=8)
PROMPTS = [[first, 9, 8] for first in range(10, 16)]


@pytest.fixture(scope="module")
def model():
    with serve(tiny_model("llama"), engine=ENGINE) as served:
        served.engine.check_integrity = True
        yield served


@pytest.fixture
def engine(model):
    """An engine that takes requests again."""
    model.engine.admission.refusal = None
    return model.engine


@pytest.fixture
def closing():
    """An engine to be closed."""
    with serve(tiny_model("llama"), engine=ENGINE) as served:
        yield served.engine


def stalled(engine):
    """Makes the engine's thread wait; returns the event that lets it go on."""
    go_on, begun = threading.Event(), threading.Event()

    def wait():
        begun.set()
        go_on.wait(30)

    engine._run_on_engine_thread(wait)
    assert begun.wait(30)
    return go_on


def test_taken_requests_are_finished_and_no_more_are_taken(engine):
    handles = [engine.submit(request(prompt, max_new_tokens=24)) for prompt in PROMPTS]  # two run, four wait
    assert engine.drain(60)
    assert [handle.result() for handle in handles] == [expected_tokens("llama", prompt, 24) for prompt in PROMPTS]
    with pytest.raises(TorchaxServeError, match=r"this one finishes those that it has \(drain\(\) was called\)"):
        engine.submit(request([5]))
    assert engine.drain(5)
    stats = engine.stats().scheduler
    assert (stats.num_running, stats.num_waiting, [group.num_used for group in stats.pages]) == (0, 0, [0])


def test_an_idle_engine_is_drained_at_once(engine):
    assert engine.drain(5)
    assert engine.drain(0)


def test_what_is_left_after_the_time_goes_on(engine):
    go_on = stalled(engine)
    handle = engine.submit(request(PROMPTS[0], max_new_tokens=24))
    assert not engine.drain(0.05)
    assert not engine.drain(0)
    go_on.set()
    assert engine.drain(60)
    assert handle.result() == expected_tokens("llama", PROMPTS[0], 24)


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("inf"), 1e300])
def test_times_that_are_none(engine, timeout_s):
    with pytest.raises(InvalidArgumentError, match="timeout_s: expected seconds >= 0 or None"):
        engine.drain(timeout_s)


def test_a_closed_engine_has_not_finished_what_it_had(closing):
    go_on = stalled(closing)
    handle = closing.submit(request(PROMPTS[0]))
    answers = []
    drainer = threading.Thread(target=lambda: answers.append(closing.drain(60)))
    drainer.start()
    closer = threading.Thread(target=closing.close)
    closer.start()
    go_on.set()
    for thread in (drainer, closer):
        thread.join(60)
    assert answers == [False]
    with pytest.raises(RequestError, match="the engine was closed"):
        handle.result()


def test_close_returns_though_a_step_hangs_and_readers_get_an_error(closing):
    go_on = stalled(closing)
    handles = [closing.submit(request(prompt)) for prompt in PROMPTS[:2]]
    errors = []

    async def read():
        try:
            async for _ in handles[1]:
                pass
        except RequestError as error:
            errors.append(str(error))

    reader = threading.Thread(target=asyncio.run, args=(read(),))
    reader.start()
    while handles[1].loop is None:
        time.sleep(0.01)
    closing.close("the test is over", timeout_s=0.1)
    reader.join(60)
    with pytest.raises(RequestError, match=r"the engine was closed \(the test is over\)"):
        handles[0].result()
    assert len(errors) == 1 and "the test is over" in errors[0]
    with pytest.raises(TorchaxServeError, match="this one is closed"):
        closing.submit(request([5]))
    go_on.set()
    closing.close()
    assert not closing.progress().is_alive


def test_replicas_are_drained_and_closed_together():
    with serve(tiny_model("llama"), engine=ENGINE) as one, serve(tiny_model("llama"), engine=ENGINE) as two:
        replicas = DataParallelEngines([])
        replicas.engines = [one.engine, two.engine]
        handles = replicas.submit_all([request(prompt, max_new_tokens=24) for prompt in PROMPTS])
        assert replicas.drain(60)
        assert [handle.result() for handle in handles] == [expected_tokens("llama", prompt, 24) for prompt in PROMPTS]
        with pytest.raises(TorchaxServeError, match=r"drain\(\) was called"):
            replicas.submit(request([5]))
        one.engine.admission.refusal = two.engine.admission.refusal = None
        go_on = stalled(two.engine)
        handle = two.engine.submit(request([5]))
        began = time.monotonic()
        assert not replicas.drain(0.2)
        replicas.close("enough", timeout_s=0.2)
        assert time.monotonic() - began < 10
        with pytest.raises(RequestError, match="enough"):
            handle.result()
        go_on.set()
