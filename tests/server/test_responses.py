"""`/v1/responses` by OpenAI's own client, with a model that says the lines of a script."""

import json
import logging
import re

import httpx
import openai
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_server import QUESTIONS, scripted_server

from torchax_serve.server import chat_answer
from torchax_serve.server import notes as notes_once
from torchax_serve.server.errors import ApiError
from torchax_serve.server.parsed_message import ParsedStep
from torchax_serve.server.response_families import FAMILIES
from torchax_serve.server.response_parsing import AnswerParser
from torchax_serve.server.responses.items import ItemWriter
from torchax_serve.server.sse import named_event

READ = {
    "type": "function",
    "name": "Read",
    "description": "Reads a file.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"file_path": {"type": "string"}}, "required": ["file_path"]},
}
GLOB = {**READ, "name": "Glob", "parameters": {"type": "object", "properties": {"pattern": {"type": "string"}}}}
PYTHON = {"type": "custom", "name": "python", "description": "Runs code."}
TOOLS = [READ, GLOB, PYTHON]
SEALED = ["reasoning.encrypted_content"]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    with scripted_server(tmp_path_factory.mktemp("scripted")) as server:
        yield server


@pytest.fixture(scope="module")
def client(scripted):
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=120) as found:
        yield found


@pytest.fixture(scope="module")
def raw(scripted):
    with httpx.Client(base_url=scripted.url, timeout=120) as found:
        yield found


def ask(client, given, **fields):
    return client.responses.create(**{"model": "scripted", "store": False, "input": given, **fields})


def events_of(client, given, **fields):
    return list(ask(client, given, stream=True, **fields))


def shown(response):
    """A response without what differs between two equal requests."""
    found = response.model_dump(mode="json")
    for name in ("id", "created_at", "completed_at"):
        found.pop(name)
    for item in found["output"]:
        item.pop("id")
        item.pop("call_id", None)
    found["usage"].pop("input_tokens_details")
    found["usage"].pop("output_tokens_details")  # counted by steps, which may have several tokens
    return found


def check_order(events):
    """Checks the numbers of events, and that what is added is done, one item and one part at a time."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete", "response.failed")
    is_open = dict.fromkeys(("output_item", "content_part"), False)
    for event in events:
        for name in is_open:
            if event.type.endswith(f"{name}.added"):
                assert not is_open[name]
                is_open[name] = True
            elif event.type.endswith(f"{name}.done"):
                assert is_open[name]
                is_open[name] = False
    assert not any(is_open.values())
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [each.model_dump() for each in done] == [each.model_dump() for each in events[-1].response.output]


def test_a_turn_with_a_tool(client):
    question = {"role": "user", "content": "What does note.txt say?"}
    first = ask(client, [question], tools=TOOLS)
    text, use = first.output
    assert (text.type, first.output_text, first.status) == ("message", "Let me look.", "completed")
    assert (use.type, use.name) == ("function_call", "Read")
    assert json.loads(use.arguments) == {"file_path": "/tmp/note.txt"}
    result = {"type": "function_call_output", "call_id": use.call_id, "output": "hello, world of notes"}
    second = ask(client, [question, *first.output, result], tools=TOOLS)
    assert second.output_text == "It says: hello, world of notes."
    assert second.usage.input_tokens_details.cached_tokens > 0.9 * first.usage.input_tokens
    assert second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens


@settings(max_examples=12)
@given(st.sampled_from(QUESTIONS), st.integers(1, 60), st.booleans())
def test_streamed_events_assemble_to_the_complete_response(client, question, max_tokens, has_tools):
    fields = {"max_output_tokens": max_tokens, "include": SEALED} | ({"tools": TOOLS} if has_tools else {})
    events = events_of(client, question, **fields)
    check_order(events)
    assert shown(events[-1].response) == shown(ask(client, question, **fields))
    texts = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
    for item in events[-1].response.output:
        field = {"function_call": "arguments", "custom_tool_call": "input"}.get(item.type)
        whole = item.content[0].text if field is None else getattr(item, field)
        assert texts.get(item.id, "") == whole


def test_the_clients_own_accumulation_is_the_final_response(client):
    with client.responses.stream(model="scripted", input="Please think and read", tools=[READ], store=False) as stream:
        for _ in stream:
            pass
        found = stream.get_final_response()
    assert [item.type for item in found.output] == ["reasoning", "function_call"]


def test_reasoning_is_taken_back(client):
    first = ask(client, "Please think first", include=SEALED)
    thought, _ = first.output
    assert thought.content[0].text == "Two and two are four." and thought.encrypted_content
    for item in (
        {**thought.model_dump(exclude_none=True)},
        {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content},
    ):
        given = [{"role": "user", "content": "Please think first"}, item, first.output[1]]
        second = ask(client, [*given, {"role": "user", "content": "And be polite"}])
        assert second.output_text == "One STOP Two."
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_custom_tools_have_a_text(client):
    first = ask(client, "Please run code", tools=TOOLS)
    (use,) = first.output
    assert (use.type, use.name, use.input) == ("custom_tool_call", "python", "print('a')\n")
    result = {"type": "custom_tool_call_output", "call_id": use.call_id, "output": "x was not found"}
    given = [{"role": "user", "content": "Please run code"}, use, result]
    assert ask(client, given, tools=TOOLS).output_text == "There is no such file."


def test_the_form_of_the_text(client):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "number", "schema": schema}
    found = ask(client, "Please be polite", text={"format": form})
    assert json.loads(found.output_text)["n"] in (1, 2) and found.text.format.type == "json_schema"


def test_log_probabilities_are_included(client):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = events_of(client, "Please be polite", **fields)
    found = events[-1].response.output[0].content[0].logprobs
    assert "".join(each.token for each in found).startswith("One STOP Two.") and len(found[0].top_logprobs) == 2


def test_instructions_are_a_system_message(client):
    plain = ask(client, "Please be polite").usage.input_tokens
    assert ask(client, "Please be polite", instructions="You are kind.").usage.input_tokens > plain


def test_answers_that_are_cut_are_incomplete(client):
    found = ask(client, "Please be polite", max_output_tokens=2)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.output[0].status == "incomplete"
    assert ask(client, "Please be polite", max_output_tokens=32000).status == "completed"
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, "word " * 3000)
    assert raised.value.code == "context_length_exceeded"


def test_a_request_as_codex_sends_it(raw, caplog, monkeypatch):
    """Tools that cannot run are left out and what is unknown is ignored, with one note each."""
    part = {"type": "input_text", "text": "Be brief."}
    body = {
        "model": "scripted",
        "stream": True,
        "input": [
            {"type": "message", "id": "msg_1", "role": "developer", "content": [part]},
            {"type": "message", "id": "msg_2", "role": "developer", "content": [part, part]},
            {"type": "message", "id": "msg_3", "role": "user", "content": "Some context."},
            {
                "type": "message",
                "id": "msg_4",
                "role": "user",
                "content": [{"type": "input_text", "text": "I read both"}],
            },
        ],
        "tools": [
            READ,
            {"type": "namespace", "name": "agents", "description": "x", "tools": [READ]},
            {"type": "web_search", "external_web_access": True},
            {**PYTHON, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": True,
        "include": SEALED,
        "prompt_cache_key": "key",
        "client_metadata": {"turn_id": "1"},
        "field_of_next_month": 1,
    }
    monkeypatch.setattr(notes_once, "_noted", set())
    with caplog.at_level(logging.INFO, "torchax_serve.server"):
        for _ in range(2):
            text = raw.post("/v1/responses", json=body).text
            assert '"type":"response.completed"' in text and '"name":"Read"' in text
    notes = [record.getMessage() for record in caplog.records]
    for name in ("namespace", "web_search", "field_of_next_month"):
        assert sum(f"'{name}'" in note for note in notes) == 1, name
    for words in ("grammars of custom tools", "are not stored"):
        assert sum(words in note for note in notes) == 1, words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": None}, "input: expected a valid list"),
        ({"input": []}, "input: expected at least one"),
        ({"input": [{"role": "user", "content": "x"}] * 4097}, "input: expected at most 4096, got 4097"),
        ({"tools": [READ] * 2000}, "tools: expected at most 1024, got 2000"),
        ({"input": "x" * 5_000_000}, "maximum context length"),
        ({"input": [{"type": "hologram"}]}, r"input\[0\].type: expected one of"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, r"input\[0\].content\[0\].text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\].content\[0\].image_url"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, r"input\[0\].call_id: expected a value"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: expected null"),
        ({"background": True}, "background: expected false"),
        ({"max_output_tokens": 0}, "max_output_tokens: expected a whole number >= 1"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name"),
        ({"tool_choice": "required"}, "tool_choice: expected tools with required"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_bad_requests_name_the_field(raw, fields, words):
    answer = raw.post("/v1/responses", json={"model": "scripted", "input": "Hi", **fields})
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert re.search(words, answer.json()["error"]["message"]), answer.json()


def test_an_error_in_mid_stream_is_a_failed_response(client, raw, monkeypatch):
    def fail_at_the_end(reason):
        if reason is not None:
            raise ApiError(504, "expected an answer in time, got none")

    monkeypatch.setattr(chat_answer, "finish_reason_of", fail_at_the_end)
    events = events_of(client, "Please be polite")
    check_order(events)
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "expected an answer in time, got none"
    body = {"model": "scripted", "max_tokens": 40, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    last = raw.post("/v1/messages", json=body).text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ") and '"timeout_error"' in last


def test_an_item_that_breaks_off_is_done_and_incomplete():
    writer = ItemWriter((), seals=False)
    kinds = [each["type"] for each in writer.push(ParsedStep(reasoning="a", content="b"))]
    kinds += [each["type"] for each in writer.close("incomplete")]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
    assert [item["status"] for item in writer.items] == ["completed", "incomplete"]
    assert writer.items[1]["content"][0]["text"] == "b" and not list(writer.close())


@pytest.mark.parametrize("question", QUESTIONS)
def test_events_have_all_fields_of_their_types(raw, question):
    event_type = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
    body = {"model": "scripted", "input": question, "tools": TOOLS, "stream": True, "max_output_tokens": 30}
    blocks = raw.post("/v1/responses", json=body).text.strip().split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    for block in blocks[:-1]:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = event_type.validate_json(data.removeprefix("data: "))
        assert name == f"event: {event.type}"
    whole = raw.post("/v1/responses", json={**body, "stream": False})
    openai.types.responses.Response.model_validate_json(whole.content)


def test_the_rest_of_a_call_is_in_front_of_the_text_behind_it():
    """One step ends the arguments and has the text that follows."""
    parser, writer = (
        AnswerParser(
            next(each for each in FAMILIES if each.name == "hermes"),
            "",
            [{"type": "function", "function": {"name": "f"}}],
        ),
        ItemWriter((), seals=False),
    )
    pieces = ('<tool_call>\n{"name": "f", "arguments": {"a": "x', 'y"}}\n</tool_call>\nDone.')
    steps = [*map(parser.push, pieces), parser.flush()]
    assert any(step.content and step.tool_calls for step in steps)
    for step in steps:
        list(writer.push(step))
    list(writer.close())
    call, message = writer.items
    assert (call["name"], json.loads(call["arguments"])) == ("f", {"a": "xy"})
    assert message["content"][0]["text"] == "Done."


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (r'{"input": "a\ud800b"}', "a\ufffdb"),
        (r'{"input": "\ud83e\udd8a"}', "🦊"),
        (r'{"input": 3, "x": "\ud800"}', r'{"input": 3, "x": "\ud800"}'),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_every_input_of_a_custom_tool_has_bytes(arguments, text):
    writer = ItemWriter(("python",), seals=False)
    call = {"index": 0, "id": "a", "function": {"name": "python", "arguments": arguments}}
    events = [*writer.push(ParsedStep(tool_calls=[call])), *writer.close()]
    assert writer.items[0]["input"] == text
    assert [named_event(each) for each in events]


def test_a_text_without_bytes_ends_no_stream():
    body = named_event({"type": "x", "text": "a\ud800b"}).partition(b"data: ")[2]
    assert json.loads(body) == {"type": "x", "text": "a?b"}


def test_tools_and_formats_have_all_their_fields_in_the_answer(raw):
    """Open Responses' schema requires them, null where the request has none."""
    tool = {"type": "function", "name": "Read", "parameters": READ["parameters"]}
    schema = {"type": "json_schema", "name": "words", "schema": {"type": "object"}}
    body = {"model": "scripted", "input": "Hi", "max_output_tokens": 4, "tools": [tool, PYTHON]}
    told = raw.post("/v1/responses", json=body).json()
    assert told["tools"] == [tool | {"description": None, "strict": None}, PYTHON]
    told = raw.post("/v1/responses", json=body | {"tools": [READ], "text": {"format": schema}}).json()
    assert told["tools"] == [READ]
    assert told["text"]["format"] == schema | {"description": None, "strict": False}
    assert raw.post("/v1/responses", json=body | {"tools": []}).json()["text"]["format"] == {"type": "text"}


def called(number, text):
    """A call and its result."""
    call_id = f"call_{number}"
    call = {"type": "function_call", "call_id": call_id, "name": "Read", "arguments": '{"file_path": "/tmp/a"}'}
    return [call, {"type": "function_call_output", "call_id": call_id, "output": text}]


FILLER = "Many words stand here. " * 30
SYSTEM = {"role": "developer", "content": "Be brief."}
LAST = {"role": "user", "content": "Please does note.txt say?"}
LONG = {
    "messages": [
        SYSTEM,
        *[{"role": role, "content": FILLER} for _ in range(12) for role in ("user", "assistant")],
        LAST,
    ],
    "calls of one message": [SYSTEM, LAST, *[item for n in range(24) for item in called(n, FILLER)]],
    "calls at once": [
        SYSTEM,
        *[
            item
            for n in range(0, 24, 2)
            for pair in zip(called(n, FILLER), called(n + 1, FILLER), strict=True)
            for item in pair
        ],
        LAST,
    ],
}


@pytest.mark.parametrize("name", LONG)
def test_the_first_items_are_left_out_of_an_input_that_is_too_long_where_they_may_be(client, name):
    items = LONG[name]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ask(client, items, tools=TOOLS)
    found = ask(client, items, tools=TOOLS, truncation="auto", max_output_tokens=8)
    assert found.truncation == "auto" and found.status in ("completed", "incomplete")
    # As many items as fit, by trying all places where no result is without its call.
    for begin in range(1, len(items)):
        before = {each.get("call_id") for each in items[:begin]} - {None}
        behind = {each["call_id"] for each in items[begin:] if each.get("type") == "function_call_output"}
        if before & behind:
            continue
        kept = items[begin:]
        if not any(each.get("role") == "user" for each in kept):
            kept = [LAST, *kept]
        try:
            expected = ask(client, [SYSTEM, *kept], tools=TOOLS, max_output_tokens=8)
            break
        except openai.BadRequestError:
            continue
    assert found.usage.input_tokens == expected.usage.input_tokens
    assert found.output_text == expected.output_text
    streamed = events_of(client, items, tools=TOOLS, truncation="auto", max_output_tokens=8)
    check_order(streamed)
    assert streamed[-1].response.usage.input_tokens == expected.usage.input_tokens


def test_one_message_that_is_too_long_is_an_error_also_with_truncation(client):
    for items in (
        "word " * 4000,
        [SYSTEM, {"role": "user", "content": "word " * 4000}],
        [{**SYSTEM, "content": "word " * 4000}, LAST],
    ):
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            ask(client, items, truncation="auto")
