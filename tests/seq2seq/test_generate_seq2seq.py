"""Encoder-decoder models: ``generate`` beside eager PyTorch, what is compiled, what is refused."""

import copy

import pytest
import torch
import transformers
from cache_name import CACHE
from thorough import pairs
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from weights import draw_matrices

from torchax_serve import InvalidArgumentError, UnsupportedArgumentError, serve, to_jax

VOCAB_SIZE = 97
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "forced_eos_token_id": None,
}
T5 = {"d_model": 32, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "d_ff": 48}

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")


def tiny(name):
    config, model_class = {
        "bart": (transformers.BartConfig(**COMMON, **BART), transformers.BartForConditionalGeneration),
        "t5": (transformers.T5Config(**COMMON, **T5), transformers.T5ForConditionalGeneration),
    }[name]
    torch.manual_seed(0)
    model = model_class(config).eval()
    draw_matrices(model, std=0.3)
    return model


def inputs(lengths=(11, 7)):
    ids = torch.randint(3, VOCAB_SIZE, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


MODELS = ("bart", "t5")


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    eager = tiny(request.param)
    return eager, to_jax(copy.deepcopy(eager))


OPTIONS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "forced": {"forced_bos_token_id": 5},
    "prompt": {"decoder_input_ids": torch.tensor([[1, 9, 4], [1, 8, 3]])},
    "several": {"num_beams": 2, "num_return_sequences": 2},
    "no_cache": {"use_cache": False},
}


@pytest.mark.parametrize(("pair", "name"), pairs(MODELS, OPTIONS, one_in=2), indirect=["pair"])
def test_tokens_match_transformers(pair, name):
    eager, ours = pair
    options = {"max_new_tokens": 10, "do_sample": False, **OPTIONS[name]}
    assert torch.equal(ours.generate(**inputs(), **options), eager.generate(**inputs(), **options))


def test_outputs_and_cache_match_transformers(pair):
    eager, ours = pair
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    found, expected = ours.generate(**inputs(), **options), eager.generate(**inputs(), **options)
    assert type(found) is type(expected)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
    for name in ("self_attention_cache", "cross_attention_cache"):
        ours_layers = getattr(found[CACHE], name).layers
        for layer, theirs in zip(ours_layers, getattr(expected[CACHE], name).layers, strict=True):
            torch.testing.assert_close(layer.keys, theirs.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(layer.values, theirs.values, atol=1e-4, rtol=1e-4)


def test_sampling_follows_the_distribution(pair):
    eager, ours = pair
    given = inputs((11,))
    with torch.no_grad():
        start = torch.tensor([[1]])
        likely = eager(**given, decoder_input_ids=start).logits[0, -1].topk(3).indices
    torch.manual_seed(0)
    drawn = ours.generate(**given, max_new_tokens=1, do_sample=True, top_k=3, num_return_sequences=40)[:, 1]
    assert set(drawn.tolist()) <= set(likely.tolist())
    assert len(set(drawn.tolist())) > 1


def test_forward_with_a_cache_of_the_callers_own(pair):
    eager, ours = pair
    given, ids = inputs(), torch.tensor([[1, 5, 6], [1, 7, 8]])

    def two_steps(model):
        cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
        first = model(**given, decoder_input_ids=ids[:, :2], **{CACHE: cache}, use_cache=True)
        encoder_outputs = (first.encoder_last_hidden_state,)
        mask = {"attention_mask": given["attention_mask"]}
        last = model(encoder_outputs=encoder_outputs, decoder_input_ids=ids[:, 2:], **{CACHE: cache}, **mask)
        return torch.cat([first.logits, last.logits], 1)

    with torch.no_grad():
        torch.testing.assert_close(two_steps(ours), two_steps(eager), atol=1e-4, rtol=1e-4)


def test_the_encoder_runs_once_and_other_lengths_compile_nothing():
    model = to_jax(tiny("bart"))
    calls, steps = [], model._jax_runtime.submodule("model.encoder").steps
    forward = steps.forward
    steps.forward = lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)
    model.generate(**inputs(), max_new_tokens=8, do_sample=False)
    assert len(calls) == 1
    traces = dict(model._jax_runtime.steps.num_traces)
    assert traces == {"forward_model_encoder": 1, "forward": 1, "decode": 1}
    model.generate(**inputs((5, 9)), max_new_tokens=12, do_sample=False)
    assert dict(model._jax_runtime.steps.num_traces) == traces


def test_decode_steps_do_not_recompute_encoder_keys():
    """Steps cost what the decoder's own layers cost: no product over the encoder's length but attention itself."""
    model = to_jax(tiny("bart"))
    runtime = model._jax_runtime
    model.generate(**inputs(), max_new_tokens=4, do_sample=False)
    (program,) = runtime.steps.decode._programs.values()
    products = (" dot(", 'custom_call_target="tas_linear"', 'custom_call_target="tas_routed_linear"')
    lines = [line for line in program.as_text().splitlines() if any(each in line for each in products)]
    shapes = {line.partition("= ")[2].partition(" ")[0] for line in lines}
    assert shapes
    assert not any("[2,32,32]" in shape or "[64,32]" in shape for shape in shapes)  # batch x bucket, or both at once


def test_served_model_from_a_folder(tmp_path):
    eager = tiny("t5")
    eager.save_pretrained(tmp_path)
    options = {"max_new_tokens": 8, "do_sample": False}
    with serve(tmp_path) as served:
        assert type(served.torch_model).__name__ == "T5ForConditionalGeneration"
        assert torch.equal(served.generate(**inputs(), **options), eager.generate(**inputs(), **options))
        ids = inputs((11,))["input_ids"]
        config = copy.deepcopy(served.generation_config)
        config.update(**options)
        tokens = list(served.iter_tokens(ids[0].tolist(), config))
        assert tokens == eager.generate(ids, **options)[0, 1:].tolist()
        assert served.engine.stats().num_steps > 0  # on the engine


def test_bad_input(pair):
    _, ours = pair
    empty = torch.zeros(1, 0, dtype=torch.long)
    with pytest.raises(InvalidArgumentError, match="input_ids: expected an input of at least one token"):
        ours.generate(input_ids=empty, attention_mask=empty, max_new_tokens=2)
    with pytest.raises(InvalidArgumentError, match="expected token ids from 0 to 96, got 500"):
        ours.generate(input_ids=torch.tensor([[500]]), max_new_tokens=2)
    with pytest.raises(InvalidArgumentError, match="only padding in row 1"):
        ours.generate(**inputs((4, 0)), max_new_tokens=2)
    with pytest.raises(UnsupportedArgumentError, match=f"{CACHE}: expected a EncoderDecoderCache"):
        ours.generate(**inputs(), max_new_tokens=2, **{CACHE: DynamicCache()})


def test_more_tokens_than_learned_positions():
    model = to_jax(tiny("bart"))
    with pytest.raises(InvalidArgumentError, match="expected a prompt of at most 64 tokens"):
        model.generate(**inputs((65,)), max_new_tokens=2)
    with pytest.raises(InvalidArgumentError, match="expected at most 64 tokens in all"):
        model.generate(**inputs(), max_new_tokens=80)
