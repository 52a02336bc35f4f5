"""Text in, text out of a served model: the very texts that eager PyTorch and the tokenizer give."""

import pytest
import torch
from eager_model import TEMPLATE
from tokenizers_of_test import byte_level_bpe
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GenerationConfig

from torchax_serve import InvalidArgumentError, SamplingParams, UnsupportedArgumentError, serve

PROMPTS = ["Once upon a time", "x", [300, 301, 302], "it's the"]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)


def test_without_a_limit_an_answer_goes_on_to_its_end(model):
    config = GenerationConfig(do_sample=False)  # of which transformers 5 has no max_length
    assert config.max_new_tokens is None and config.max_length is None
    (batch,) = model.generate_batch([[5, 6]], SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=24))
    found = list(model.iter_tokens([5, 6], config, params=SamplingParams(ignore_eos=True)))
    assert found[:24] == list(batch.token_ids)
    assert len(found) == 126  # the last of 128 positions


def test_tokens_equal_those_of_one_answer(model):
    with pytest.raises(UnsupportedArgumentError, match=r"num_return_sequences: expected 1 .*got 2; call gen"):
        model.iter_tokens([5, 6], GenerationConfig(num_return_sequences=2, do_sample=True))
    with pytest.raises(InvalidArgumentError, match="generation_config: expected a GenerationConfig, got dict"):
        model.iter_tokens([5, 6], {"max_new_tokens": 3})


@pytest.fixture(scope="module")
def eager():
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=len(byte_level_bpe()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        sliding_window=16,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Gemma3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model(eager, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = byte_level_bpe()
    tokenizer.chat_template = TEMPLATE
    eager.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with serve(folder, dtype="float32") as served:
        yield served


def eager_ids(eager, prompt_ids):
    ids = torch.tensor([prompt_ids])
    answer = eager.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    return answer[0, ids.shape[1] :].tolist()


def test_streams_and_batches(model, eager):
    completions = model.generate_batch(PROMPTS, GREEDY)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = eager_ids(eager, model.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)
        answer = model.stream(prompt, GREEDY)
        assert "".join(answer) == model.tokenizer.decode(expected, skip_special_tokens=True) == completion.text
        assert answer.token_ids == expected == completion.token_ids


def test_chat(model, eager):
    prompt = "<|user|>system: Be kind\n<|user|>user: Hi\n<s>"
    expected = eager_ids(eager, model.tokenizer(prompt, add_special_tokens=False)["input_ids"])
    text = model.tokenizer.decode(expected, skip_special_tokens=True)
    assert model.chat("Hi", GREEDY, system="Be kind") == text
    assert "".join(model.chat("Hi", GREEDY, system="Be kind", stream=True)) == text


def test_stop_strings(model):
    text = "".join(model.stream(PROMPTS[0], GREEDY))
    stop = text[4:6]
    params = SamplingParams(max_new_tokens=12, temperature=0, stop=stop)
    answer = model.stream(PROMPTS[0], params)
    assert "".join(answer) == text[: text.index(stop)]
    assert answer.stats.finish_reason == "stop"
    assert model.generate_batch(PROMPTS[:2], params)[0].text == text[: text.index(stop)]


def test_a_stopped_stream_leaves_the_model_usable(model):
    whole = "".join(model.stream(PROMPTS[0], GREEDY))
    answer = model.stream(PROMPTS[0], GREEDY)
    next(answer)
    answer.close()
    assert answer.stats.finish_reason == "abort"
    assert "".join(model.stream(PROMPTS[0], GREEDY)) == whole


def test_seed_makes_sampling_repeatable(model):
    params = SamplingParams(max_new_tokens=12, temperature=2.0, seed=5)
    first, second = "".join(model.stream("x", params)), "".join(model.stream("x", params))
    other = "".join(model.stream("x", SamplingParams(max_new_tokens=12, temperature=2.0, seed=6)))
    assert first == second != other
    assert model.generate_batch(["it's the", "x"], params)[1].text == first
