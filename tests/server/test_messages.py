"""`/v1/messages` by Anthropic's own client, with a model that says the lines of a script."""

import base64
import io
import json
import logging
import re

import anthropic
import httpx
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scripted_server import QUESTIONS, scripted_server

from torchax_serve.server import notes as notes_once

READ = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"file_path": {"type": "string"}}, "required": ["file_path"]},
}
GLOB = {"name": "Glob", "input_schema": {"type": "object", "properties": {"pattern": {"type": "string"}}}}
TOOLS = [READ, GLOB]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    with scripted_server(tmp_path_factory.mktemp("scripted")) as server:
        yield server


@pytest.fixture(scope="module")
def claude(scripted):
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0, timeout=120) as found:
        yield found


@pytest.fixture(scope="module")
def raw(scripted):
    with httpx.Client(base_url=scripted.url, timeout=120) as found:
        yield found


def ask(claude, text, **fields):
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    return claude.messages.create(**{"model": "scripted", "max_tokens": 200, "messages": messages, **fields})


def streamed(claude, text, **fields):
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    with claude.messages.stream(**{"model": "scripted", "max_tokens": 200, "messages": messages, **fields}) as stream:
        return stream.get_final_message()


def shown(message):
    """A message without what differs between two equal requests."""
    found = message.model_dump(exclude_none=True)
    found.pop("id")
    for block in found["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    usage = found.pop("usage")
    total = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    return found | {"prompt": total, "answer": usage["output_tokens"]}


def test_a_turn_with_a_tool(claude):
    """The model calls a tool; its result brings the answer."""
    question = {"role": "user", "content": "What does note.txt say?"}
    first = ask(claude, [question], tools=TOOLS)
    text, use = first.content
    assert (text.type, text.text) == ("text", "Let me look.")
    assert (use.type, use.name, use.input) == ("tool_use", "Read", {"file_path": "/tmp/note.txt"})
    assert first.stop_reason == "tool_use" and use.id.startswith("toolu_")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "hello, world of notes"}
    messages = [question, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = ask(claude, messages, tools=TOOLS)
    assert [block.text for block in second.content] == ["It says: hello, world of notes."]
    assert second.stop_reason == "end_turn"
    assert second.usage.cache_read_input_tokens > 0.9 * first.usage.input_tokens


@settings(max_examples=12)
@given(st.sampled_from(QUESTIONS), st.integers(1, 60), st.booleans())
def test_streamed_events_assemble_to_the_complete_message(claude, question, max_tokens, has_tools):
    fields = {"max_tokens": max_tokens} | ({"tools": TOOLS} if has_tools else {})
    assert shown(streamed(claude, question, **fields)) == shown(ask(claude, question, **fields))


def test_events_come_in_anthropics_order(claude):
    with claude.messages.stream(
        model="scripted", max_tokens=200, tools=TOOLS, messages=[{"role": "user", "content": "Please think and read"}]
    ) as stream:
        kinds = [event.type for event in stream]
    for name in ("message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"):
        assert name in kinds
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


def test_raw_events_are_named_and_have_pings(raw):
    body = {"model": "scripted", "max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    text = raw.post("/v1/messages?beta=true", json=body).text
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    assert all(first.startswith("event: ") and f'"type":"{first[7:]}"' in second for first, second in blocks)
    assert "event: ping" in text and "[DONE]" not in text


def test_thinking_is_a_block_in_front_and_is_taken_back(claude):
    first = ask(claude, "Please think first", thinking={"type": "enabled", "budget_tokens": 1024})
    thought, text = first.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "Two and two are four.", "Four.")
    assert thought.signature
    messages = [
        {"role": "user", "content": "Please think first"},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "And be polite"},
    ]
    assert ask(claude, messages).content[0].text == "One STOP Two."


def test_two_calls_of_one_answer(claude):
    found = ask(claude, "Please read both", tools=TOOLS)
    assert [(each.name, each.input) for each in found.content] == [
        ("Read", {"file_path": "/tmp/one.txt"}),
        ("Glob", {"pattern": "*.py", "deep": True}),
    ]
    one = ask(claude, "Please read both", tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [each.name for each in one.content] == ["Read"]
    none = ask(claude, "Please read both", tools=TOOLS, tool_choice={"type": "none"})
    assert {each.type for each in none.content} == {"text"}


def test_a_forced_call_follows_the_schema(claude):
    found = ask(claude, "Please think first", tools=TOOLS, tool_choice={"type": "tool", "name": "Read"}, max_tokens=60)
    assert found.content[0].name == "Read"


def test_results_of_tools_with_errors_and_parts(claude):
    use = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "x"}}
    for content in ("x was not found", [{"type": "text", "text": "x was not found"}]):
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": content}
        messages = [{"role": "user", "content": "Read x"}, {"role": "assistant", "content": [use]}]
        found = ask(claude, [*messages, {"role": "user", "content": [result]}], tools=TOOLS)
        assert found.content[0].text == "There is no such file."


def test_an_image_in_a_result_is_an_error_of_a_model_of_texts(claude):
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file.getvalue()).decode()}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}
    use = {"type": "tool_use", "id": "a", "name": "Read", "input": {}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [use]}]
    with pytest.raises(anthropic.BadRequestError, match="got images"):
        ask(claude, [*messages, {"role": "user", "content": [result]}], tools=TOOLS)


def test_stop_sequences_and_max_tokens_are_reasons(claude):
    found = ask(claude, "Now be polite", stop_sequences=[" STOP"])
    assert (found.stop_reason, found.stop_sequence, found.content[0].text) == ("stop_sequence", " STOP", "One")
    assert ask(claude, "Now be polite", max_tokens=2).stop_reason == "max_tokens"


def test_more_tokens_than_the_model_has_are_bounded(claude):
    found = ask(claude, "Now be polite", max_tokens=32000)
    assert (found.content[0].text, found.stop_reason) == ("One STOP Two.", "end_turn")
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask(claude, "word " * 3000, max_tokens=32000)


def test_the_last_message_of_the_assistant_is_continued(claude):
    messages = [{"role": "user", "content": "Now be polite"}, {"role": "assistant", "content": "One STOP"}]
    assert ask(claude, messages).content[0].text == " Two."


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}, {"system": [{"type": "text", "text": "Be short."}]}])
def test_counted_tokens_are_those_of_the_usage(claude, fields):
    messages = [{"role": "user", "content": "What does note.txt say?"}]
    usage = ask(claude, messages, **fields).usage
    counted = claude.messages.count_tokens(model="scripted", messages=messages, **fields).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    beta = claude.beta.messages.count_tokens(model="scripted", messages=messages, betas=["some-beta"], **fields)
    assert beta.input_tokens == counted


def test_an_attribution_header_is_left_out_of_the_prompt(claude):
    """Its number differs from request to request; the prefix is found in the cache nevertheless."""
    long = {"type": "text", "text": "You help with files. " * 20, "cache_control": {"type": "ephemeral"}}
    usages = []
    for number in ("4f1", "93c"):
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number};"}
        usages.append(ask(claude, "Now be polite", system=[header, long]).usage)
    total = usages[0].input_tokens + usages[0].cache_read_input_tokens
    assert usages[1].cache_read_input_tokens > 0.9 * total
    assert usages[1].input_tokens + usages[1].cache_read_input_tokens == total
    assert ask(claude, "Now be polite", system=[long]).usage.input_tokens < 0.1 * total


def test_what_is_unknown_is_noted_once_and_ignored(raw, caplog, monkeypatch):
    body = {
        "model": "scripted",
        "max_tokens": 60,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Now be polite", "new_key": 1}]}],
        "tools": [{"type": "web_search_20260318", "name": "web_search"}, {**READ, "newer_key": True}],
        "newest_field": {"a": 1},
        "metadata": {"user_id": "someone"},
    }
    headers = {"anthropic-beta": "made-up-2030-01-01,other", "anthropic-version": "2023-06-01", "x-api-key": "any"}
    monkeypatch.setattr(notes_once, "_noted", set())
    with caplog.at_level(logging.INFO, "torchax_serve.server"):
        for _ in range(2):
            answer = raw.post("/v1/messages?beta=true", json=body, headers=headers)
            assert answer.status_code == 200 and answer.json()["content"][0]["text"] == "One STOP Two."
    notes = [record.getMessage() for record in caplog.records]
    for name in ("newest_field", "messages.content.new_key", "tools.newer_key", "web_search_20260318"):
        assert sum(f"'{name}'" in note for note in notes) == 1, name
    assert not any("metadata" in note for note in notes)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens: expected a whole number >= 1"),
        ({"max_tokens": None}, "max_tokens: expected a valid integer"),
        ({"messages": []}, "messages: expected at least one"),
        ({"messages": [{"role": "user", "content": "x"}] * 4097}, "messages: expected at most 4096, got 4097"),
        ({"tools": [READ] * 2000}, "tools: expected at most 1024, got 2000"),
        ({"messages": [{"role": "user", "content": "x" * 5_000_000}]}, "prompt is too long"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, r"messages\[0\].content\[0\].type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "tool_result",
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, r"tools\[0\]"),
        ({"tools": [{"name": "ab"}]}, r"tools\[0\].input_schema: expected a JSON schema"),
        ({"tools": [READ] * 1025}, "at most 1024"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "Other"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"system": 3}, "system"),
    ],
)
def test_bad_requests_are_errors_of_the_dialect(raw, fields, words):
    body = {"model": "scripted", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}], **fields}
    answer = raw.post("/v1/messages", json=body)
    error = answer.json()
    assert answer.status_code == 400 and error["type"] == "error", error
    assert error["error"]["type"] == "invalid_request_error"
    assert error["request_id"] == answer.headers["request-id"]
    assert re.search(words, error["error"]["message"]), error


def test_errors_of_other_kinds(scripted, raw):
    body = {"model": "claude-x", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    answer = raw.post("/v1/messages", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert raw.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    bad = raw.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert bad.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("question", QUESTIONS)
def test_events_have_all_fields_of_their_types(raw, question):
    event_type = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)
    messages = [{"role": "user", "content": question}]
    body = {"model": "scripted", "messages": messages, "tools": TOOLS, "stream": True, "max_tokens": 60}
    for block in raw.post("/v1/messages", json=body).text.strip().split("\n\n"):
        name, data = block.split("\n")
        if name != "event: ping":
            assert name == f"event: {event_type.validate_json(data.removeprefix('data: ')).type}"
    whole = raw.post("/v1/messages", json={**body, "stream": False})
    anthropic.types.Message.model_validate_json(whole.content)


def test_the_schema_of_an_answer(claude):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": "high"}
    found = ask(claude, "Please be polite", output_config=config, tools=[])
    assert json.loads(found.content[0].text)["n"] in (1, 2)


def test_results_without_a_text_and_documents_of_text(claude):
    use = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}}
    source = {"type": "text", "media_type": "text/plain", "data": "A document."}
    blocks = [
        {"type": "tool_result", "tool_use_id": "toolu_1"},
        {"type": "document", "source": source, "title": "Title"},
        {"type": "text", "text": "Now be polite"},
    ]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [use]}]
    found = ask(claude, [*messages, {"role": "user", "content": blocks}], tools=TOOLS)
    assert found.content[0].text == "One STOP Two."
