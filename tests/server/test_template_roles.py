"""System messages anywhere in a conversation: merged for templates that take one, in front, and left for others."""

import logging

import httpx
import pytest
from scripted_server import scripted_server

from torchax_serve.server import notes as notes_once
from torchax_serve.server.template_roles import with_one_system, with_users_joined

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
