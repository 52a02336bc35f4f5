"""FSMT and LED, whose code makes no masks for steps: tokens of the fast loop, and of requests that share steps."""

import copy
import functools
import inspect

import pytest
import torch
import transformers
from engine_requests import engine_request
from steps_taken import steps_taken
from thorough import except_for, pairs
from transformers import GenerationConfig
from transformers.models.fsmt import modeling_fsmt

from model_adapters.caches import native_cache
from parity_sweep.tiny.config import tiny_config
from parity_sweep.tiny.models import random_model
from torchax_serve import EngineOptions, serve, to_jax
from torchax_serve.engine.factory import build_engine

NEW = 12
FORWARD = inspect.signature(modeling_fsmt.SinusoidalPositionalEmbedding.forward)
COUNTS = bool({"past_key_values_length", "cache_length"} & set(FORWARD.parameters))
"""Whether FSMT knows how many tokens its cache has, as it does not on transformers 5.17."""
CLASSES = {"fsmt": "FSMTForConditionalGeneration", "led": "LEDForConditionalGeneration"}
CALLS = [
    {},
    {"decoder_input_ids": torch.tensor([[2, 7, 30, 11]])},
    {"num_beams": 3},
    {"min_new_tokens": 30, "max_new_tokens": 30},
]
ON_ENGINE = [model_type for model_type in CLASSES if model_type != "fsmt" or COUNTS]
OVERRIDES = {"fsmt": {}, "led": {"attention_window": [8, 8]}}
LENGTHS = (5, 13, 40, 2, 31, 9)
OPTIONS = {"max_model_len": 40, "max_num_seqs": 4, "page_size": 4, "max_num_batched_tokens": 20, "max_encoder_len": 48}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@functools.cache
def eager(model_type):
    config = tiny_config(model_type, as_decoder=False, overrides=OVERRIDES[model_type])
    model = random_model(getattr(transformers, CLASSES[model_type]), config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(parameter.numel()))
    for name in ("eos_token_id", "forced_eos_token_id", "num_beams", "max_length"):
        setattr(model.generation_config, name, None)
    return model


def sources():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 96, (1, length), generator=generator) for length in LENGTHS]


def alone(model_type, source, **options):
    mask = torch.ones_like(source)
    return eager(model_type).generate(source, attention_mask=mask, **{"max_new_tokens": NEW, **options})


@pytest.mark.parametrize(("model_type", "options"), pairs(CLASSES, CALLS, one_in=2))
def test_generate_matches_a_growing_cache(model_type, options):
    served = to_jax(copy.deepcopy(eager(model_type)))
    for source in sources()[:2]:
        found = served.generate(source, attention_mask=torch.ones_like(source), **{"max_new_tokens": NEW, **options})
        assert torch.equal(found, alone(model_type, source, **options))
    has_cache = model_type in ON_ENGINE
    assert served._jax_runtime.cache_support.is_supported == has_cache
    assert served._jax_runtime.steps.num_traces["decode"] == (1 if has_cache and "num_beams" not in options else 0)


def test_cache_with_only_the_last_prompt_token_is_used(monkeypatch):
    monkeypatch.setattr(modeling_fsmt.SinusoidalPositionalEmbedding, "forward", lambda self, input: None)
    assert native_cache.reason(eager("fsmt")) == "its cache holds the last token of a prompt alone"


@pytest.mark.parametrize("model_type", except_for(["led"], ON_ENGINE))
def test_batched_requests_have_the_tokens_of_single_ones(model_type):
    model = copy.deepcopy(eager(model_type))
    wanted = [alone(model_type, source)[0, 1:].tolist() for source in sources()]
    assert len({tuple(tokens) for tokens in wanted}) > 4
    with serve(model, engine=EngineOptions(**OPTIONS)) as served:
        served.engine.check_integrity = True
        config = copy.deepcopy(served.generation_config)
        config.update(max_new_tokens=NEW)
        for _ in range(2):  # slots that others have had
            before = steps_taken(served)
            streams = [served.iter_tokens(source[0].tolist(), config) for source in sources()]
            assert [list(stream) for stream in streams] == wanted
            assert 0 < steps_taken(served) - before < NEW * len(wanted)
        longer = torch.cat(sources()[1:3], 1)
        before = steps_taken(served)
        assert list(served.iter_tokens(longer[0].tolist(), config)) == alone(model_type, longer)[0, 1:].tolist()
        assert steps_taken(served) == before


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", ON_ENGINE)
def test_preempted_requests_are_recomputed(model_type):
    long = 30
    runtime = to_jax(copy.deepcopy(eager(model_type)))._jax_runtime
    state_bytes, page_bytes = 5 * 4 * 48 * 32 * 4, 4 * 4 * 32 * 4
    engine = build_engine(runtime, EngineOptions(**OPTIONS, kv_cache_memory_bytes=state_bytes + 12 * page_bytes))
    engine.check_integrity = True
    start = eager(model_type).generation_config.decoder_start_token_id
    requests = []
    for source in sources():
        with torch.no_grad():
            hidden = eager(model_type).get_encoder()(source, attention_mask=torch.ones_like(source))[0]
        config = GenerationConfig(max_new_tokens=long)
        known = {"seed": 0, "encoded": hidden.numpy()}
        requests.append(engine_request([start], config, **known))
    try:
        handles = [engine.submit(request) for request in requests]
        wanted = [alone(model_type, source, max_new_tokens=long)[0, 1:].tolist() for source in sources()]
        assert [handle.result() for handle in handles] == wanted
        assert engine.stats().scheduler.num_preemptions > 0
    finally:
        engine.close()
