"""Chats: the prompt is that of transformers' chat template, and what cannot be rendered says why."""

import pytest
from eager_model import eager_model

from model_adapters.errors import ChatTemplateError, InvalidArgumentError
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.text import TextStream, chat, chat_prompt_ids, stream
from torchax_serve.text.prompt import DEFAULT_CHAT_MAX_NEW_TOKENS

HISTORY = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "a </s> b"},
]
SHORT = SamplingParams(max_new_tokens=8)


@pytest.mark.parametrize("system", [None, "Be kind"])
@pytest.mark.parametrize("messages", ["Hi", HISTORY])
def test_prompt_equals_that_of_transformers(messages, system):
    model = eager_model()
    conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    conversation = [*([{"role": "system", "content": system}] if system else []), *conversation]
    expected = model.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert chat_prompt_ids(model, messages, system=system) == expected
    answer = chat(model, messages, SHORT, stream=True, system=system)
    assert isinstance(answer, TextStream)
    assert "".join(answer) == "".join(stream(model, expected, SHORT)) == chat(model, messages, SHORT, system=system)


def test_length_of_an_answer():
    model = eager_model()
    model.config = type(model.config)(**{**model.config.to_dict(), "max_position_embeddings": 10**6})
    seen = []
    model.new_tokens = lambda request: seen.append(request.max_new_tokens) or iter([5])
    assert chat(model, "Hi") == model.tokenizer.decode([5])
    assert seen == [DEFAULT_CHAT_MAX_NEW_TOKENS]


def test_no_template():
    with pytest.raises(ChatTemplateError, match=r"tiny has no chat template; use stream\(\)"):
        chat(eager_model(chat_template=None), "Hi")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}", "TemplateSyntaxError in line 1: Unexpected end of template"),
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[7]['content'] }}", "UndefinedError"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
    ],
)
def test_broken_template(template, message):
    with pytest.raises(ChatTemplateError, match=message) as caught:
        chat(eager_model(chat_template=template), "Hi")
    assert "chat template of tiny does not render" in str(caught.value)


def test_dropped_system_prompt_is_refused():
    template = "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}"
    model = eager_model(chat_template=template)
    assert chat(model, "Hi", SHORT)
    with pytest.raises(ChatTemplateError, match="leaves the system prompt out"):
        chat(model, "Hi", SHORT, system="Be kind")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("", "empty string"),
        ([], "non-empty list"),
        (7, "got 7"),
        (["Hi"], "got 'Hi'"),
        ([{"content": "Hi"}], r'dicts like \{"role"'),
        ([{"role": 1, "content": "Hi"}], "dicts like"),
        ([{"role": "user", "content": "long " * 100}], "at most 64 tokens"),
    ],
)
def test_refused_messages(messages, message):
    with pytest.raises(InvalidArgumentError, match=message):
        chat(eager_model(), messages)


def test_two_system_prompts():
    with pytest.raises(InvalidArgumentError, match="only one of the two"):
        chat(eager_model(), [{"role": "system", "content": "A"}, *HISTORY], system="B")
