"""Tools and reasoning over HTTP, with a model whose chat template is Qwen's in small; forced calls always parse."""

import json
import shutil
from pathlib import Path

import httpx
import openai
import pytest
from running_server import serving
from thorough import thorough

import torchax_serve

TEMPLATE = """{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}
Write <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Łódź", "Rome"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "clock",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
QUESTION = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture(scope="module")
def tooled(tmp_path_factory):
    path = tmp_path_factory.mktemp("tooled")
    for file in (Path(torchax_serve.__file__).parent / "embedded").iterdir():
        shutil.copy(file, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    with serving(path) as found:
        yield found


@pytest.fixture(scope="module")
def client(tooled):
    with openai.OpenAI(base_url=f"{tooled[0].url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def ask(client, **fields):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": QUESTION, "tools": TOOLS, "max_tokens": 150, **fields}
    )


@pytest.mark.parametrize("temperature", [thorough(0), 1.5])
def test_a_named_tool_is_called_with_arguments_that_parse(client, temperature):
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = ask(client, tool_choice=choice, temperature=temperature, seed=2).choices[0]
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather" and arguments["city"] in ("Łódź", "Rome") and 1 <= arguments["days"] <= 9
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)


def test_a_required_call_is_of_one_of_the_tools(client):
    for seed in range(4):
        answer = ask(client, tool_choice="required", parallel_tool_calls=False, temperature=1.2, seed=seed).choices[0]
        (call,) = answer.message.tool_calls
        assert call.function.name in ("weather", "clock")
        json.loads(call.function.arguments)
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOLS[1]]}}
    answer = ask(client, tool_choice=allowed, parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in answer.message.tool_calls] == ["clock"]


def test_streamed_calls_join_to_the_complete_ones(client):
    choice = {"type": "function", "function": {"name": "weather"}}
    complete = ask(client, tool_choice=choice).choices[0].message.tool_calls[0]
    names, ids, arguments, reasons, num_pieces = [], [], "", [], 0
    for chunk in ask(client, tool_choice=choice, stream=True):
        delta = chunk.choices[0].delta
        reasons.append(chunk.choices[0].finish_reason)
        assert not delta.content
        for piece in delta.tool_calls or ():
            assert piece.index == 0
            names += [piece.function.name] if piece.function.name else []
            ids += [piece.id] if piece.id else []
            arguments, num_pieces = arguments + piece.function.arguments, num_pieces + 1
    assert (names, arguments) == (["weather"], complete.function.arguments)
    assert len(ids) == 1 and reasons[-1] == "tool_calls" and num_pieces > 3


def test_the_sdk_joins_and_parses_streamed_arguments(client):
    with client.chat.completions.stream(
        model="tiny", messages=QUESTION, tools=TOOLS, tool_choice="required", max_tokens=150, seed=3, temperature=0.8
    ) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (*_, call) = stream.get_final_completion().choices[0].message.tool_calls
    last = [event for event in deltas if event.index == call.index]
    assert "".join(event.arguments_delta for event in last) == last[-1].arguments == call.function.arguments
    json.loads(call.function.arguments)


def test_a_call_that_is_cut_is_told_from_a_complete_one(client):
    choice = {"type": "function", "function": {"name": "weather"}}
    found = ask(client, tool_choice=choice, max_tokens=30).choices[0]
    assert found.finish_reason == "length"
    for call in found.message.tool_calls or ():
        with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
            json.loads(call.function.arguments)


def test_auto_and_none_answer_with_text(client):
    for choice in ("auto", "none"):
        answer = ask(client, tool_choice=choice, max_tokens=12).choices[0]
        assert answer.message.tool_calls is None and isinstance(answer.message.content, str)
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    assert ask(client, tools=strict, max_tokens=12).choices[0].finish_reason in ("stop", "length")


def test_reasoning_is_kept_apart(client):
    fields = {
        "tools": openai.NOT_GIVEN,
        "max_tokens": 20,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }
    answer = ask(client, **fields)
    message = answer.choices[0].message
    assert message.content == "" and message.reasoning_content == message.reasoning != ""
    assert answer.usage.completion_tokens_details.reasoning_tokens == 20
    streamed = "".join(
        getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in ask(client, stream=True, **fields)
    )
    assert streamed.strip() == message.reasoning_content.strip()


def test_results_and_malformed_arguments_are_replayed(client):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny."},
    ]
    assert isinstance(ask(client, messages=messages, max_tokens=5).choices[0].message.content, str)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]"),
        ({"tools": TOOLS * 513}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_bad_tools_are_named(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.param == param


RESULT = [
    {"role": "user", "content": "What is 3 plus 4?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "7"},
]


def test_a_result_stands_next_to_a_message_of_the_user(server):
    """As agents send them, also to a template that has no tools and takes no two messages of the user in a row."""
    said = {"role": "user", "content": "Thanks. And 1 plus 1?"}
    texts = []
    for messages in ([*RESULT, said], [*RESULT[:2], said, RESULT[2]], [*RESULT[:2], RESULT[2], RESULT[2]]):
        answer = httpx.post(f"{server.url}/v1/chat/completions/render", json={"model": "tiny", "messages": messages})
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["prompt"])
    response = "<tool_response>\n7\n</tool_response>"
    assert f"{response}\n\n{said['content']}" in texts[0] and f"{said['content']}\n\n{response}" in texts[1]
    assert texts[2].count(response) == 2
    blocks = [{"type": "tool_result", "tool_use_id": "t", "content": "7"}, {"type": "text", "text": said["content"]}]
    call = [{"type": "tool_use", "id": "t", "name": "add", "input": {}}]
    body = {"model": "tiny", "max_tokens": 2, "messages": [RESULT[0], {"role": "assistant", "content": call}]}
    for content in (blocks, blocks[::-1]):
        sent = body | {"messages": [*body["messages"], {"role": "user", "content": content}]}
        assert httpx.post(f"{server.url}/v1/messages", json=sent, timeout=60).status_code == 200


def test_an_empty_answer_may_have_no_content(server):
    texts = []
    for empty in ({"role": "assistant"}, {"role": "assistant", "content": None}, {"role": "assistant", "content": ""}):
        messages = [RESULT[0], empty, RESULT[0]]
        answer = httpx.post(f"{server.url}/v1/chat/completions/render", json={"model": "tiny", "messages": messages})
        texts.append(answer.json()["prompt"])
    assert texts[0] == texts[1] == texts[2]
    messages = [{"role": "user"}]
    assert httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages}).status_code == 400


def test_tools_of_a_model_without_them_are_called_in_a_common_form(server):
    """Its template has no place for tools: the prompt has them in its text, and answers are read in common forms."""
    plain = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    written = 'I look.\n{"name": "clock", "arguments": {}}'.partition("\n")[2]
    with plain:
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            answer = ask(plain, tool_choice=choice, parallel_tool_calls=False, max_tokens=140).choices[0]
            (call,) = answer.message.tool_calls
            assert answer.finish_reason == "tool_calls" and call.function.name in ("weather", "clock")
            assert set(json.loads(call.function.arguments)) in ({"city", "days"}, set())
        answer = ask(plain, extra_body={"structured_outputs": {"choice": [written]}}, max_tokens=80).choices[0]
        assert [call.function.name for call in answer.message.tool_calls] == ["clock"]
        messages = [
            *QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [answer.message.tool_calls[0].model_dump()]},
            {"role": "tool", "tool_call_id": answer.message.tool_calls[0].id, "content": "12:00"},
        ]
        assert ask(plain, messages=messages, max_tokens=5).choices[0].finish_reason in ("stop", "length")
    body = {"model": "tiny", "messages": messages, "tools": TOOLS}
    prompt = httpx.post(f"{server.url}/v1/chat/completions/render", json=body).json()["prompt"]
    assert '"name": "weather"' in prompt and "12:00" in prompt and '"arguments": {}' in prompt
