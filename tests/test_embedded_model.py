"""The model that ships inside the package: an ordinary Hugging Face folder that knows what its card says it knows.

Everything here runs it with plain transformers (eager PyTorch); the bridge is compared with that.
"""

import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM

import torchax_serve
from model_adapters.bridge.extract import extract_jax

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from embedded_corpus import Corpus, hand_written_held_out
from embedded_training.evaluation import answers, scores

FOLDER = Path(torchax_serve.__file__).parent / "embedded"
AIMS = {"sentiment": 0.9, "one-digit sums": 0.95, "project": 0.9}
OTHER_TASKS = ("two-digit sums", "two-digit differences", "counting", "colours", "greetings", "jax")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


def _reply(model, tokenizer, *turns):
    """The model's answer after `turns`, which begin with the user's."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**inputs)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_shape_is_gemma_3_and_small(model):
    config = AutoConfig.from_pretrained(FOLDER)
    assert isinstance(model, Gemma3ForCausalLM)
    assert config.model_type == "gemma3_text"
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.sliding_window < config.max_position_embeddings
    assert 1 < config.num_key_value_heads < config.num_attention_heads
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 2e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 5e6
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) <= 10_000_000


def test_generation_is_greedy_and_ends_with_the_turn(model, tokenizer):
    generation = model.generation_config
    assert generation.do_sample is False
    assert set(generation.eos_token_id) == {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<end_of_turn>")}
    prompt = [{"role": "user", "content": "Hello!"}]
    inputs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs)
    assert tokenizer.decode(output[0, -1]) == "<end_of_turn>"
    assert output.shape[1] - inputs["input_ids"].shape[1] < generation.max_new_tokens


def test_chat_template_is_that_of_gemma(tokenizer):
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": [{"type": "text", "text": "And you?"}]},
    ]
    expected = (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"
        "<start_of_turn>user\nAnd you?<end_of_turn>\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == expected + "<start_of_turn>model\n"
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert ids == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == expected


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "assistant", "content": "Hi"}], "in turn, beginning with user"),
        ([{"role": "user", "content": "Hi"}] * 2, "in turn, beginning with user"),
        ([{"role": "tool", "content": "Hi"}], "got tool"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "expected parts of type text, got image"),
    ],
)
def test_chat_template_refuses_what_it_cannot_write(tokenizer, messages, message):
    with pytest.raises(TemplateError, match=message):
        tokenizer.apply_chat_template(messages)


@settings(max_examples=200)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer, text):
    text = text.encode("utf-8", "ignore").decode()
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_every_digit_is_a_token(tokenizer):
    assert [token for token in tokenizer.tokenize("19 + 2048 is 2067") if re.search(r"\d", token)] == list("1920482067")
    assert not [token for token in tokenizer.get_vocab() if len(token) > 1 and re.search(r"\d", token)]


@pytest.fixture(scope="module")
def measured(model, tokenizer):
    """Scores of a sample, another one than the card's."""
    by_rule = {task: group for task, group in Corpus().held_out(30, seed=2).items() if task in (*AIMS, *OTHER_TASKS)}
    by_hand = {f"{task} (by hand)": group[::2] for task, group in hand_written_held_out().items() if task in AIMS}
    return scores(model, tokenizer, by_rule | by_hand)


@pytest.mark.thorough
@pytest.mark.parametrize("task", [*AIMS, "sentiment (by hand)", "one-digit sums (by hand)"])
def test_accuracy_on_held_out_questions(measured, task):
    assert measured[task].num_asked >= 25
    assert measured[task].accuracy >= AIMS[task.removesuffix(" (by hand)")], measured[task].mistakes


@pytest.mark.thorough
@pytest.mark.parametrize("task", OTHER_TASKS)
def test_accuracy_of_the_other_tasks(measured, task):
    assert measured[task].accuracy >= 0.8, measured[task].mistakes


def test_all_one_digit_sums_in_the_plainest_wording(model, tokenizer):
    pairs = [(a, b) for a in range(10) for b in range(10)]
    given_answers = answers(model, tokenizer, [f"What is {a} + {b}?" for a, b in pairs], batch_size=100)
    assert given_answers == [f"{a} + {b} = {a + b}" for a, b in pairs]


def test_a_conversation_uses_its_history(model, tokenizer):
    assert _reply(model, tokenizer, "What is 4 + 5?", "4 + 5 = 9", "and plus 3?") == "9 + 3 = 12"
    assert _reply(model, tokenizer, "My name is Clara.", "Nice to meet you, Clara!", "What is my name?").endswith(
        "Clara."
    )


def test_the_bridge_gives_the_logits_of_eager_pytorch(model, tokenizer):
    long_chat = [{"role": ("user", "assistant")[i % 2], "content": "Count from 3 to 9."} for i in range(15)]
    ids = tokenizer.apply_chat_template(long_chat, return_tensors="pt", return_dict=True)["input_ids"]
    assert ids.shape[1] > 2 * model.config.sliding_window  # so that the window cuts
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    weights, function = extract_jax(model)
    call = jax.jit(lambda weights, ids: function(weights, (), {"input_ids": ids, "use_cache": False}).logits)
    np.testing.assert_allclose(call(weights, ids.numpy()), expected, rtol=1e-3, atol=1e-3)


def test_the_card_reports_every_task_and_reaches_the_aims(model):
    card = (FOLDER / "README.md").read_text()
    rows = {
        title: (int(right), int(asked)) for title, right, asked in re.findall(r"\| (.+?) \| (\d+) \| (\d+) \|", card)
    }
    assert {f"{task} (by rule)" for task in Corpus().held_out(1)} <= set(rows)
    assert {f"{task} (by hand)" for task in hand_written_held_out()} <= set(rows)
    for task, aim in AIMS.items():
        right, asked = rows[f"{task} (by rule)"]
        assert right / asked >= aim
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters" in card
    assert "license: apache-2.0" in card
    assert (FOLDER / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
