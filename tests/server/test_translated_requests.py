"""Requests of all interfaces as prompts and chats, without a server: fields, earlier calls, and contents refused."""

import types

import pytest
from test_call_arguments import Service

from model_adapters.errors import ChatTemplateError
from torchax_serve.server import chat, tokens
from torchax_serve.server.anthropic import translation as of_messages
from torchax_serve.server.anthropic.schemas import MessagesRequest
from torchax_serve.server.call_ids import replayed
from torchax_serve.server.dialect_requests import PASSED_ON, names_of_fields, note_unknown
from torchax_serve.server.errors import ApiError
from torchax_serve.server.model_service import ChatPrompt
from torchax_serve.server.options import RequestLimits, ServerOptions
from torchax_serve.server.prompt_limits import check_len
from torchax_serve.server.responses import translation as of_responses
from torchax_serve.server.responses.schemas import ResponsesRequest
from torchax_serve.server.schemas import ChatRequest
from torchax_serve.server.template_roles import with_one_system
from torchax_serve.server.tools import ToolPlan, plan_tools

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
IMAGE = {"type": "image", "url": "x"}


class Prompts(Service):
    """A service that writes down conversations; its template has neither tools nor calls."""

    family, special_ids, max_model_len = None, {"<s>": 1}, 16
    roles = types.SimpleNamespace(takes_users_in_a_row=True)

    def __init__(self, inputs=None):
        self.inputs, self.seen = inputs, []

    def chat_prompt(self, messages, options, *, is_cut):
        self.seen.append(messages)
        return ChatPrompt(list(range(10)), self.inputs)


@pytest.mark.parametrize("role", ["system", "developer", "user"])
@pytest.mark.parametrize("content", [5, {"a": 1}, ["a"], [5], [{"text": "a"}]])
def test_contents_that_are_none_are_refused_where_system_messages_are_merged(role, content):
    with pytest.raises(ApiError) as raised:
        with_one_system([USER, {"role": role, "content": content}, {"role": "system", "content": "a"}])
    assert (raised.value.status, raised.value.param.partition("[0]")[0]) == (400, "messages[1].content")
    assert "expected" in raised.value.message and "got" in raised.value.message


def test_an_image_of_a_system_message_is_refused_where_they_are_merged_and_one_of_the_user_is_not():
    with pytest.raises(ApiError, match=r"messages\[1\].content\[0\]: expected texts .* got 'image'; move it"):
        with_one_system([USER, {"role": "system", "content": [IMAGE]}])
    assert with_one_system([{"role": "user", "content": [IMAGE]}, {"role": "system", "content": "a"}]) == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [IMAGE]},
    ]


@pytest.mark.parametrize("content", ["I look.", [{"type": "text", "text": "I look."}]])
def test_earlier_calls_are_text_also_where_no_tools_may_be_called(content):
    messages = [
        USER,
        {"role": "assistant", "content": content, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "12:00"},
    ]
    service = Prompts()
    chat.render_chat(service, ChatRequest(messages=messages), ToolPlan())
    assert service.seen == [
        [
            USER,
            {"role": "assistant", "content": 'I look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'},
            {"role": "user", "content": "<tool_response>\n12:00\n</tool_response>"},
        ]
    ]
    service.seen.clear()
    chat.render_chat(service, ChatRequest(messages=[USER]), ToolPlan())
    assert service.seen == [[USER]]


@pytest.mark.parametrize(("side", "expected"), [("left", [7, 8, 9]), ("right", [0, 1, 2]), (None, [7, 8, 9])])
def test_a_rendered_prompt_is_cut_as_that_of_the_chat(side, expected):
    body = ChatRequest(messages=[USER], truncate_prompt_tokens=3, truncation_side=side)
    assert tokens._rendered(Prompts(), body) == chat.read_prompt(Prompts(), body, ToolPlan()).token_ids == expected
    room = ChatRequest(messages=[USER], truncate_prompt_tokens=-1, max_tokens=12)
    assert tokens._rendered(Prompts(), room) == [6, 7, 8, 9]  # of 16 tokens 12 are the answer's
    with pytest.raises(ApiError, match="truncate_prompt_tokens: expected null with images"):
        tokens._rendered(Prompts({"pixel_values": 1}), body)


def test_a_rendered_prompt_has_the_special_tokens_of_forced_calls(monkeypatch):
    seen = []
    monkeypatch.setattr(tokens, "plan_tools", lambda *args, template: seen.append(args[2]) or ToolPlan())
    tokens._rendered(Prompts(), ChatRequest(messages=[USER]))
    assert seen == [{"<s>": 1}]


def as_chat(route, **fields):
    if route == "/v1/messages":
        body = MessagesRequest.parse({"model": "m", "max_tokens": 3, "messages": [USER], **fields})
        return of_messages.chat_of(body, Prompts())
    return of_responses.chat_of(ResponsesRequest.parse({"model": "m", "input": "Hi", **fields}), Prompts())


GIVEN = {
    "seed": 3,
    "stop": ["x"],
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "structured_outputs": {"choice": ["a"]},
    "cache_salt": "s",
    "chat_template_kwargs": {"a": 1},
    "truncate_prompt_tokens": 5,
    "logit_bias": {"1": 2.0},
    "ignore_eos": True,
    "min_tokens": 2,
    "bad_words": ["b"],
}


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/responses"])
def test_fields_of_chats_that_change_answers_are_passed_on(route, monkeypatch):
    notes = []
    monkeypatch.setattr("torchax_serve.server.dialect_requests.note_once", notes.append)
    found = as_chat(route, **GIVEN, top_k=7)
    assert {name: getattr(found, name) for name in GIVEN} == GIVEN and found.top_k == 7
    kind, base = (
        (MessagesRequest, {"messages": [USER], "max_tokens": 3})
        if route == "/v1/messages"
        else (ResponsesRequest, {"input": "Hi"})
    )
    note_unknown(kind.parse({"model": "m", **base, **GIVEN, "made_up": 1, "n": 2}), route)
    assert [note.partition("'")[2].partition("'")[0] for note in notes] == ["made_up", "n"]
    assert as_chat(route, n=2).n is None  # these answers have no place for a second one
    with pytest.raises(ApiError, match="seed: expected a valid integer"):
        as_chat(route, seed="x")


def test_a_field_in_both_spellings_is_refused_unless_they_are_equal():
    with pytest.raises(ApiError, match="stop: expected none with the field of this interface"):
        as_chat("/v1/messages", stop=["a"], stop_sequences=["b"])
    assert as_chat("/v1/messages", stop=["a"], stop_sequences=["a"]).stop == ["a"]
    assert as_chat("/v1/responses", max_tokens=5).max_tokens == 5


def test_variables_of_a_template_are_joined(monkeypatch):
    monkeypatch.setattr(Prompts, "template", "enable_thinking")
    found = as_chat("/v1/messages", chat_template_kwargs={"a": 1}).chat_template_kwargs
    assert found == {"enable_thinking": False, "a": 1}
    found = as_chat("/v1/messages", chat_template_kwargs={"enable_thinking": True}).chat_template_kwargs
    assert found == {"enable_thinking": True}


def test_passed_fields_are_those_of_one_answers_sampling():
    assert {"seed", "top_k", "min_p", "stop", "logit_bias", "ignore_eos", "cache_salt"} <= PASSED_ON
    assert not PASSED_ON & {"n", "best_of", "messages", "model", "stream", "user", "prediction"}


def test_a_template_that_refuses_names_the_field_of_the_interface():
    with pytest.raises(ApiError) as raised, names_of_fields({"messages": "input"}):
        raise ChatTemplateError("the template refuses the conversation")
    assert (raised.value.status, raised.value.param) == (400, "input")


def test_an_image_of_a_system_message_is_refused():
    source = {"type": "url", "url": "https://example.org/a.png"}
    message = {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "image", "source": source}]}
    with pytest.raises(ApiError, match=r"messages\[1\].content: expected texts of a system message, got image_url"):
        as_chat("/v1/messages", messages=[USER, message])


@pytest.mark.parametrize("allowed", [{"function": "x"}, {"function": ["x"]}, {"function": 3}, "x", {}])
def test_allowed_tools_that_are_none_are_refused(allowed):
    tool = {"type": "function", "function": {"name": "x"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [allowed]}}
    with pytest.raises(ApiError, match="tool_choice: expected none, auto"):
        plan_tools(ChatRequest(messages=[USER], tools=[tool], tool_choice=choice), None)


def test_an_id_that_comes_again_is_that_of_the_later_call():
    def turn(name):
        call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": "{}"}}
        return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": ""}]

    found = replayed([*turn("f"), *turn("g")], "indexed")
    assert [message["tool_calls"][0]["id"] for message in found[::2]] == ["functions.f:0", "functions.g:1"]
    assert [message["tool_call_id"] for message in found[1::2]] == ["functions.f:0", "functions.g:1"]


def test_a_result_that_comes_late_has_the_id_of_its_call():
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in "fg"]
    results = [{"role": "tool", "tool_call_id": name, "content": ""} for name in "gf"]
    messages = [*({"role": "assistant", "tool_calls": [call]} for call in calls), *results]
    found = [message["tool_call_id"] for message in replayed(messages, "indexed")[2:]]
    assert found == ["functions.g:1", "functions.f:0"]


def test_reasoning_items_in_a_row_are_one_reasoning():
    items = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in "ab"]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    found = as_chat("/v1/responses", input=[{"role": "user", "content": "Hi"}, *items, call]).messages
    assert [message["role"] for message in found] == ["user", "assistant"]
    assert found[1]["reasoning_content"] == "a\n\nb" and found[1]["tool_calls"][0]["id"] == "c"


@pytest.mark.parametrize("fields", [{}, {"model": None}])
def test_a_response_need_not_name_a_model(fields):
    assert ResponsesRequest.parse({"input": "Hi", **fields}).model == ""


def test_an_answers_most_tokens_are_within_the_engines_integers():
    assert [chat._within_int(asked) for asked in (None, 5, 2**31 - 1, 2**31, 2**63)] == [None, 5, *[2**31 - 1] * 3]


def test_texts_beyond_the_model_are_read_where_they_are_cut_up_to_the_limit_of_texts():
    service = types.SimpleNamespace(
        max_model_len=4,
        model=types.SimpleNamespace(text_tokenizer=1),
        token_bytes=types.SimpleNamespace(max_token_chars=2),
        options=ServerOptions(request=RequestLimits(max_text_bytes=20)),
    )
    check_len(service, ["a" * 8], "messages", is_cut=False)
    with pytest.raises(ApiError, match="maximum context length is 4 tokens"):
        check_len(service, ["a" * 9], "messages", is_cut=False)
    check_len(service, ["a" * 10, "b" * 10], "messages", is_cut=True)
    with pytest.raises(ApiError, match="messages: expected texts of at most 20 bytes in UTF-8, got 21"):
        check_len(service, ["a" * 10, "b" * 11], "messages", is_cut=True)
