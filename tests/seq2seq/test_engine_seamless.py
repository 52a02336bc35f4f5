"""SeamlessM4T's text answers on the engine: each has the tokens that transformers gives it alone."""

import copy
import functools

import numpy as np
import pytest
import torch
import transformers
from engine_requests import engine_request
from steps_taken import steps_taken
from thorough import except_for
from threads import at_once
from transformers import GenerationConfig

from model_adapters.caches.encoder_mask import SourceMask, mask_over_audio
from parity_sweep.tiny.audio import audio_model
from torchax_serve import EngineOptions, InvalidArgumentError, SamplingParams, serve

NEW, WIDTH, MAX_SOURCE = 12, 32, 48
STATE_BYTES = 5 * 4 * MAX_SOURCE * WIDTH * 4  # of five slots: keys and values of two layers
PAGE_BYTES = 4 * 4 * WIDTH * 4
OPTIONS = EngineOptions(
    max_model_len=40,
    max_num_seqs=4,
    page_size=4,
    max_num_batched_tokens=20,
    max_encoder_len=MAX_SOURCE,
    kv_cache_memory_bytes=STATE_BYTES + 9 * PAGE_BYTES,  # where four requests want twelve
)
TEXTS = ("SeamlessM4TForTextToText", "SeamlessM4Tv2ForTextToText")
SOUNDS = ("SeamlessM4TForSpeechToText", "SeamlessM4Tv2ForSpeechToText")
LENGTHS = (5, 13, 40, 1, 31, 9)
LANGUAGES = ("deu", "fra", None, "fra", "deu", None)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@functools.cache
def eager(name):
    model_type = "seamless_m4t_v2" if "v2" in name else "seamless_m4t"
    model = audio_model(model_type, getattr(transformers, name), 0)
    model.generation_config.text_decoder_lang_to_code_id = {"deu": 50, "fra": 51}
    model.generation_config.eos_token_id = None
    return model


def inputs(name):
    """Of one call each, of different lengths; of sounds one without a mask, one of two, and one padded behind."""
    generator = torch.Generator().manual_seed(3)
    if name in TEXTS:
        return [{"input_ids": torch.randint(3, 100, (1, length), generator=generator)} for length in LENGTHS]
    calls = []
    for length in LENGTHS:
        features = torch.randn(1, 8 * length, eager(name).config.feature_projection_input_dim, generator=generator)
        mask = torch.ones(features.shape[:2], dtype=torch.long)
        calls.append({"input_features": features, "attention_mask": mask})
    del calls[2]["attention_mask"]
    calls[4]["attention_mask"][:, 100:] = 0
    return calls


def together(name):
    """Two inputs of one call, the second padded behind its end."""
    first, second = inputs(name)[2], inputs(name)[1]
    key = next(iter(first))
    missing = first[key].shape[1] - second[key].shape[1]
    padding = (0, 0, 0, missing) if first[key].ndim == 3 else (0, missing)
    mask = torch.ones(2, first[key].shape[1], dtype=torch.long)
    mask[1, second[key].shape[1] :] = 0
    return {key: torch.cat([first[key], torch.nn.functional.pad(second[key], padding)]), "attention_mask": mask}


def expected(name, call, **options):
    return copy.deepcopy(eager(name)).generate(**call, **{"max_new_tokens": NEW, **options})


@pytest.fixture(scope="module", params=except_for([SOUNDS[-1]], TEXTS + SOUNDS))
def served(request):
    with serve(copy.deepcopy(eager(request.param)), engine=OPTIONS) as model:
        model.engine.check_integrity = True
        yield request.param, model


def ours(model, call, **options):
    """Tokens, and how many steps the engine took for them."""
    before = steps_taken(model)
    return model.generate(**call, **{"max_new_tokens": NEW, **options}), steps_taken(model) - before


def of_threads(model, calls, max_new_tokens):
    """Tokens of each call, all of them at once."""
    return at_once(lambda call: model.generate(**call, max_new_tokens=max_new_tokens), calls)


@pytest.mark.thorough
def test_calls_of_many_threads_share_steps_and_pages(served):
    name, model = served
    calls = [{**call, "tgt_lang": lang} for call, lang in zip(inputs(name), LANGUAGES, strict=True)]
    wanted = [expected(name, call) for call in calls]
    for _ in range(2):  # the first time their encoders are compiled
        before = steps_taken(model)
        found = of_threads(model, calls, NEW)
        assert all(torch.equal(tokens, want) for tokens, want in zip(found, wanted, strict=True))
    assert 0 < steps_taken(model) - before < NEW * len(calls)
    stats = model.stats()
    assert stats.scheduler.num_hit_tokens == 0  # the same prompt stands behind other inputs
    assert [group.num_used for group in stats.scheduler.pages] == [0]
    assert len({tuple(tokens.flatten().tolist()) for tokens in wanted}) > 3


@pytest.mark.parametrize(
    "options",
    [
        {"tgt_lang": "deu"},
        {"decoder_input_ids": torch.tensor([[1, 50, 7], [1, 51, 9]])},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 3},
        {"suppress_tokens": [5, 6], "forced_bos_token_id": 8},
    ],
)
def test_rows_of_one_call_share_steps(served, options):
    name, model = served
    tokens, num_steps = ours(model, together(name), **options)
    assert torch.equal(tokens, expected(name, together(name), **options))
    assert 0 < num_steps < 2 * NEW


def test_preempted_requests_continue_with_equal_tokens(served):
    name, model = served
    calls = inputs(name)[:4]
    wanted = [expected(name, call, max_new_tokens=30) for call in calls]
    before = model.stats().scheduler.num_preemptions
    for _ in range(5):  # threads may come one after the other, and then all have room
        found = of_threads(model, calls, 30)
        assert all(torch.equal(tokens, want) for tokens, want in zip(found, wanted, strict=True))
        if model.stats().scheduler.num_preemptions > before:
            break
    else:
        pytest.fail("no request has made room for another")


def test_prompts_with_inner_padding_run_as_a_static_batch(served):
    name, model = served  # padding has no position, and those behind it count only the tokens of their step
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 100, (6, 1, 16), generator=generator)
    prompts[:, :, [3, 5, 6]] = eager(name).config.pad_token_id
    for prompt in prompts:
        call = {**inputs(name)[2], "decoder_input_ids": prompt}
        tokens, num_steps = ours(model, call)
        assert torch.equal(tokens, expected(name, call))
        assert num_steps == 0


def test_rows_of_one_call_may_end_at_different_lengths(served):
    name, model = served
    ends = expected(name, together(name))[:, 4:6].flatten().tolist()
    wanted = expected(name, together(name), eos_token_id=ends)
    tokens, num_steps = ours(model, together(name), eos_token_id=ends)
    assert torch.equal(tokens, wanted) and num_steps > 0
    assert wanted.shape[1] < 1 + NEW


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"return_dict_in_generate": True, "output_scores": True}])
def test_unsupported_options_do_not_run_on_the_engine(served, options):
    name, model = served
    tokens, num_steps = ours(model, together(name), **options)
    wanted = expected(name, together(name), **options)
    assert torch.equal(getattr(tokens, "sequences", tokens), getattr(wanted, "sequences", wanted))
    assert num_steps == 0


def test_inputs_too_long_for_the_slots_run_as_a_static_batch(served):
    name, model = served
    long = {key: torch.cat([value, value], 1) for key, value in inputs(name)[2].items()}
    tokens, num_steps = ours(model, long)
    assert torch.equal(tokens, expected(name, long))
    assert num_steps == 0


def test_masks_with_holes_run_as_a_static_batch(served):
    name, model = served
    call = copy.deepcopy(together(name))
    call["attention_mask"][:, 2:5] = 0
    tokens, num_steps = ours(model, call)
    assert torch.equal(tokens, expected(name, call))
    assert num_steps == 0


@pytest.mark.parametrize("name", TEXTS[:1])
def test_streams_run_on_the_engine(name):
    sources = [call["input_ids"][0].tolist() for call in inputs(name)]
    wanted = [expected(name, call)[0, 1:].tolist() for call in inputs(name)]
    with serve(copy.deepcopy(eager(name)), engine=OPTIONS) as model:
        config = copy.deepcopy(model.generation_config)
        config.update(max_new_tokens=NEW)
        streams = [model.iter_tokens(source, config) for source in sources]
        assert [list(stream) for stream in streams] == wanted
        assert 0 < model.engine.stats().num_steps < NEW * len(sources)
        only = SamplingParams(allowed_token_ids=[77])
        assert list(model.iter_tokens(sources[0], config, params=only)) == [77] * NEW
        with pytest.raises(InvalidArgumentError, match="expected token ids from 0 to"):
            model.iter_tokens([3, 4000], config)


def test_outputs_out_of_range(served):
    _, model = served
    known = {"config": GenerationConfig(max_new_tokens=2), "seed": 0}
    said = r"expected the output \[1, 1 to 48, 32\] of the encoder, got \["
    for shape in ((1, 0, WIDTH), (1, MAX_SOURCE + 1, WIDTH), (1, 4, WIDTH + 1), (4, WIDTH)):
        with pytest.raises(InvalidArgumentError, match=said):
            model.engine.submit(engine_request([1], encoded=np.zeros(shape, np.float32), **known))
    with pytest.raises(InvalidArgumentError, match="got 2 token ids; call transcribe"):
        model.engine.submit(engine_request([1], source_ids=[3, 4], **known))


@pytest.mark.parametrize(("stride", "kernel"), [(8, 8), (1, 1), (2, 3), (3, 8), (4, 5)])
def test_audio_masks_match_the_lengths_that_the_model_computes(stride, kernel):
    model = copy.copy(eager(SOUNDS[0]))
    model.config = copy.copy(model.config)
    model.config.adaptor_stride, model.config.adaptor_kernel_size = stride, kernel
    mask = mask_over_audio(model)
    assert mask == SourceMask(stride, kernel, kernel // 2)
    counted = model._compute_sub_sample_lengths_from_attention_mask
    for length in range(1, 20):
        argument = torch.from_numpy(np.array(mask.argument(20, length)))
        assert int(counted(argument)) == length
    ones = torch.tril(torch.ones(40, 40, dtype=torch.long))
    assert mask.seen(ones.sum(1).numpy()).tolist() == counted(ones).int().tolist()
