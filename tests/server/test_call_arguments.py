"""Arguments of calls as values, and the ids and the order of calls in both interfaces, without a server."""

import asyncio
import json
import re

import pytest
from starlette.responses import JSONResponse

from torchax_serve.server.anthropic.answer import MessageAnswer
from torchax_serve.server.anthropic.schemas import CountTokensRequest
from torchax_serve.server.anthropic.translation import chat_of
from torchax_serve.server.call_arguments import input_of
from torchax_serve.server.json_scanner import JsonScanner
from torchax_serve.server.messages import plain_messages
from torchax_serve.server.parsed_message import ParsedStep
from torchax_serve.server.response_families import FAMILIES
from torchax_serve.server.response_parsing import AnswerParser
from torchax_serve.server.responses.answer import ResponseAnswer
from torchax_serve.server.responses.schemas import ResponsesRequest
from torchax_serve.server.responses.translation import LOGPROBS
from torchax_serve.server.schemas import ChatRequest
from torchax_serve.text.text_stream import AnswerStep

BY_NAME = {family.name: family for family in FAMILIES}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
PIECES = ('<tool_call>\n{"name": "f", "arguments": {"a": "x', 'y"}}\n</tool_call>\nDone.')


class Service:
    """What a translation asks of a model's service."""

    template = ""
    token_bytes = None

    class model:
        request_defaults = None


class Numbers:
    """Log-probabilities by the numbers of their steps."""

    @staticmethod
    def chat(logprobs, num_top):
        return list(logprobs)


class Responses:
    is_on = False

    @staticmethod
    def begin(key, name, cancel):
        pass

    @staticmethod
    def end(key, name):
        pass


class Metrics:
    def step(self, answer, step):
        pass


class Context:
    metrics, responses = Metrics(), Responses


class FinishedAnswer:
    """An answer whose steps are texts."""

    num_cached_tokens, num_tokens, prompt_ids, prompt_logprobs = 0, 1, (1,), None

    def __init__(self, texts):
        self._texts = texts

    async def __aiter__(self):
        for index, text in enumerate(self._texts):
            is_last = index == len(self._texts) - 1
            yield AnswerStep(text, (index,), (index,), finish_reason="stop" if is_last else None)


def message_of(texts, family="hermes"):
    parser = AnswerParser(BY_NAME[family], "", TOOLS)
    answer = MessageAnswer(Context, ChatRequest(messages=[], max_tokens=9), ([FinishedAnswer(texts)], [parser]))
    return asyncio.run(answer.complete())


def test_the_rest_of_a_call_is_in_front_of_the_text_behind_it():
    call, text = message_of(PIECES)["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"a": "xy"})
    assert (text["type"], text["text"]) == ("text", "Done.")


def test_pieces_are_apart_where_a_call_begins():
    more, first, second = ({"index": 0}, {"index": 1, "id": "a"}, {"index": 1})
    assert ParsedStep(tool_calls=[more, first, second]).pieces() == ([more], [first, second])
    assert ParsedStep(tool_calls=[more]).pieces() == ([more], [])
    assert ParsedStep(tool_calls=[first, second]).pieces() == ([], [first, second])
    assert ParsedStep().pieces() == ([], [])


@pytest.mark.parametrize("family", ["kimi", "mistral", "hermes"])
def test_ids_come_back_as_the_model_wrote_them(family):
    written = {"kimi": "functions.f:0", "mistral": "Abc123xyz", "hermes": None}[family]
    answer = {
        "kimi": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "mistral": "[TOOL_CALLS]f[CALL_ID]Abc123xyz[ARGS]{}",
        "hermes": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    }[family]
    (use,) = message_of([answer], family)["content"]
    assert re.fullmatch(r"toolu_\S+", use["id"])
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "a"}
    messages = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    found = chat_of(CountTokensRequest.parse({"model": "m", "messages": messages}), Service).messages
    (call,) = found[0]["tool_calls"]
    assert call["id"] == found[1]["tool_call_id"]
    assert call["id"] == (use["id"].removeprefix("toolu_") if written is None else written)


def test_a_prefix_is_an_id_where_nothing_is_behind_it():
    use = {"type": "tool_use", "id": "toolu_", "name": "f", "input": {}}
    body = CountTokensRequest.parse({"model": "m", "messages": [{"role": "assistant", "content": [use]}]})
    assert chat_of(body, Service).messages[0]["tool_calls"][0]["id"] == "toolu_"


DEEP = '{"a": ' + "[" * 205 + "]" * 205 + "}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ('{"a": 1, "b": [tru', {"a": 1, "b": []}),
        ('{"a": "\\ud800", "\\udfff": 1}', {"a": "\ufffd", "\ufffd": 1}),
        ('{"a": "\\ud83e\\udd8a", "b": "\\\\ud800"}', {"a": "🦊", "b": "\\ud800"}),
        ('{"a": 1e999, "b": [-1e999, 1.5]}', {"a": "Infinity", "b": ["-Infinity", 1.5]}),
        (DEEP, json.loads(DEEP)),
        ("[1]", {"arguments": [1]}),
        ('{"a": ' + "9" * 5000 + "}", None),
        ('{"a": ' + "[" * 100_000, None),
        ("not JSON", None),
    ],
)
def test_arguments_are_a_value_that_an_answer_can_have(text, expected):
    """Those that no parser reads are shown as they are."""
    found = input_of(text)
    assert found == ({"arguments": text} if expected is None else expected)
    assert JSONResponse(found).body


def test_what_the_scanner_takes_is_an_answer():
    for arguments in (DEEP, '{"a": "\\ud800"}', '{"a": 1e999}'):
        scanner = JsonScanner()
        list(scanner.scan(arguments))
        assert scanner.is_complete
        (use,) = message_of(['<tool_call>\n{"name": "f", "arguments": ' + arguments + "}\n</tool_call>"])["content"]
        assert use["name"] == "f" and list(use["input"]) == ["a"] and JSONResponse(use).body


def test_log_probabilities_of_tokens_whose_text_comes_later():
    """They are in front of those of the next text; those of reasoning and of calls are in no message."""
    texts = [
        "<think>",
        "x",
        "",
        "</think>",
        "",
        "A",
        "",
        "B",
        '<tool_call>{"name": "f", "arguments": {}}',
        "",
        "</tool_call>",
    ]
    body = ResponsesRequest.parse({"model": "m", "input": "x", "include": [LOGPROBS]})
    parser = AnswerParser(BY_NAME["hermes"], "", TOOLS)
    answer = ResponseAnswer(Context, Service, body, ([FinishedAnswer(texts)], [parser]))
    answer._format = Numbers
    items = asyncio.run(answer.complete())["output"]
    assert [item["content"][0]["logprobs"] for item in items if item["type"] == "message"] == [[4, 5, 6, 7]]


def test_items_without_an_id_have_one_where_they_are_stored(monkeypatch):
    stored = []
    monkeypatch.setattr(Responses, "is_on", True)
    monkeypatch.setattr(Responses, "put", lambda self, key, shown, given, items: stored.extend(given), raising=False)
    monkeypatch.setattr(Context, "responses", Responses())
    items = [{"role": "user", "content": "x", "id": id_} for id_ in (None, "mine")]
    body = ResponsesRequest.parse({"model": "m", "input": [*items, {"role": "user", "content": "x"}]})
    parser = AnswerParser(BY_NAME["hermes"], "", TOOLS)
    asyncio.run(ResponseAnswer(Context, Service, body, ([FinishedAnswer(["A"])], [parser])).complete())
    assert [bool(re.fullmatch("item_[0-9a-f]{32}", item["id"])) for item in stored] == [True, False, True]
    assert stored[1]["id"] == "mine"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"city": "Rome", "days": ', {"city": "Rome"}),
        ("no JSON", {"arguments": "no JSON"}),
        ('["Rome", 1]', {"arguments": ["Rome", 1]}),
        ('"Rome"', {"arguments": "Rome"}),
        ("3", {"arguments": 3}),
        ("null", {}),
        ('"{\\"city\\": \\"Rome\\"}"', {"city": "Rome"}),
        ('{"city": "Rome"}', {"city": "Rome"}),
        ("", {}),
        (None, {}),
        ({"city": "Rome"}, {"city": "Rome"}),
    ],
)
def test_templates_that_read_names_get_an_object(written, expected):
    """Clients send back a call that was cut; a template that walks through its arguments would raise."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": written}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    (found,) = plain_messages(messages, "{{ m.tool_calls }}", reads_names=True)[0]["tool_calls"]
    arguments = found["function"]["arguments"]
    assert (json.loads(arguments) if isinstance(arguments, str) else arguments) == expected
    (other,) = plain_messages(messages, "{{ m.tool_calls }}")[0]["tool_calls"]
    given = other["function"]["arguments"]
    assert given == written or json.loads(given) in (expected, written)
