"""Programs compiled in other threads: nothing that runs waits for them, and the warm-up has them all."""

import contextlib
import threading

import pytest
from engine_models import VOCAB_SIZE, expected_tokens, tiny_model
from test_engine import SMALL, request

from model_adapters.errors import TorchaxServeError
from torchax_serve import serve

PROMPT = [5, 9, 2, 7, 11]


class Recorder:
    """Progress that records what it is told, and may raise at the first program."""

    def __init__(self, error=None):
        self.error, self.stages, self.done = error, [], 0

    @contextlib.contextmanager
    def stage(self, name, total, unit="bytes"):
        self.stages.append((name, total, unit))

        def advance(number):
            self.done += number
            if self.error is not None and self.done:
                raise self.error

        yield advance


@pytest.fixture
def held(monkeypatch):
    """A model whose program of decode steps compiles only when the event is set, in whatever thread."""
    release = threading.Event()
    with serve(tiny_model("llama"), engine=SMALL) as model:
        steps = model.engine._runner._executor._decode_function
        compiled = steps.compiled

        def waiting(*args, **kwargs):
            assert threading.current_thread().name == "compile", "a request waits for this program"
            assert release.wait(300)
            return compiled(*args, **kwargs)

        monkeypatch.setattr(steps, "compiled", waiting)
        try:
            yield model, release
        finally:
            release.set()


def test_requests_are_answered_while_the_decode_program_is_compiled(held):
    model, release = held
    executor = model.engine._runner._executor
    assert model.engine.submit(request(PROMPT, 13)).result() == expected_tokens("llama", PROMPT, 13)
    assert executor._decode_function.num_programs == 0
    release.set()
    executor._step_programs._background.wait()
    assert executor._decode_function.num_programs == 1
    assert model.engine.submit(request(PROMPT, 13)).result() == expected_tokens("llama", PROMPT, 13)


def test_a_larger_program_answers_while_the_smaller_one_is_compiled():
    long = [index % (VOCAB_SIZE - 3) + 3 for index in range(30)]
    options = {"max_model_len": 512, "max_num_batched_tokens": 256, "max_num_seqs": 4, "page_size": 8}
    with serve(tiny_model("llama"), engine=type(SMALL)(**options)) as model:
        executor = model.engine._runner._executor
        many = (long * 7)[:200]
        first = model.engine.submit(request(many, 2)).result()
        executor._step_programs._background.wait()
        step, release = executor._packed_function, threading.Event()
        compiled = step.compiled

        def waiting(*args, **kwargs):
            assert threading.current_thread().name == "compile"
            assert release.wait(300)
            return compiled(*args, **kwargs)

        step.compiled = waiting
        before = step.num_programs
        try:
            assert model.engine.submit(request(long, 3)).result() == expected_tokens("llama", long, 3)
            assert step.num_programs == before
        finally:
            release.set()
        executor._step_programs._background.wait()
        assert step.num_programs == before + 1, "the smaller program is there for the next one"
        assert model.engine.submit(request(many, 2)).result() == first


def test_the_warm_up_tells_its_progress_can_be_ended_and_goes_on():
    with serve(tiny_model("llama"), engine=SMALL) as model:
        with pytest.raises(KeyboardInterrupt):
            model.engine.warm_up(Recorder(KeyboardInterrupt()))
        assert model.engine.submit(request(PROMPT, 4)).result() == expected_tokens("llama", PROMPT, 4)
        progress = Recorder()
        model.engine.warm_up(progress)
        num_tasks = len(list(model.engine._runner.compile_tasks()))
        assert progress.stages == [("compiling programs", num_tasks, "items")]
        assert progress.done == num_tasks > 1
        before = model.engine.stats().num_programs
        assert model.engine.submit(request(PROMPT, 13)).result() == expected_tokens("llama", PROMPT, 13)
        assert model.engine.stats().num_programs == before


def test_a_warm_up_of_a_closed_engine_says_so():
    with serve(tiny_model("llama"), engine=SMALL) as model:
        engine = model.engine
    with pytest.raises(TorchaxServeError, match="closed"):
        engine.warm_up()


def test_a_second_warm_up_from_disk_traces_nothing(tmp_path, monkeypatch):
    folder = tmp_path / "programs"
    for module in ("torchax_serve.entrypoints.torch_model", "torchax_serve.sampling.sampler"):
        monkeypatch.setattr(f"{module}.programs_dir", lambda: folder)
    tiny_model("llama").save_pretrained(tmp_path / "model")

    def warmed_up():
        with serve(tmp_path / "model", engine=SMALL) as model:
            model.engine.warm_up()
            sampler = model.engine._runner._sampler
            caches = model._runtimes[0].steps.executables, sampler._sample._cache
            for cache in caches:
                cache.wait_for_writes()
            tokens = model.engine.submit(request(PROMPT, 13)).result()
            return tokens, [sum(cache.num_traces.values()) for cache in caches], [cache.num_loaded for cache in caches]

    tokens, traced, loaded = warmed_up()
    assert min(traced) > 0 and loaded == [0, 0]
    assert warmed_up() == (tokens, [0, 0], traced)
