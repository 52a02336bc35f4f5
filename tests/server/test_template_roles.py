"""System messages anywhere in a conversation: merged for templates that take one, in front, and left for others."""

import logging

import httpx
import pytest
from jinja2 import Template
from scripted_server import scripted_server

from model_adapters.errors import ChatTemplateError
from torchax_serve.server import notes as notes_once
from torchax_serve.server.common_calls import texts_around_calls, with_calls_as_text
from torchax_serve.server.response_families import FAMILIES
from torchax_serve.server.template_roles import (
    TemplateRoles,
    has_several_calls,
    with_one_system,
    with_single_calls,
    with_users_joined,
)

SYSTEM, DEVELOPER = {"role": "system", "content": "One."}, {"role": "developer", "content": "Two."}
USER, ASSISTANT = {"role": "user", "content": "Please be polite"}, {"role": "assistant", "content": "Yes."}


@pytest.fixture(scope="module", params=[True, False], ids=["system first", "system anywhere"])
def found(request, tmp_path_factory):
    with scripted_server(tmp_path_factory.mktemp("roles"), model={"is_system_first": request.param}) as server:
        yield server.url, request.param


def rendered(url, messages):
    body = {"model": "scripted", "messages": messages}
    answer = httpx.post(f"{url}/v1/chat/completions/render", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["prompt"]


def test_system_messages_are_merged_where_the_template_takes_one(found, caplog, monkeypatch):
    url, is_system_first = found
    monkeypatch.setattr(notes_once, "_noted", set())
    with caplog.at_level(logging.INFO, "torchax_serve.server"):
        for _ in range(2):
            text = rendered(url, [SYSTEM, USER, ASSISTANT, DEVELOPER, USER])
    notes = [record.getMessage() for record in caplog.records if "system message" in record.getMessage()]
    assert text.count("<start_of_turn>system") == (1 if is_system_first else 2)
    assert ("One.\n\nTwo." in text) == is_system_first and len(notes) == is_system_first


def test_a_system_message_in_the_middle_of_messages(found):
    url, _ = found
    blocks = [{"type": "text", "text": "Please be polite"}]
    body = {
        "model": "scripted",
        "max_tokens": 20,
        "system": "Zero.",
        "messages": [{"role": "user", "content": blocks}, {"role": "system", "content": "One."}, USER],
    }
    answer = httpx.post(f"{url}/v1/messages", json=body, timeout=120).json()
    assert answer["content"][0]["text"] == "One STOP Two."


def test_merging_keeps_every_text_once_and_the_order():
    parts = {"role": "user", "content": [{"type": "text", "text": "b"}]}
    merged = with_one_system([USER, SYSTEM, parts, ASSISTANT, DEVELOPER, USER])
    assert [each["role"] for each in merged] == ["system", "user", "assistant", "user"]
    assert merged[0]["content"] == "One.\n\nTwo."
    assert merged[1]["content"] == [{"type": "text", "text": "Please be polite"}, {"type": "text", "text": "b"}]
    assert with_one_system([USER, USER, SYSTEM])[1:] == [USER, USER]
    assert with_users_joined([USER, USER, ASSISTANT]) == [
        {"role": "user", "content": "Please be polite\n\nPlease be polite"},
        ASSISTANT,
    ]


def call(call_id, name="f"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}}


def result(call_id, content):
    return {"role": "tool", "content": content, **({} if call_id is None else {"tool_call_id": call_id})}


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        ("{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{{ m.tool_calls[0].function.name if m.tool_calls }}{% endfor %}", False),
        ("{% for m in messages %}{% if m.tool_calls | length > 1 %}{{ 1 / 0 }}{% endif %}{% endfor %}", False),
    ],
    ids=["all", "the first", "an error"],
)
def test_templates_that_take_several_calls_of_a_message_are_found_out(source, takes):
    """Llama's raise for two, those of gpt-oss and GigaChat drop all but one."""

    def render(messages):
        try:
            return Template(source).render(messages=messages)
        except ZeroDivisionError as error:
            raise ChatTemplateError("one call at once") from error

    assert TemplateRoles(render).takes_several_calls is takes


def test_calls_become_messages_of_their_own_with_their_results_behind_them():
    asked = {"role": "assistant", "content": "Both.", "tool_calls": [call("a"), call("b"), call("c")]}
    for results in ([result("b", "2"), result("a", "1")], [result(None, "1"), result(None, "2")]):
        found = with_single_calls([USER, asked, *results, ASSISTANT])
        assert not has_several_calls(found)
        assert [each.get("content") for each in found[1:]] == ["Both.", "1", "", "2", "", "Yes."]
        assert [each["tool_calls"][0]["id"] for each in found if "tool_calls" in each] == ["a", "b", "c"]
    single = [USER, {**asked, "tool_calls": [call("a")]}, result("x", "1")]
    assert with_single_calls(single) == single


def test_calls_that_a_template_leaves_out_are_text():
    """Templates of LFM2 and Granite 3 show tools and results alone."""
    by_name = {family.name: family for family in FAMILIES}
    messages = [USER, {"role": "assistant", "content": "Look.", "tool_calls": [call("a"), call("b", "g")]}]
    texts = ['{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {"a": 1}}']
    granite = "respond only with <|tool_call|> followed by a JSON list of tools used"
    for family, template, expected in (
        (by_name["lfm2"], "", f"<|tool_call_start|>[{', '.join(texts)}]<|tool_call_end|>"),
        (by_name["think"], granite, f"<|tool_call|>[{', '.join(texts)}]"),
        (None, "as <TOOLCALL>[...]</TOOLCALL>", f"<TOOLCALL>[{', '.join(texts)}]</TOOLCALL>"),
        (None, "{{ tools }}", "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)),
    ):
        found = with_calls_as_text(messages, texts_around_calls(family, template))
        assert found == [USER, {"role": "assistant", "content": f"Look.\n{expected}"}]
