"""Encoder-decoder models on the engine: each request has the tokens that transformers gives it alone."""

import copy
import dataclasses
import functools
import threading

import pytest
import torch
import transformers
from engine_requests import engine_request
from thorough import except_for
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from weights import draw_matrices

from torchax_serve import (
    EngineOptions,
    InvalidArgumentError,
    OutOfMemoryError,
    RequestError,
    SamplingParams,
    UnsupportedArgumentError,
    serve,
    to_jax,
)
from torchax_serve.engine.factory import build_engine
from torchax_serve.executors.per_sequence import factory as per_sequence_factory
from torchax_serve.executors.per_sequence.executor import PerSequenceExecutor
from torchax_serve.kv_cache import memory

VOCAB_SIZE = 97
START = 1
NEW = 12
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": START}
LAYERS = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "forced_eos_token_id": None,
}
CONFIGS = {
    "t5": {"d_model": 32, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "d_ff": 48},
    "bart": LAYERS,
    "marian": {**LAYERS, "decoder_vocab_size": VOCAB_SIZE},
    "m2m_100": LAYERS,
}
OPTIONS = EngineOptions(max_model_len=40, max_num_seqs=4, page_size=4, max_num_batched_tokens=20, max_encoder_len=48)
LENGTHS = (5, 13, 40, 1, 31, 48, 9)

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")


@functools.cache
def _made(model_type):
    config = transformers.AutoConfig.for_model(model_type, vocab_size=VOCAB_SIZE, **SPECIAL, **CONFIGS[model_type])
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    draw_matrices(model, std=0.4)
    model.generation_config.eos_token_id = None
    model.generation_config.num_beams = None
    return model


def tiny(model_type):
    return copy.deepcopy(_made(model_type))


def sources():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]


def alone(model_type, ids, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    with torch.no_grad():
        return [_made(model_type).generate(torch.tensor([source]), **options)[0, 1:].tolist() for source in ids]


def request(source, length=NEW, **config):
    generation = transformers.GenerationConfig(max_new_tokens=length, **config)
    return engine_request([START], generation, None, seed=0, source_ids=source)


@pytest.mark.parametrize("model_type", except_for(["t5"], CONFIGS))
def test_batched_requests_have_the_tokens_of_single_ones(model_type):
    """Inputs of many lengths side by side, some aborted, and too few pages for all."""
    runtime = to_jax(tiny(model_type))._jax_runtime
    state_bytes = 5 * 4 * 48 * 32 * 4  # of five slots: keys and values of two layers
    page_bytes = 2 * 2 * 4 * 32 * 4
    options = EngineOptions(**{**vars(OPTIONS), "kv_cache_memory_bytes": state_bytes + 8 * page_bytes})
    engine = build_engine(runtime, options)
    engine.check_integrity = True
    ids = sources()
    expected = alone(model_type, ids)
    try:
        handles = [engine.submit(request(source)) for source in ids]
        dropped = [engine.submit(request(source)) for source in ids[:4]]
        threading.Timer(0.2, dropped[0].cancel).start()
        for handle in dropped[1:]:
            handle.cancel()
        assert [handle.result() for handle in handles] == expected
        for handle, wanted in zip(dropped, expected, strict=False):
            found = handle.result()
            assert found == wanted[: len(found)]
        again = [engine.submit(request(source)) for source in reversed(ids[:3])]  # slots that others have had
        assert [handle.result() for handle in again] == expected[2::-1]
        stats = engine.stats()
    finally:
        engine.close()
    assert len({tuple(tokens) for tokens in expected}) > 4
    assert stats.scheduler.num_preemptions > 0
    assert stats.scheduler.num_hit_tokens == 0  # the same first token stands behind other inputs
    assert stats.num_steps < NEW * len(ids)  # rows side by side
    assert [group.num_used for group in stats.scheduler.pages] == [0]


@pytest.fixture(scope="module")
def served():
    with serve(tiny("bart"), engine=OPTIONS) as model:
        model.engine.check_integrity = True
        yield model


def config_of(model, **options):
    config = copy.deepcopy(model.generation_config)
    config.update(max_new_tokens=NEW, **options)
    return config


def test_served_requests_run_on_the_engine(served):
    ids = sources()[:5]
    before = served.engine.stats().num_steps
    streams = [served.iter_tokens(source, config_of(served)) for source in ids]
    assert [list(stream) for stream in streams] == alone("bart", ids)
    assert served.engine.stats().num_steps > before
    assert "there is an encoder beside the decoder" in served.engine.description
    assert "for the states of requests" in served.engine.description


def word_tokenizer():
    words = {"[pad]": 0, "[end]": 2} | {f"w{index}": index for index in range(VOCAB_SIZE) if index not in (0, 2)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[pad]", eos_token="[end]")


def test_texts_go_to_the_encoder_and_come_from_the_decoder(tmp_path):
    tiny("t5").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    ids = sources()[:3]
    params = SamplingParams(max_new_tokens=NEW)
    expected = alone("t5", ids)
    with serve(tmp_path, engine=OPTIONS) as model:
        completions = model.generate_batch([" ".join(f"w{token}" for token in source) for source in ids], params)
        assert [completion.token_ids for completion in completions] == expected
        assert [completion.text for completion in completions] == [
            word_tokenizer().decode(row, skip_special_tokens=True) for row in expected
        ]
        assert [completion.prompt_len for completion in completions] == [len(source) for source in ids]
        assert "".join(model.stream(ids[1], params)) == completions[1].text
        assert model.engine.stats().num_steps > 0
        with pytest.raises(InvalidArgumentError, match="expected token ids from 0 to 96"):
            model.stream([VOCAB_SIZE], params)


def test_options_apply_to_the_decoder_tokens(served):
    ids = sources()[:3]
    for options in ({"forced_bos_token_id": 7}, {"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}):
        streams = [served.iter_tokens(source, config_of(served, **options)) for source in ids]
        assert [list(stream) for stream in streams] == alone("bart", ids, **options)


def test_input_too_long_for_the_slots_runs_without_the_engine(served):
    source = (sources()[5] * 2)[:60]
    before = served.engine.stats().num_steps
    assert list(served.iter_tokens(source, config_of(served))) == alone("bart", [source])[0]
    assert served.engine.stats().num_steps == before


def test_warm_up_compiles_every_program_of_later_requests():
    small = EngineOptions(max_model_len=16, max_num_seqs=2, page_size=8, max_num_batched_tokens=17, max_encoder_len=32)
    engine = build_engine(to_jax(tiny("t5"))._jax_runtime, small)
    try:
        engine.warm_up()
        before = engine.stats().num_programs
        ids = [source for source in sources() if len(source) <= 32]
        handles = [engine.submit(request(source)) for source in ids]
        assert [handle.result() for handle in handles] == alone("t5", ids)
        assert engine.stats().num_programs == before
    finally:
        engine.close()


def test_a_step_that_raises_fails_its_requests_and_no_others(served, monkeypatch):
    model = served.engine._runner._executor
    encoded = model.sources.encoder_output

    def failing(*args):
        monkeypatch.setattr(model.sources, "encoder_output", encoded)
        raise RuntimeError("the device has caught fire")

    monkeypatch.setattr(model.sources, "encoder_output", failing)
    source = sources()[1]
    with pytest.raises(RequestError, match="the device has caught fire"):
        served.engine.submit(request(source)).result()
    assert served.engine.submit(request(source)).result() == alone("bart", [source])[0]


def test_bad_input(served):
    submit = served.engine.submit
    with pytest.raises(InvalidArgumentError, match="expected an input of 1 to 48 tokens for the encoder, got 49"):
        submit(request([5] * 49))
    with pytest.raises(InvalidArgumentError, match="expected an input of 1 to 48 tokens for the encoder, got 0"):
        submit(request([]))
    with pytest.raises(InvalidArgumentError, match="expected token ids from 0 to 96, got 97"):
        submit(request([5, 97]))
    with pytest.raises(UnsupportedArgumentError, match="prompt_logprobs: expected None for an encoder-decoder model"):
        served.iter_tokens([5, 6], config_of(served), params=SamplingParams(prompt_logprobs=1))
    config = config_of(served)
    config.decoder_start_token_id = config.bos_token_id = None
    with pytest.raises(InvalidArgumentError, match="decoder_start_token_id: expected a token id"):
        served.iter_tokens([5, 6], config)


@pytest.mark.parametrize(
    ("model_type", "max_encoder_len", "message"),
    [
        ("bart", 65, "max_encoder_len: expected at most 64"),
        ("bart", 0, "max_encoder_len: expected a whole number >= 1"),
    ],
)
def test_options_out_of_range(model_type, max_encoder_len, message):
    with pytest.raises(InvalidArgumentError, match=message):
        build_engine(to_jax(tiny(model_type))._jax_runtime, EngineOptions(max_encoder_len=max_encoder_len))


def test_encoder_inputs_take_half_of_the_memory_by_default():
    budget = 5 * 4 * 32 * 4 * 48 * 2  # twice 48 tokens in five slots
    options = EngineOptions(max_model_len=40, max_num_seqs=4, page_size=4, kv_cache_memory_bytes=budget)
    engine = build_engine(to_jax(tiny("bart"))._jax_runtime, options)
    try:
        assert engine.max_encoder_len == 32
    finally:
        engine.close()


def test_the_default_encoder_length_fits_what_is_left_beside_a_step(monkeypatch):
    # What is free when the length is chosen is not what the cache gets: a step takes memory, and so do others.
    monkeypatch.setattr(per_sequence_factory, "free_bytes", lambda: 1 << 30)
    states = 5 * 4 * 32 * 4  # bytes of an encoder position in five slots
    monkeypatch.setattr(memory, "free_bytes", lambda: states * 80)
    monkeypatch.setattr(PerSequenceExecutor, "temporary_bytes", lambda executor: 0)
    options = EngineOptions(max_model_len=40, max_num_seqs=4, page_size=4)
    engine = build_engine(to_jax(tiny("bart"))._jax_runtime, options)
    try:
        assert engine.max_encoder_len == 32  # of 64
        ids = [source for source in sources() if len(source) <= 32]
        assert [engine.submit(request(source)).result() for source in ids] == alone("bart", ids)
    finally:
        engine.close()
    asked = dataclasses.replace(options, max_encoder_len=64)
    monkeypatch.setattr(memory, "free_bytes", lambda: states * 60)
    with pytest.raises(OutOfMemoryError, match="lower max_num_seqs or max_encoder_len"):
        build_engine(to_jax(tiny("bart"))._jax_runtime, asked)


def test_prompts_that_arrive_together_share_programs(served):
    """Encoders of equal padded length are one batch, and first decoder steps one program."""
    executor, calls = served.engine._runner._executor, []
    dispatch = executor._dispatch

    def noted(spec, *args):
        calls.append((spec.kind, spec.num_rows, spec.source_len))
        return dispatch(spec, *args)

    ids = [[5 + i, 6, 7 + i, 8] for i in range(4)]
    executor._dispatch = noted
    try:
        with served.engine.submitted_together():
            handles = [served.engine.submit(request(source)) for source in ids]
        assert [handle.result() for handle in handles] == alone("bart", ids)
    finally:
        executor._dispatch = dispatch
    assert [call for call in calls if call[0] == "begin"] == [("begin", 4, 32)]


@pytest.mark.thorough
def test_rows_of_a_class_generate_run_on_the_engine():
    class Second(type(tiny("bart"))):
        def generate(self, *args, **kwargs):
            return super().generate(*args, **{"decoder_input_ids": torch.tensor([[START, 7]]), **kwargs})

    class Changed(type(tiny("bart"))):
        def generate(self, *args, **kwargs):
            return super().generate(*args, **kwargs).tolist()

    ids = sources()[:4]
    model = tiny("bart")
    model.__class__ = Second
    wanted = [model.generate(torch.tensor([source]), max_new_tokens=NEW)[0, 2:].tolist() for source in ids]
    assert wanted != alone("bart", ids)
    with serve(model, engine=OPTIONS) as served_model:
        streams = [served_model.iter_tokens(source, config_of(served_model)) for source in ids]
        assert [list(stream) for stream in streams] == wanted
        before = served_model.engine.stats().num_steps
        assert 0 < before < NEW * len(ids)
        found = served_model.generate(torch.tensor([ids[0]]), max_new_tokens=NEW)
        assert found[0, 2:].tolist() == wanted[0]
        assert served_model.engine.stats().num_steps > before
    model = tiny("bart")
    model.__class__ = Changed
    with serve(model, engine=OPTIONS) as served_model:
        found = served_model.generate(torch.tensor([ids[0]]), max_new_tokens=NEW)
        assert found[0][1:] == alone("bart", ids[:1])[0]
