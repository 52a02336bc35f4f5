"""Warm-up compiles few programs, and after it whatever a request asks for compiles none."""

import contextlib
import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from engine_models import VOCAB_SIZE, tiny_model
from engine_requests import engine_request
from transformers import GenerationConfig

from model_adapters.ops.linear import skips_equal_rows
from torchax_serve import EngineOptions, SamplingParams, serve
from torchax_serve.compilation import background

ROOT = Path(__file__).parents[2]
OPTIONS = EngineOptions(max_model_len=96, max_num_seqs=8, page_size=8, max_num_batched_tokens=64)
PROMPT = tuple(range(5, 18))


@contextlib.contextmanager
def counting_compilations(engine):
    """Collects what XLA compiles in any thread but those of other engines, which tests before may have left."""
    compiled = []

    def listen(event, seconds, **kwargs):
        compiler = getattr(background._this_thread, "compiler", None)
        if event == "/jax/core/compile/backend_compile_duration" and compiler in (None, engine._runner._background):
            compiled.append(kwargs.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class OddTokens:
    """Masks that allow odd tokens only."""

    def fill(self, bitmask, output_ids):
        bitmask[:] = np.array(0xAAAAAAAA, np.uint32).view(np.int32)


def request(prompt=PROMPT, max_new_tokens=6, masks=None, fork_of=None, params=None, **config):
    generation = GenerationConfig(max_new_tokens=max_new_tokens, do_sample="temperature" in config, **config)
    params = SamplingParams(**(params or {}))
    generation = params.merged_into(generation)
    made = engine_request(prompt, generation, params, seed=0, fork_of=fork_of)
    return dataclasses.replace(made, masks=masks)


FIRST_USES = {
    "plain": {},
    "sampling": {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
    "rare truncations": {"temperature": 0.8, "typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
    "bias": {"params": {"logit_bias": {7: 3.0, 9: -50}}},
    "log-probabilities": {"params": {"logprobs": 0}},
    "top log-probabilities": {"params": {"logprobs": 11}},
    "log-probabilities of the prompt": {"params": {"prompt_logprobs": 2}},
    "masks": {"masks": OddTokens()},
    "penalties": {"repetition_penalty": 1.3, "params": {"presence_penalty": 0.5, "frequency_penalty": 0.5}},
    "n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[7], [8, 9], [5, 6, 7]]},
    "decay": {"exponential_decay_length_penalty": (2, 1.2), "eos_token_id": 3},
    "forced tokens": {"forced_eos_token_id": 4},
    "one token": {"prompt": (5,)},
    "a long prompt": {"prompt": tuple(range(5, 80))},
}


@pytest.fixture(scope="module")
def engine():
    with serve(tiny_model("llama"), engine=OPTIONS) as model:
        engine = model.engine
        with counting_compilations(engine) as compiled:
            engine.warm_up()
        yield engine, compiled


def test_warm_up_compiles_few_programs(engine):
    """One for each bucket of tokens and of decode rows, one with log-probabilities of prompts, the sampler's."""
    engine, compiled = engine
    num_steps = 2 + 2 + 1  # of 32 and 64 tokens, of 4 and 8 rows
    num_sampling = 3 + 1  # three levels; log-probabilities of new tokens
    assert engine.stats().num_programs == num_steps + num_sampling
    num_small = 2  # pages copied, rows of tables written
    assert len(compiled) <= num_steps + num_sampling + num_small, compiled


def test_warm_up_behind_requests_makes_the_same_programs_and_ends_with_the_engine():
    with serve(tiny_model("llama"), engine=OPTIONS) as model:
        engine, compiler = model.engine, model.engine._runner._background
        engine.warm_up(wait=False)
        answer = engine.submit(request()).result()  # meanwhile
        compiler.wait()
        with counting_compilations(engine) as compiled:
            assert list(engine._runner.compile_tasks()) and engine.submit(request()).result() == answer
            engine.submit(request(tuple(range(5, 80)))).result()
        assert not compiled
        engine._runner.compile_in_background()
    assert not compiler._tasks, "programs of a closed engine hold its weights"


def test_the_programs_of_the_documents_example():
    """The count of the documents, for `max_model_len` 640 and 32 slots on a CPU; nothing is compiled here."""
    options = EngineOptions(max_model_len=640, max_num_seqs=32)
    with serve(tiny_model("llama"), engine=options) as model:
        runner = model.engine._runner
        steps = list(runner.compile_tasks())
        sampling = list(runner._sampler.compile_tasks(jax.ShapeDtypeStruct((32, VOCAB_SIZE), np.float32)))
        num_small = 2  # rows of tables, which are among those of the sampler, and pages copied
        # Where products of many rows are XLA's (AMX), padding costs more, and there is one more size of steps.
        num_steps = 9 if skips_equal_rows() else 10
        assert len(steps) == num_steps
        assert len(steps) + len(sampling) + 1 == num_steps + 4 + num_small
        assert 9 + 4 + num_small == 15
    assert "warm-up makes 15 programs on a CPU" in (ROOT / "docs/compilation.md").read_text()
    assert "(15 for 32 requests of 640 tokens)" in (ROOT / "README.md").read_text()


def test_first_uses_in_traffic_compile_nothing(engine):
    engine, _ = engine
    with counting_compilations(engine) as compiled:
        running = [engine.submit(request(prompt=(6, 7, index), max_new_tokens=60)) for index in range(5, 8)]
        for name, options in FIRST_USES.items():
            assert engine.submit(request(**options)).result(), name
            assert compiled == [], name
        together = [engine.submit(request(**options)) for options in FIRST_USES.values()]
        parent = engine.submit(request(max_new_tokens=30, temperature=1.0))
        forks = [engine.submit(request(max_new_tokens=9, temperature=1.0, fork_of=parent.request_id)) for _ in range(3)]
        assert all(handle.result() for handle in (*together, parent, *forks, *running))
    assert compiled == []
