"""The queue of texts: shared calls, cancellation, time limits, bounds; and the calls of models that wait on it."""

import asyncio
import threading
import time

import numpy as np
import pytest
from encoder_models import TEXTS, folder

from model_adapters.errors import (
    DeadlineError,
    InvalidArgumentError,
    QueueDeadlineError,
    QueueFullError,
    RequestError,
    TorchaxServeError,
)
from torchax_serve import serve
from torchax_serve.pooling.queue import PoolingQueue, check_wanted


class Caller:
    """A function on lists that can be held up, and what it was called with."""

    def __init__(self):
        self.calls, self.begun, self.go_on = [], threading.Event(), threading.Event()
        self.num_abandoned = 0

    def __call__(self, items):
        self.calls.append(list(items))
        return [item * 2 for item in items]

    def slow(self, items):
        """Looks at every 5 ms whether it is still wanted, as a model does before each forward."""
        self.calls.append(list(items))
        self.begun.set()
        try:
            while not self.go_on.wait(0.005):
                check_wanted()
        except BaseException:
            self.num_abandoned += 1
            raise
        return [item * 2 for item in items]

    def failing(self, items):
        if "bad" in items:
            raise InvalidArgumentError("texts[0]: expected another")
        return self(items)


@pytest.fixture
def caller():
    made = Caller()
    yield made
    made.go_on.set()


@pytest.fixture
def queue():
    made = PoolingQueue(max_num_waiting=4)
    yield made
    made.close("the test is over")


def held(queue, caller, **limits):
    """A request that runs until the caller may go on."""
    result = queue.submit("slow", caller.slow, [1], **limits)
    assert caller.begun.wait(30)
    return result


def test_what_waits_with_the_same_key_shares_a_call(queue, caller):
    first = held(queue, caller)
    results = [queue.submit(key, caller, [item]) for key, item in (("a", 2), ("b", 3), ("a", 4))]
    caller.go_on.set()
    assert [each.result(30) for each in (first, *results)] == [[2], [4], [6], [8]]
    assert caller.calls == [[1], [2, 4], [3]]


def test_a_fault_is_one_requests_own(queue, caller):
    held(queue, caller)
    results = [queue.submit("key", caller.failing, [item]) for item in ("good", "bad", "fine")]
    caller.go_on.set()
    assert (results[0].result(30), results[2].result(30)) == (["goodgood"], ["finefine"])
    with pytest.raises(InvalidArgumentError, match="expected another"):
        results[1].result(30)


def test_a_cancelled_request_ends_its_call_and_the_next_begins(queue, caller):
    running = held(queue, caller)
    waiting, last = queue.submit("key", caller, [5]), queue.submit("key", caller, [6])
    assert running.cancel() and waiting.cancel()
    assert last.result(30) == [12]
    assert caller.num_abandoned == 1
    assert caller.calls == [[1], [6]]


def test_time_limits(queue, caller):
    running = held(queue, caller, timeout_s=0.2)
    waiting = queue.submit("key", caller, [5], queue_timeout_s=0.05)
    patient = queue.submit("key", caller, [6], queue_timeout_s=600)
    with pytest.raises(QueueDeadlineError, match="queue_timeout_s, which has passed"):
        waiting.result(30)
    assert not running.done()
    with pytest.raises(DeadlineError, match="timeout_s, which has passed"):
        running.result(30)
    assert patient.result(30) == [12]
    for limits in ({"timeout_s": 0}, {"queue_timeout_s": "soon"}, {"timeout_s": float("nan")}):
        with pytest.raises(InvalidArgumentError, match="expected a number > 0"):
            queue.submit("key", caller, [1], **limits)


def test_a_request_that_has_begun_does_not_end_at_the_limit_for_waiting(queue, caller):
    running = held(queue, caller, queue_timeout_s=0.5)
    time.sleep(0.6)
    caller.go_on.set()
    assert running.result(30) == [2]


def test_the_queue_is_bounded(queue, caller):
    held(queue, caller)
    waiting = queue.submit("key", caller, [1, 2, 3, 4, 5, 6])  # of any size where none waits
    with pytest.raises(QueueFullError, match="expected at most 4 texts that wait, got 1 next to 6"):
        queue.submit("key", caller, [7])
    waiting.cancel()
    results = [queue.submit("key", caller, [item]) for item in range(4)]
    with pytest.raises(QueueFullError):
        queue.submit("key", caller, [7])
    caller.go_on.set()
    assert [each.result(30) for each in results] == [[0], [2], [4], [6]]


def test_closing_ends_all(queue, caller):
    running, waiting = held(queue, caller), queue.submit("key", caller, [1])
    queue.close("enough")
    for result in (running, waiting):
        with pytest.raises(RequestError, match=r"the model was closed \(enough\)"):
            result.result(30)
    with pytest.raises(RequestError, match="this one is closed"):
        queue.submit("key", caller, [1])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("bert")
    folder(path, "BertModel")
    with serve(path) as served:
        yield served


def test_asynchronous_embeddings_are_those_of_the_blocking_call(model):
    expected = model.embed(TEXTS, pooling="mean")

    async def main():
        one, all_of_them = await asyncio.gather(
            model.aembed(TEXTS[0], pooling="mean"), model.aembed(TEXTS, pooling="mean", timeout_s=600)
        )
        np.testing.assert_allclose(one, expected[0], atol=1e-6)
        np.testing.assert_allclose(all_of_them, expected, atol=1e-6)

    asyncio.run(main())


def test_a_cancelled_embedding_makes_room(model):
    """Of ten thousand texts only those of the forwards so far are computed."""

    async def main():
        task = asyncio.create_task(model.aembed([f"{text} cat" for text in TEXTS] * 4000, pooling="mean"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await model.aembed(TEXTS[0], pooling="mean", timeout_s=60)

    np.testing.assert_allclose(asyncio.run(main()), model.embed(TEXTS[0], pooling="mean"), atol=1e-6)


def test_time_limits_of_models(model):
    with pytest.raises(DeadlineError):
        model.embed(TEXTS * 1000, pooling="mean", timeout_s=1e-6)
    with pytest.raises(QueueDeadlineError):
        model.embed(TEXTS, pooling="mean", queue_timeout_s=1e-9)
    with pytest.raises(InvalidArgumentError, match="timeout_s: expected a number > 0"):
        model.embed(TEXTS, pooling="mean", timeout_s=-1)


def test_labels_and_scores_have_the_same_forms(tmp_path):
    folder(tmp_path, "BertForSequenceClassification", num_labels=1)
    with serve(tmp_path) as ranker:
        pairs = [("a dog", text) for text in TEXTS]
        np.testing.assert_allclose(asyncio.run(ranker.ascore_pairs(pairs)), ranker.score_pairs(pairs), atol=1e-6)
        assert asyncio.run(ranker.aclassify(TEXTS)) == ranker.classify(TEXTS)
        with pytest.raises(DeadlineError):
            ranker.rerank("a dog", TEXTS, timeout_s=1e-9)
    with pytest.raises(TorchaxServeError, match="this one is closed"):
        ranker.classify(TEXTS)
