"""Whisper on the engine: each sound has the tokens that transformers gives it alone, whatever runs beside it."""

import copy
import functools
import threading

import numpy as np
import pytest
import torch
import transformers
from engine_requests import engine_request
from steps_taken import steps_taken
from thorough import thorough
from threads import at_once
from tiny_whisper import WIDTH, tiny_whisper
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor

from torchax_serve import EngineOptions, InvalidArgumentError, UnsupportedModelError, serve, to_jax
from torchax_serve.engine.factory import build_engine
from torchax_serve.runtime.model_generate import absorb_processors

LONG = 56
NEW, SOURCE_LEN = 12, 40
NUM_SOUNDS = 6
OPTIONS = EngineOptions(max_num_seqs=4, page_size=4, max_num_batched_tokens=20)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@functools.cache
def eager():
    return tiny_whisper(
        encoder_layers=1,
        num_mel_bins=8,
        max_source_positions=SOURCE_LEN,
        suppress_tokens=[5, 6],
        begin_suppress_tokens=[7, 2],
        is_multilingual=True,
        lang_to_id={"<|en|>": 50, "<|de|>": 51},
        task_to_id={"transcribe": 52, "translate": 53},
        no_timestamps_token_id=54,
    )


@functools.cache
def features():
    return torch.randn(NUM_SOUNDS, 8, 2 * SOURCE_LEN, generator=torch.Generator().manual_seed(1))


def expected(sound=slice(None), **options):
    options = {"max_new_tokens": NEW, "language": "en", **options}
    return copy.deepcopy(eager()).generate(input_features=features()[sound], **options)


@pytest.fixture(scope="module")
def served():
    with serve(copy.deepcopy(eager()), engine=OPTIONS) as model:
        model.engine.check_integrity = True
        yield model


def ours(model, sound=slice(None), **options):
    """Tokens, and how many steps the engine took for them."""
    before = steps_taken(model)
    options = {"max_new_tokens": NEW, "language": "en", **options}
    return model.generate(input_features=features()[sound], **options), steps_taken(model) - before


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"language": "de", "task": "translate"},
        {"language": None},
        {"max_new_tokens": 30},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 3},
        {"prompt_ids": torch.tensor([57, 20, 30, 11])},
        {"suppress_tokens": None, "begin_suppress_tokens": None},
        {"return_timestamps": True},
        {"num_return_sequences": 1, "num_beams": 1, "do_sample": False, "temperature": 0.0},
    ],
)
def test_generate_runs_on_the_engine(served, options):
    tokens, num_steps = ours(served, **options)
    assert torch.equal(tokens, expected(**options))
    assert num_steps > 0


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        thorough({"max_time": 100.0}),
        thorough({"return_dict_in_generate": True, "output_scores": True}),
        thorough({"logits_processor": LogitsProcessorList([transformers.TopKLogitsWarper(50)])}),
        {"max_new_tokens": 6, "temperature": (0.0,), "logprob_threshold": -100.0, "return_timestamps": True},
    ],
)
def test_unsupported_options_do_not_run_on_the_engine(served, options):
    def sequences(output):
        return output if isinstance(output, torch.Tensor) else output["sequences"]

    tokens, num_steps = ours(served, **options)
    assert torch.equal(sequences(tokens), sequences(expected(**options)))
    assert num_steps == 0


def test_sampling_uses_the_torch_generator(served):
    torch.manual_seed(3)
    tokens, num_steps = ours(served, do_sample=True, temperature=0.7)
    assert num_steps > 0
    torch.manual_seed(3)
    assert torch.equal(
        served.torch_model.generate(
            input_features=features(), max_new_tokens=NEW, language="en", do_sample=True, temperature=0.7
        ),
        tokens,
    )


def test_long_audio_runs_on_the_engine(served):
    long = torch.cat(list(features()[:3]), -1)[None]
    options = {"return_timestamps": True, "max_new_tokens": 6, "language": "en"}
    options["attention_mask"] = torch.ones(1, long.shape[-1], dtype=torch.long)
    wanted = copy.deepcopy(eager()).generate(input_features=long, **options)
    before = steps_taken(served)
    assert torch.equal(served.generate(input_features=long, **options), wanted)
    assert steps_taken(served) > before


def test_rows_of_one_call_may_end_at_different_lengths(served):
    """One end token among those that are likely: rows of other lengths, padded behind."""
    long = expected(max_new_tokens=30)
    ends = [int(token) for token in long[0, 3:6]]
    options = {"eos_token_id": ends, "begin_suppress_tokens": None, "max_new_tokens": 30}
    wanted = expected(**options)
    tokens, num_steps = ours(served, **options)
    assert torch.equal(tokens, wanted) and num_steps > 0
    assert wanted.shape[1] > NEW and bool((wanted[:, -1] == 0).any())  # one row goes on where another has ended


def test_torch_model_uses_the_engine_and_its_copies_do_not(served):
    before = steps_taken(served)
    options = {"input_features": features(), "max_new_tokens": NEW, "language": "en"}
    assert torch.equal(served.torch_model.generate(**options), expected())
    after = steps_taken(served)
    assert after > before
    copied = copy.deepcopy(served.torch_model)
    assert copied._engine_rows is None
    assert torch.equal(copied.generate(**options), expected())
    assert steps_taken(served) == after


def test_threads_share_steps(served):
    alone = [expected(slice(i, i + 1)) for i in range(NUM_SOUNDS)]

    def transcribe(i):
        return served.generate(input_features=features()[i : i + 1], max_new_tokens=NEW, language="en")

    before = steps_taken(served)
    found = at_once(transcribe, range(NUM_SOUNDS))
    assert all(torch.equal(tokens, wanted) for tokens, wanted in zip(found, alone, strict=True))
    assert steps_taken(served) - before > 0
    assert len({tuple(tokens.flatten().tolist()) for tokens in alone}) > 1


def encoded():
    with torch.no_grad():
        return eager().get_encoder()(features()).last_hidden_state.numpy()


def request(output):
    generation = transformers.GenerationConfig(max_new_tokens=LONG, eos_token_id=None)
    return engine_request([1, 50, 52, 54], generation, None, seed=0, encoded=output[None])


def alone():
    """Tokens behind the prompt, from transformers' own loop over the decoder."""
    options = {"max_new_tokens": LONG, "do_sample": False, "eos_token_id": None}
    model = copy.deepcopy(eager())
    for name in ("suppress_tokens", "begin_suppress_tokens", "eos_token_id"):
        setattr(model.generation_config, name, None)
    generate = transformers.GenerationMixin.generate
    prompt = torch.tensor([[1, 50, 52, 54]]).expand(NUM_SOUNDS, -1)
    return generate(model, features(), decoder_input_ids=prompt, **options)[:, 4:].tolist()


def test_aborted_and_preempted_requests():
    state_bytes = 5 * 2 * 2 * SOURCE_LEN * WIDTH * 4  # of five slots: keys and values of two layers
    options = EngineOptions(
        **{**vars(OPTIONS), "kv_cache_memory_bytes": 2 * state_bytes}
    )  # 49 pages, where four want 60
    engine = build_engine(to_jax(copy.deepcopy(eager()))._jax_runtime, options)
    engine.check_integrity = True
    wanted, outputs = alone(), encoded()
    try:
        handles = [engine.submit(request(output)) for output in outputs]
        dropped = [engine.submit(request(output)) for output in outputs[:3]]
        threading.Timer(0.1, dropped[0].cancel).start()
        for handle in dropped[1:]:
            handle.cancel()
        assert [handle.result() for handle in handles] == wanted
        for handle, tokens in zip(dropped, wanted, strict=False):
            found = handle.result()
            assert found == tokens[: len(found)]
        again = [engine.submit(request(output)) for output in outputs[:3][::-1]]  # slots that others have had
        assert [handle.result() for handle in again] == wanted[2::-1]
        stats = engine.stats()
    finally:
        engine.close()
    assert stats.scheduler.num_preemptions > 0
    assert stats.scheduler.num_hit_tokens == 0  # the same prompt stands behind other sounds
    assert stats.num_steps < LONG * NUM_SOUNDS  # rows side by side
    assert [group.num_used for group in stats.scheduler.pages] == [0]


def test_number_of_slots_follows_memory():
    each = 2 * 2 * SOURCE_LEN * WIDTH * 4
    runtime = to_jax(copy.deepcopy(eager()))._jax_runtime
    engine = build_engine(runtime, EngineOptions(max_num_seqs=32, page_size=4, kv_cache_memory_bytes=2 * 7 * each))
    try:
        assert "for the states of requests" in engine.description
        assert engine._runner._executor._num_slots == 4  # of six, a power of two
    finally:
        engine.close()
    with pytest.raises(UnsupportedModelError, match="expected memory for keys and values of two encoder outputs"):
        build_engine(runtime, EngineOptions(max_num_seqs=32, page_size=4, kv_cache_memory_bytes=2 * each))


def test_bad_input(served):
    output = encoded()[0]
    with pytest.raises(InvalidArgumentError, match=r"expected the output \[1, 40, 32\] of the encoder, got"):
        served.engine.submit(request(output[:30]))
    with pytest.raises(InvalidArgumentError, match="got 2 token ids; call transcribe"):
        config = transformers.GenerationConfig(max_new_tokens=2)
        served.engine.submit(engine_request([1], config, seed=0, source_ids=[3, 4]))
    with pytest.raises(
        InvalidArgumentError, match="max_encoder_len: expected None for a model whose encoder has a fixed"
    ):
        build_engine(served.torch_model._jax_runtime, EngineOptions(max_encoder_len=30))
    with pytest.raises(InvalidArgumentError, match="max_model_len: expected at most 64"):
        build_engine(served.torch_model._jax_runtime, EngineOptions(max_model_len=65))
    assert np.isfinite(output).all()


def test_logits_processors_become_equivalent_options():
    other = transformers.TopKLogitsWarper(5)
    config = transformers.GenerationConfig()
    assert absorb_processors(config, [SuppressTokensLogitsProcessor([3, 4]), other], 4) == ([other], [other])
    assert config.suppress_tokens == [3, 4]
    second = SuppressTokensLogitsProcessor([8])
    assert absorb_processors(config, [second], 4) == ([second], [second])  # the option says something else already
