"""Evicted prefixes in host memory: loaded pages give the bits of computed ones, wherever they lie."""

import numpy as np
import pytest
import torch
import transformers
from engine_models import VOCAB_SIZE, tiny_model
from thorough import thorough

from torchax_serve import EngineOptions, InvalidArgumentError, SamplingParams, serve

LAYOUT = {"max_model_len": 64, "max_num_seqs": 2, "page_size": 8, "max_num_batched_tokens": 32}
PARAMS = SamplingParams(max_new_tokens=6, temperature=0.0, logprobs=0)
PROMPTS = [[int(t) for t in np.random.default_rng(seed).integers(3, VOCAB_SIZE, 41)] for seed in range(5)]


def pages_bytes(served, num_pages):
    """Bytes of `num_pages` pages of every layer."""
    plan = served.engine._runner._cache.plan
    return num_pages * sum(shape.page_bytes(plan.page_size) for shape in plan.shapes)


def answers(served, prompts=PROMPTS):
    """Tokens and log-probabilities, one request after the other."""
    found = []
    for prompt in prompts:
        (answer,) = served.generate_batch([prompt], [PARAMS])
        found.append((answer.token_ids, [each.logprob for each in answer.logprobs]))
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {}), thorough("gemma3_text", {}), thorough("bloom", {}), thorough("llama", {"kv_cache_dtype": "int8"})],
    ids=["packed", "windows", "per-sequence", "int8"],
)
def test_a_loaded_prefix_gives_the_bits_of_a_computed_one(name, options):
    model = tiny_model(name)
    with serve(model, engine=EngineOptions(**LAYOUT, **options)) as plain:
        small = pages_bytes(plain, 14)
        expected = answers(plain)
    if not options:
        for prompt, (tokens, _) in zip(PROMPTS, expected, strict=True):
            eager = tiny_model(name).generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
            assert eager[0, len(prompt) :].tolist() == tokens
    engine = EngineOptions(**LAYOUT, **options, kv_cache_memory_bytes=small, kv_offloading_bytes=1 << 20)
    with serve(tiny_model(name), engine=engine) as served:
        served.engine.warm_up()
        programs = served.stats().num_programs
        served.engine.check_integrity = True
        assert answers(served) == expected
        before = served.stats().scheduler.num_hit_tokens
        assert answers(served) == expected
        assert served.stats().scheduler.num_hit_tokens - before == 40 * len(PROMPTS)
        assert all(usage.num_loaded and usage.num_offloaded for usage in served.stats().scheduler.pages)
        batch = served.generate_batch(PROMPTS[::-1], [PARAMS] * len(PROMPTS))
        assert [answer.token_ids for answer in batch[::-1]] == [tokens for tokens, _ in expected]
        assert served.stats().num_programs == programs


def test_new_weights_find_no_prefix_of_before():
    model = tiny_model("llama")
    engine = EngineOptions(**LAYOUT, kv_cache_memory_bytes=14 * 2048, kv_offloading_bytes=1 << 20)
    with serve(model, engine=engine) as served:
        answers(served)
        assert served.stats().scheduler.pages[0].num_host_used
        served.set_weights({name: tensor * 0.9 for name, tensor in model.state_dict().items()})
        assert not served.stats().scheduler.pages[0].num_host_used
        hits = served.stats().scheduler.num_hit_tokens
        answers(served)
        assert served.stats().scheduler.num_hit_tokens == hits


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("t5", {"kv_offloading_bytes": 4096}, "expected 0 for a model whose requests share no prefixes"),
        ("llama", {"kv_offloading_bytes": 10}, "expected 0 or at least [0-9]+, two pages of each layer, got 10"),
    ],
)
def test_what_stores_no_prefix_is_refused(name, options, message):
    engine = EngineOptions(**LAYOUT, **options)
    sizes = {"vocab_size": 512, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    t5 = transformers.T5Config(**sizes, decoder_start_token_id=0)
    model = tiny_model(name) if name == "llama" else transformers.T5ForConditionalGeneration(t5)
    with serve(model.eval(), engine=engine) as served, pytest.raises(InvalidArgumentError, match=message):
        served.generate_batch(PROMPTS[:1], [PARAMS])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offloading_bytes": -1}, "kv_offloading_bytes: expected a whole number >= 0, got -1"),
        ({"kv_offloading_bytes": 1.5}, "kv_offloading_bytes: expected a whole number >= 0, got 1.5"),
        ({"kv_offloading_bytes": 8, "enable_prefix_caching": False}, "expected 0 with enable_prefix_caching=False"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        EngineOptions(**options)
