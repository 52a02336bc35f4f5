"""Ends of a turn: those of a tokenizer and of its chat template end answers, besides those of the configuration."""

import copy

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from model_adapters.program.turn_ends import ends_among
from torchax_serve import SamplingParams, serve
from torchax_serve.sampling.grammar import json_grammar
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.options import ServerOptions
from torchax_serve.text.prompt import end_ids, turn_ends

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model():
    with serve() as found:
        yield found


@pytest.fixture
def changed(model):
    """The model, whose configuration and template may be changed."""
    config, template = copy.deepcopy(model.generation_config), model.tokenizer.chat_template
    yield model
    model.generation_config.eos_token_id = config.eos_token_id
    model.tokenizer.chat_template, model.tokenizer.eos_token = template, "<eos>"


def lengths(model, ids, **fields):
    """Lengths of answers that would like to write one of `ids` all the time."""
    return [
        len(
            model.generate_batch(
                [PROMPT], SamplingParams(max_new_tokens=4, temperature=0, logit_bias={each: 100.0}, **fields)
            )[0].token_ids
        )
        for each in ids
    ]


def tokenizer_with(tokens, template, eos):
    backend = Tokenizer(models.BPE({char: index for index, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    found = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    found.chat_template = template
    return found


@pytest.mark.parametrize(
    ("tokens", "template", "eos", "expected"),
    [
        (["<|endoftext|>", "<|im_end|>"], "<|im_start|>x<|im_end|>", "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]),
        (["</s>", "<|eot_id|>"], "{{ x }}<|eot_id|>", "</s>", ["</s>", "<|eot_id|>"]),
        (["</s>", "<|eot_id|>"], "{{ x }}", "</s>", ["</s>"]),
        (["</s>", "<|end|>"], "<|end|>", None, ["<|end|>"]),
        (["<|return|>", "<|channel|>", "<|end|>"], "<|channel|><|end|>", "<|return|>", ["<|return|>"]),
        (["</s>", "[TOOL_CALLS]"], "[TOOL_CALLS]", "</s>", ["</s>"]),
        ([], None, None, []),
    ],
)
def test_ends_of_a_tokenizer(tokens, template, eos, expected):
    tokenizer = tokenizer_with(tokens, template, eos)
    assert set(turn_ends(tokenizer)) == {tokenizer.convert_tokens_to_ids(token) for token in expected}


def test_of_control_tokens_those_that_end_a_turn():
    assert ends_among(["<|im_end|>", "<|eom_id|>", "<|im_start|>", "x"]) == ["<|eom_id|>", "<|im_end|>"]
    assert ends_among(["<|end|>"]) == ["<|end|>"] and ends_among(["<|end|>", "<|channel|>"]) == []


def test_answers_end_at_the_tokenizers_eos_and_at_the_templates_end(changed):
    end, eos = changed.tokenizer.convert_tokens_to_ids("<end_of_turn>"), 1
    changed.generation_config.eos_token_id = eos
    changed.tokenizer.chat_template = "no end"
    assert lengths(changed, [eos, end]) == [1, 4]
    changed.tokenizer.chat_template = "{{ x }}<end_of_turn>"
    assert lengths(changed, [eos, end]) == [1, 1]
    changed.tokenizer.chat_template, changed.tokenizer.eos_token = "no end", "<end_of_turn>"
    assert lengths(changed, [eos, end]) == [1, 1]
    assert lengths(changed, [end], ignore_eos=True) == [4]


def test_a_model_whose_tokenizer_alone_has_an_end_can_have_a_grammar(changed):
    changed.generation_config.eos_token_id = None
    changed.tokenizer.chat_template = None
    service = ModelService(changed, ServerOptions())
    assert end_ids(changed) == [changed.tokenizer.eos_token_id]
    assert service.grammars.masks(json_grammar({"type": "integer"}))() is not None
