"""Requests on both sides of the length where rotary frequencies change, side by side: each as it is alone."""

import sys
from pathlib import Path

import pytest
import torch
import transformers
from thorough import thorough

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from engine_requests import engine_request
from rope_models import LENS, NUM_NEW, answers, prompt, rope_model

from parity_sweep.tiny.rope_types import BORDER
from torchax_serve import EngineOptions, serve

PAGE_LEN = 4
OPTIONS = EngineOptions(
    max_model_len=64, max_num_seqs=4, page_size=PAGE_LEN, max_num_batched_tokens=24
)  # prompts come in chunks
MODELS = [("llama", "longrope"), ("llama", "dynamic"), ("phi3", "longrope"), ("phimoe", "longrope")]
"""On the packed cache."""
BY_THEMSELVES = [("diffllama", "dynamic"), ("diffllama", "longrope")]
"""Each request a forward of its own."""


def submit(model, prompts, num_new=NUM_NEW):
    config = transformers.GenerationConfig(max_new_tokens=num_new, do_sample=False)
    requests = [engine_request(ids[0].tolist(), config) for ids in prompts]
    return [handle.result() for handle in model.engine.submit_all(requests)]


def alone(family, kind, prompts):
    return [answers(family, kind, ids)[0].tolist() for ids in prompts]


# Each a model of its own; the rest follow the same code.
ALWAYS = [("llama", "dynamic")]


@pytest.mark.parametrize(
    ("family", "kind"), [each if each in ALWAYS else thorough(*each) for each in MODELS + BY_THEMSELVES]
)
def test_requests_on_both_sides_of_the_border(family, kind):
    mixed = [prompt(length) for length in (*LENS, LENS[1] + 2)]
    # The same beginnings on the other side: what is in the cache has other frequencies.
    shared = [prompt(LENS[-1])[:, : LENS[1]], torch.cat([prompt(LENS[1]), prompt(12, seed=1)], 1), prompt(LENS[-1])]
    with serve(rope_model(family, kind), engine=OPTIONS) as model:
        model.engine.check_integrity = True
        assert ("per-sequence" in model.engine.description) == ((family, kind) in BY_THEMSELVES)
        assert submit(model, mixed) == alone(family, kind, mixed)
        before = model.stats().scheduler.num_hit_tokens
        assert submit(model, shared) == alone(family, kind, shared)
        num_hits = model.stats().scheduler.num_hit_tokens - before
        num_expected = (LENS[-1] - 1) // PAGE_LEN * PAGE_LEN  # of the last prompt, which has been there
        if (
            family == "phi3"
        ):  # what crosses the border is computed anew: the first begins as the last does, the second as one before
            num_expected += 2 * (LENS[1] // PAGE_LEN * PAGE_LEN)
        assert num_hits == num_expected


@pytest.mark.parametrize(("family", "kind"), [("phi3", "longrope"), ("llama", "dynamic")])
def test_requests_that_have_to_make_room(family, kind):
    num_new = BORDER  # the answers of all cross the border
    prompts = [prompt(LENS[0], seed) for seed in range(4)]
    page_bytes = 2 * 2 * 2 * 8 * 4 * PAGE_LEN  # of layers, keys and values, heads, channels, bytes of a number
    options = EngineOptions(
        max_model_len=64,
        max_num_seqs=4,
        page_size=PAGE_LEN,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=16 * page_bytes,
    )
    with serve(rope_model(family, kind), engine=options) as model:
        model.engine.check_integrity = True
        expected = [answers(family, kind, ids, num_new=num_new)[0].tolist() for ids in prompts]
        assert submit(model, prompts, num_new) == expected
        num_anew = len(prompts) if family == "phi3" else 0
        assert model.stats().scheduler.num_preemptions > num_anew


def test_prompts_longer_than_were_trained_first():
    prompts = [prompt(50)]
    with serve(rope_model("llama", "yarn_unchanged")) as model:
        assert submit(model, prompts) == alone("llama", "yarn_unchanged", prompts)
