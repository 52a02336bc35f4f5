"""Answers of gpt-oss by openai-harmony: those of its own parser, cut anywhere; what is not in the format is content."""

import json
import random
import sys
import time
from types import SimpleNamespace

import pytest
from test_response_parsing import ARGUMENTS, JSON, TRANSCRIPTS, cuts

from torchax_serve.server import harmony
from torchax_serve.server.harmony import HarmonyParser, load_encoding
from torchax_serve.server.model_service import ModelService
from torchax_serve.server.options import ServerOptions
from torchax_serve.server.parsed_message import joined_calls
from torchax_serve.server.response_families import response_template_for

OWN = [each[1:] for each in TRANSCRIPTS if each[0] == "gpt-oss"]
"""(prompt, answer, content, reasoning, calls)."""
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>"
TO_A = "<|channel|>commentary to=functions.a<|message|>"
MESSAGES = [
    "<|channel|>analysis<|message|>Hm, 🦊 and é.<|end|>",
    "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>",
    f"<|start|>assistant{CALL}",
    "<|start|>assistant to=functions.clock<|channel|>commentary json<|message|>{}<|call|>",
    "<|start|>assistant<|channel|>final<|message|>42 < 43<|return|>",
]


@pytest.fixture(scope="module")
def encoding():
    pytest.importorskip("openai_harmony", reason="needs openai-harmony, an optional package")
    found = load_encoding()
    if found is None:
        pytest.skip("needs the vocabulary of gpt-oss: TIKTOKEN_ENCODINGS_BASE, or a network")
    return found


def parsed(encoding, prompt, pieces, **options):
    parser = HarmonyParser(encoding, prompt, **{"reads_tools": True, **options})
    steps = [*map(parser.push, pieces), parser.flush()]
    functions = [call["function"] for call in joined_calls(steps)]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return ["".join(step.content for step in steps), "".join(step.reasoning for step in steps), calls]


@pytest.mark.parametrize("transcript", OWN)
def test_transcripts(encoding, transcript):
    prompt, answer, content, reasoning, calls = transcript
    rng = random.Random(answer)
    for pieces in ([answer], list(answer), *(cuts(answer, rng) for _ in range(30))):
        found = parsed(encoding, prompt, pieces)
        found[2] = [(name, json.loads(arguments)) for name, arguments in found[2]]
        assert found == [content, reasoning, calls]


def test_messages_are_those_of_the_package(encoding):
    import openai_harmony

    answer = "".join(MESSAGES)
    tokens = encoding.encode(answer, allowed_special="all")
    messages = encoding.parse_messages_from_completion_tokens(tokens, openai_harmony.Role.ASSISTANT)
    texts = [(each.channel, each.recipient or "", each.content[0].text) for each in messages]
    content = "".join(text for channel, recipient, text in texts if channel != "analysis" and not recipient)
    reasoning = "".join(text for channel, _, text in texts if channel == "analysis")
    calls = [(to.removeprefix("functions."), text) for _, to, text in texts if to]
    assert (len(calls), reasoning) == (2, "Hm, 🦊 and é.")
    assert parsed(encoding, "<|start|>assistant", list(answer)) == [content, reasoning, calls]


def test_arguments_come_in_pieces(encoding):
    parser = HarmonyParser(encoding, "<|start|>assistant", reads_tools=True)
    pieces = [piece for step in [*map(parser.push, CALL), parser.flush()] for piece in step.tool_calls]
    assert len(pieces) > 4 and "id" in pieces[0] and not any("id" in piece for piece in pieces[1:])
    assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == ARGUMENTS
    assert parser.has_complete_calls


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Just text.", ["Just text.", "", []]),
        ("Just text.<|end|>", ["Just text.", "", []]),
        ("<|channel|>final<|message|>42<|return|>\nmore <|message|>", ["42\nmore <|message|>", "", []]),
        ("<|channel|>final<|message|>a <|channel|> b", ["a <|channel|> b", "", []]),
        ("<|channel|>analysis<|message|>Hm", ["", "Hm", []]),
        (
            "<|channel|>commentary to=functions.a<|message|>no",
            ["<|channel|>commentary to=functions.a<|message|>no", "", []],
        ),
        (f"{TO_A}<|call|>", ["", "", [("a", "{}")]]),
        (
            "<|channel|>commentary to=functions.a<|message|>",
            ["<|channel|>commentary to=functions.a<|message|>", "", []],
        ),
        (TO_A + '{"b": "c', ["", "", [("a", '{"b": "c')]]),
        (TO_A + '{"b": 1} x<|call|>', ["x", "", [("a", '{"b": 1}')]]),
        ("", ["", "", []]),
    ],
)
def test_what_is_not_in_the_format_is_content(encoding, answer, expected):
    assert parsed(encoding, "<|start|>assistant", [answer]) == expected
    assert parsed(encoding, "<|start|>assistant", list(answer)) == expected


def test_random_texts_raise_nothing_and_do_not_depend_on_cuts(encoding):
    rng = random.Random(0)
    text = "".join(MESSAGES)
    parts = [text[start : start + rng.randint(1, 30)] for start in rng.sample(range(len(text)), 40)]
    parts += ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<", "{", '"', "é", "\n"]
    for _ in range(80):
        answer = "".join(rng.choice(parts) for _ in range(rng.randint(1, 15)))
        whole = parsed(encoding, "<|start|>assistant", [answer])
        for pieces in (list(answer), cuts(answer, rng)):
            assert parsed(encoding, "<|start|>assistant", pieces) == whole


def test_begun_answers_limits_and_requests_without_tools(encoding):
    assert parsed(encoding, "<|start|>assistant<|channel|>analysis<|message|>", ["Hm"]) == ["", "Hm", []]
    two = f"{CALL}<|start|>assistant{CALL}"
    assert len(parsed(encoding, "<|start|>assistant", [two])[2]) == 2
    assert len(parsed(encoding, "<|start|>assistant", [two], max_tool_calls=1)[2]) == 1
    assert parsed(encoding, "<|start|>assistant", [CALL], reads_tools=False) == [JSON, "", []]


@pytest.mark.parametrize("piece", ["some words ", "<|channel|>", "<|end|>"])
def test_time_is_linear_in_the_length(encoding, piece):
    def seconds(num_pieces):
        began = time.process_time()
        parsed(encoding, "<|start|>assistant", ["<|channel|>final<|message|>", *[piece] * num_pieces])
        return time.process_time() - began

    seconds(250)
    short, long = seconds(1_000), seconds(8_000)
    assert long < 24 * short


class Template:
    chat_template = "<|channel|> <|message|>"
    response_template = None


def test_the_package_is_used_where_it_is_installed(encoding):
    service = ModelService(SimpleNamespace(name="gpt-oss", tokenizer=Template()), ServerOptions())
    assert service.harmony.name == encoding.name
    Template.chat_template, other = "<tool_call>", Template.chat_template
    try:
        assert ModelService(SimpleNamespace(name="qwen", tokenizer=Template()), ServerOptions()).harmony is None
    finally:
        Template.chat_template = other


def test_without_the_package_the_log_says_so(monkeypatch, caplog):
    caplog.set_level("INFO", "torchax_serve.server")
    monkeypatch.setattr(harmony.importlib.util, "find_spec", lambda name: None)
    assert load_encoding() is None
    assert "pip install openai-harmony" in caplog.text

    def load(name):
        raise RuntimeError("no network")

    names = SimpleNamespace(HARMONY_GPT_OSS="name")
    fake = SimpleNamespace(load_harmony_encoding=load, HarmonyError=RuntimeError, HarmonyEncodingName=names)
    monkeypatch.setattr(harmony.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "openai_harmony", fake)
    assert load_encoding() is None
    assert "TIKTOKEN_ENCODINGS_BASE" in caplog.text
    assert response_template_for(Template).is_harmony
