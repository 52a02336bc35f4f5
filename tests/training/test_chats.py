"""Rows of data as tokens: what the template writes, and of it the assistant's answers."""

import dataclasses

import numpy as np
import pytest
from training_models import EMBEDDED, rows, write_data
from transformers import AutoTokenizer

from model_adapters.errors import ChatTemplateError, InvalidArgumentError
from torchax_serve.training.chats import RowChecks, digest, encode_rows, read_rows
from torchax_serve.training.packing import Packer

CHECKS = RowChecks(256, "all")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED)


def parts(tokenizer, example):
    """Texts of the runs of learned tokens."""
    runs, last = [], False
    for token, learned in zip(example.token_ids, example.learned, strict=True):
        if learned and not last:
            runs.append([])
        if learned:
            runs[-1].append(token)
        last = learned
    return [tokenizer.decode(run) for run in runs]


def test_tokens_are_the_templates_and_answers_are_learned_with_their_end(tokenizer):
    examples = encode_rows(tokenizer, "it", rows(), CHECKS)
    for example, row in zip(examples, rows(), strict=True):
        assert list(example.token_ids) == tokenizer.apply_chat_template(row["messages"], return_dict=False)
    assert parts(tokenizer, examples[0]) == ["It is 7.<end_of_turn>"]
    assert parts(tokenizer, examples[1]) == ["Hello!<end_of_turn>", "A library.<end_of_turn>"]
    (last,) = encode_rows(tokenizer, "it", rows()[1:2], RowChecks(256, "last"))
    assert parts(tokenizer, last) == ["A library.<end_of_turn>"]


def test_texts_are_learned_as_a_whole_and_end(tokenizer):
    (example,) = encode_rows(tokenizer, "it", [{"text": "One two."}], CHECKS)
    assert example.token_ids == (*tokenizer("One two.").input_ids, tokenizer.eos_token_id)
    assert parts(tokenizer, example) == ["One two." + tokenizer.eos_token]


def test_a_template_that_writes_earlier_turns_otherwise_is_refused_or_only_the_last_is_learned(tokenizer):
    thinking = tokenizer.chat_template.replace(
        "{{ '<end_of_turn>\\n' }}",
        "{% if loop.last and message['role'] == 'assistant' %}{{ '!' }}{% endif %}{{ '<end_of_turn>\\n' }}",
    )
    assert thinking != tokenizer.chat_template
    before, tokenizer.chat_template = tokenizer.chat_template, thinking
    try:
        with pytest.raises(ChatTemplateError, match=r'row 1: .*choose answers="last"'):
            encode_rows(tokenizer, "it", rows()[1:2], CHECKS)
        (last,) = encode_rows(tokenizer, "it", rows()[1:2], RowChecks(256, "last"))
        assert parts(tokenizer, last) == ["A library.!<end_of_turn>"]
    finally:
        tokenizer.chat_template = before


TAGGED = """{{ bos_token }}{% for message in messages %}
{{ '<start_of_turn>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation -%}
{{ ('' if loop.last else 'Well. ') + message['content'] + '<end_of_turn>\\n' }}
{%- endgeneration -%}
{%- else %}{{ message['content'] + '<end_of_turn>\\n' }}{% endif %}
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>assistant\\n' }}{% endif %}"""


def test_tags_of_the_template_decide_what_is_learned_as_in_transformers():
    """The template writes earlier answers otherwise, so that they could not be found without the tags."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.chat_template = TAGGED
    for example, row in zip(encode_rows(tokenizer, "it", rows(), CHECKS), rows(), strict=True):
        wanted = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        assert list(example.token_ids) == wanted["input_ids"]
        assert list(example.learned) == list(map(bool, wanted["assistant_masks"]))
        assert any(example.learned) and not all(example.learned)
    (last,) = encode_rows(tokenizer, "it", rows()[1:2], RowChecks(256, "last"))
    assert parts(tokenizer, last) == ["A library.<end_of_turn>\n"]


@pytest.mark.parametrize(
    ("template", "answers", "message"),
    [
        (TAGGED.replace("{{ bos_token }}", "{{ messages | length }}"), "last", 'row 1: .*choose answers="all"'),
        (TAGGED.replace("{% endfor %}", ""), "all", "row 1: the chat template of it does not render: Template"),
    ],
)
def test_templates_with_tags_that_do_not_serve(template, answers, message):
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.chat_template = template
    with pytest.raises(ChatTemplateError, match=message):
        encode_rows(tokenizer, "it", rows()[1:2], RowChecks(256, answers))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}]}, "row 2: expected a message of role assistant, got none"),
        ({"messages": [{"role": "user", "content": "a " * 300}, {"role": "assistant", "content": "b"}]},
         r"row 2: expected at most 256 tokens \(seq_len\), got \d+; raise seq_len"),
        ({"messages": [{"role": "robot", "content": "Hi"}, {"role": "assistant", "content": "b"}]}, "row 2"),
        ({"messages": "Hi"}, "row 2"),
    ],
)  # fmt: skip
def test_bad_rows_say_which(tokenizer, row, message):
    with pytest.raises((InvalidArgumentError, ChatTemplateError), match=message):
        encode_rows(tokenizer, "it", [rows()[0], row], CHECKS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected at least one row, got none"),
        ('{"messages": []', "line 1: expected JSON"),
        ('{"prompt": "a"}', r"line 1: expected \{\"messages\": \[...\]\} or .*got \['prompt'\]"),
        ('{"text": "a", "weight": 2}', "line 1: expected the keys text, got 'weight'"),
        ('{"text": ""}', "line 1: text: expected a string that is not empty"),
    ],
)
def test_bad_files(tmp_path, text, message):
    file = tmp_path / "chats.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidArgumentError, match=message):
        read_rows(file)


def test_files_and_lists_are_the_same(tmp_path):
    assert digest(read_rows(write_data(tmp_path / "chats.jsonl"))) == digest(read_rows(rows()))


def test_packed_rows_have_every_example_once_an_epoch_whatever_the_step(tokenizer):
    examples = encode_rows(tokenizer, "it", rows(), CHECKS)
    packer = Packer(examples, 1, 64, 3, shares_rows=True)
    seen = []
    for step in range(40):
        batch = packer.batch(step)
        for number in range(1, int(batch.segments.max()) + 1):
            here = batch.segments[0] == number
            np.testing.assert_array_equal(batch.positions[0, here], np.arange(here.sum()))
            seen.append((tuple(batch.tokens[0, here].tolist()), tuple(map(bool, batch.learned[0, here]))))
    wanted = sorted((example.token_ids, example.learned) for example in examples)
    for begin in range(0, len(seen) - len(wanted), len(wanted)):
        assert sorted(seen[begin : begin + len(wanted)]) == wanted
    assert any((packer.batch(step).segments == 2).any() for step in range(4)), "rows are shared"
    again = Packer(examples, 1, 64, 3, shares_rows=True).batch(17)
    for field in dataclasses.fields(again):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(packer.batch(17), field.name))
