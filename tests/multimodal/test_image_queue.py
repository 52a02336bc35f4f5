"""Conversations with images on the engine's queue: order, deadlines, cancellation, engine options, statistics."""

import asyncio
import gc
import threading
import time

import llava_folder
import numpy as np
import pytest
import torch
from PIL import Image

from model_adapters.errors import QueueFullError
from torchax_serve import EngineOptions, SamplingParams, serve
from torchax_serve.engine.admission import Admission
from torchax_serve.multimodal import processor_of
from torchax_serve.scheduler import Scheduler

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
NEW = 8
LONG = SamplingParams(max_new_tokens=120, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llava")


@pytest.fixture(scope="module")
def eager(folder):
    return llava_folder.make(folder)


@pytest.fixture(scope="module")
def model(eager, folder):
    # One slot, so that requests wait for each other; tests/multimodal/test_engine_images.py has batches.
    with serve(folder, engine=EngineOptions(max_num_waiting=50, max_num_seqs=1)) as served:
        served.chat(question(0), LONG)  # compiles
        served.engine.check_integrity = True
        yield served


def picture(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (20, 30, 3), dtype=np.uint8))


def question(seed):
    content = [{"type": "image", "image": picture(seed)}, {"type": "text", "text": "What is this ?"}]
    return [{"role": "user", "content": content}]


def expected(model, eager, seed):
    inputs = processor_of(model)(
        text="USER: <image> What is this ? ASSISTANT:", images=picture(seed), return_tensors="pt"
    )
    tokens = eager.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokens.tolist()


def stream(model, seed, **options):
    options = {"max_new_tokens": NEW, "temperature": 0, **options}
    return model.chat(question(seed), SamplingParams(**options), stream=True)


def is_idle(model, seconds=10):
    """Waits until no request runs or waits."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        counts = model.stats().scheduler
        if not counts.num_running and not counts.num_waiting:
            return True
        time.sleep(0.01)
    return False


def test_threads_with_images_and_text_get_eager_tokens(model, eager):
    found = {}

    def ask(seed):
        answer = stream(model, seed)
        list(answer)
        found[seed] = answer.token_ids

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    text = model.stream("USER: What ? ASSISTANT:", SamplingParams(max_new_tokens=NEW, temperature=0))
    assert list(text)
    for thread in threads:
        thread.join()
    assert found == {seed: expected(model, eager, seed) for seed in range(4)}
    assert model.engine.stats().scheduler.num_new_tokens > 4 * NEW
    assert is_idle(model)


def test_a_dropped_or_failing_reader_frees_its_request(model):
    def drop():
        next(stream(model, 1, max_new_tokens=120, ignore_eos=True))

    def fail():
        for _ in stream(model, 1, max_new_tokens=120, ignore_eos=True):
            raise ZeroDivisionError

    for read in (drop, fail):
        errors = []

        def run(read=read, errors=errors):
            try:
                read()
            except ZeroDivisionError as error:
                errors.append(type(error))

        thread = threading.Thread(target=run)
        steps = model.stats().num_steps
        thread.start()
        thread.join()
        gc.collect()
        assert is_idle(model)
        assert model.stats().num_steps - steps < 100  # and not all 120


@pytest.fixture
def slow_steps(monkeypatch):
    """An answer is not complete before others are asked for."""
    schedule = Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda *args: time.sleep(0.05) or schedule(*args))


@pytest.mark.usefixtures("slow_steps")
def test_deadline_and_priority(model):
    late = stream(model, 1, max_new_tokens=120, ignore_eos=True, timeout_s=0.02)
    list(late)
    assert late.stats.finish_reason == "deadline"
    running = model.chat(question(0), LONG, stream=True)
    next(running)
    ended = []

    def read(name, answer):
        list(answer)
        ended.append(name)

    answers = {"low": stream(model, 1), "high": stream(model, 2, priority=-5)}
    threads = [threading.Thread(target=read, args=item) for item in answers.items()]
    for thread in threads:
        thread.start()
    running.close()
    for thread in threads:
        thread.join()
    assert ended == ["high", "low"]


@pytest.mark.usefixtures("slow_steps")
def test_a_full_queue_is_an_error(model, monkeypatch):
    monkeypatch.setattr(model.engine, "admission", Admission(max_num_seqs=1, max_num_waiting=1))
    running = [model.chat(question(0), LONG, stream=True) for _ in range(2)]
    with pytest.raises(QueueFullError, match="expected at most 2 requests at a time"):
        stream(model, 1)
    for answer in running:
        answer.close()
    assert is_idle(model)


def test_options_of_the_engine(model, eager):
    tokens = expected(model, eager, 3)
    answer = stream(model, 3, logprobs=2)
    list(answer)
    assert answer.token_ids == tokens
    inputs = processor_of(model)(text="USER: <image> What is this ? ASSISTANT:", images=picture(3), return_tensors="pt")
    with torch.no_grad():
        logits = eager(**inputs).logits[0, -1]
    assert answer.logprobs[0].logprob == pytest.approx(logits.log_softmax(-1)[tokens[0]].item(), abs=1e-4)
    assert len(answer.logprobs) == len(tokens)
    banned = stream(model, 3, logit_bias={tokens[0]: -100.0})
    list(banned)
    assert banned.token_ids[0] == int(logits.argsort(descending=True)[1])


def test_in_an_event_loop(model, eager):
    async def read(seed):
        answer = stream(model, seed)
        async for _ in answer:
            pass
        return answer.token_ids

    async def read_all():
        return await asyncio.gather(*(read(seed) for seed in (4, 5)))

    assert asyncio.run(read_all()) == [expected(model, eager, seed) for seed in (4, 5)]


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"guidance_scale": 1.5}], ids=str)
def test_calls_that_generate_itself_runs_are_on_the_queue(model, options):
    """Beam search gives its tokens at its end; a closed reader ends it within a step."""
    config = model.generation_config.__class__(do_sample=False, max_new_tokens=NEW, **options)
    ids = model.tokenizer("USER: What ? ASSISTANT:")["input_ids"]
    tokens = list(model.iter_tokens(ids, config))
    row = model.generate(torch.tensor([ids]), generation_config=config)[0, len(ids) :]
    assert tokens == row.tolist()
    config.max_new_tokens = 100
    began = model.single_engine.stats().num_steps
    running = model.iter_tokens(ids, config)
    running.close()
    assert is_idle(model)
    assert model.single_engine.stats().num_steps - began < 50
    config.max_new_tokens = NEW
    late = model.iter_tokens(ids, config, params=SamplingParams(timeout_s=1e-3))
    assert list(late) != tokens
    assert late.finish_reason == "deadline"
