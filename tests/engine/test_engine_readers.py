"""Readers that are gone, forked children and signal handlers: requests end, and nobody waits for ever."""

import asyncio
import gc
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import transformers
from engine_models import expected_tokens, tiny_model
from test_engine_hostile import INNOCENT, NEW, SMALL, is_idle, request

from model_adapters.errors import TorchaxServeError
from torchax_serve import EngineOptions, RequestError, SamplingParams, serve


@pytest.fixture(scope="module")
def llama():
    with serve(tiny_model("llama"), engine=SMALL) as model:
        model.engine.check_integrity = True
        yield model


@pytest.fixture(scope="module")
def roomy():
    """A model whose answers are long, and whose programs are compiled."""
    with serve(tiny_model("llama"), engine=EngineOptions(max_model_len=2048, max_num_seqs=2, page_size=8)) as model:
        list(model.iter_tokens([5], transformers.GenerationConfig(max_new_tokens=8)))
        yield model


def endless(model, prompt=(5, 6)):
    return model.iter_tokens(prompt, transformers.GenerationConfig(max_new_tokens=10_000))


def dropped(model):
    tokens = endless(model)
    next(tokens)


def never_read(model):
    endless(model)


def closed(model):
    tokens = endless(model)
    next(tokens)
    tokens.close()


def failing(model):
    with pytest.raises(ZeroDivisionError):
        for _ in endless(model):
            1 / 0  # noqa: B018


def in_a_thread(model):
    thread = threading.Thread(target=lambda: next(endless(model)))
    thread.start()
    thread.join()


def in_a_loop(model):
    async def main():
        async def read():
            async for _ in endless(model):
                await asyncio.sleep(0)

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def in_a_loop_that_ends(model):
    async def main():
        tokens = endless(model)
        await anext(tokens)

    asyncio.run(main())


def text_dropped(model):
    next(model.stream([5, 6], SamplingParams(max_new_tokens=10_000)))


@pytest.mark.parametrize(
    "stops_reading",
    [dropped, never_read, closed, failing, in_a_thread, in_a_loop, in_a_loop_that_ends, text_dropped],
    ids=lambda function: function.__name__,
)
def test_a_reader_that_is_gone_frees_its_request(roomy, stops_reading):
    stops_reading(roomy)
    gc.collect()  # an exception that a test has caught may hold a frame
    num_before = roomy.stats().scheduler.num_new_tokens
    assert is_idle(roomy)
    assert roomy.stats().scheduler.num_new_tokens - num_before < 200  # of 10,000


def test_deadlines_far_away_hold_no_ended_requests(llama):
    params = SamplingParams(timeout_s=1e6)
    for _ in range(40):
        handles = llama.engine.submit_all([request([5], params, max_new_tokens=1) for _ in range(5)])
        for handle in handles:
            handle.result()
    assert len(llama.engine._scheduler._queues._deadlines) < 100


FORKED = """
import os, signal, sys, warnings
sys.path[:0] = {paths!r}
warnings.simplefilter("ignore")
import transformers
from engine_models import tiny_model
from torchax_serve import serve, to_jax
import torch

model, config = serve(tiny_model("llama")), transformers.GenerationConfig(max_new_tokens=1000)
jax_model = to_jax(tiny_model("llama"))
tokens = model.iter_tokens([5, 6], config)
next(tokens)
ids = torch.tensor([[5, 6]])
calls = {{
    "iter_tokens": lambda: model.iter_tokens([5, 6], config),
    "stream": lambda: model.stream([5, 6]),
    "a stream of the parent": lambda: [next(tokens) for _ in range(1000)],
    "submit": lambda: engine.submit(None),
    "warm_up": lambda: engine.warm_up(),
    "generate": lambda: model.generate(ids, max_new_tokens=2),
    "forward": lambda: jax_model(ids),
    "generate of to_jax": lambda: jax_model.generate(ids, max_new_tokens=2),
}}
engine = model.engine
child = os.fork()
if not child:
    signal.alarm(120)  # nobody is left to end a child that hangs
    for name, call in calls.items():
        try:
            print(name, call(), flush=True)
        except Exception as error:
            print(f"{{name}}: {{type(error).__name__}}: {{error}}", flush=True)
    model.close()
    del tokens
    engine.close()
    os._exit(7)  # as multiprocessing ends its children; XLA's own threads hang in the exit of others
_, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status), "parent", len([next(tokens), next(tokens)]), flush=True)
model.close()
"""


def test_a_forked_child_gets_an_error_and_the_parent_goes_on():
    here = pathlib.Path(__file__).parent
    paths = [str(here), str(here.parent), str(here.parents[1])]
    program = textwrap.dedent(FORKED).format(paths=paths)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    lines = [line for line in done.stdout.splitlines() if line]
    assert len(lines) == 9, done.stdout + done.stderr
    for line in lines[:8]:
        assert "TorchaxServeError: expected" in line, line
        assert "forked; call serve() in the child" in line
    assert lines[8] == "child 7 parent 2"


def test_a_signal_handler_may_ask_the_engine(llama):
    found = []

    def handler(number, frame):
        found.append(list(llama.iter_tokens(INNOCENT, transformers.GenerationConfig(max_new_tokens=NEW))))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        tokens = llama.iter_tokens([9], transformers.GenerationConfig(max_new_tokens=20))
        read = []
        for token in tokens:
            read.append(token)
            if len(read) == 3:
                signal.raise_signal(signal.SIGUSR1)
        with llama._engine_lock, llama.engine._wake:  # as where the interrupted code has them
            threading.Timer(0.1, lambda: None).start()
            handle = llama.engine.submit(request([9], max_new_tokens=4))
        assert handle.result() == expected_tokens("llama", [9], 4)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert read == expected_tokens("llama", [9], 20)
    assert found == [expected_tokens("llama", INNOCENT, NEW)]


def test_an_engine_that_is_being_made_is_not_made_twice():
    with serve(tiny_model("llama"), engine=SMALL) as model:
        asked = []

        def build():
            with pytest.raises(TorchaxServeError, match="while it was being made; call again"):
                model.engine  # noqa: B018
            asked.append(True)
            return type(model)._build_engine(model)

        model._build_engine = build
        assert model.engine is model.engine
        assert asked == [True]


def test_after_close_each_call_says_so_in_one_line():
    model = serve(tiny_model("llama"), engine=SMALL)
    engine, tokens = model.engine, endless(model)
    next(tokens)
    model.close()
    for call, argument in ((model.iter_tokens, [5, 6]), (model.stream, [5, 6]), (model.chat, "Hi")):
        with pytest.raises(TorchaxServeError, match="expected an open model, this one is closed"):
            call(argument)
    with pytest.raises(TorchaxServeError, match="expected an open model, this one is closed"):
        engine.submit(request())
    with pytest.raises(RequestError, match=r"the engine was closed \(the model was closed"):
        list(tokens)


def test_a_signal_handler_that_interrupts_a_compilation_gets_an_error(llama, monkeypatch):
    """Its answer could wait for the very compilation that it holds up."""
    forward = llama._runtimes[0].steps.forward
    errors = []

    def handler(number, frame):
        for call in (lambda: llama.generate(torch.tensor([[5, 6]]), max_new_tokens=1), lambda: next(endless(llama))):
            with pytest.raises(TorchaxServeError, match="that interrupted it; call again when") as caught:
                call()
            errors.append(caught.value)

    obtain = forward._load_or_compile

    def interrupted(*args):
        if not errors:
            signal.raise_signal(signal.SIGUSR1)
        return obtain(*args)

    monkeypatch.setattr(forward, "_load_or_compile", interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        ids = torch.tensor([INNOCENT * 7])
        found = llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(errors) == 2
    assert found[0, -2:].tolist() == expected_tokens("llama", INNOCENT * 7, 2)
