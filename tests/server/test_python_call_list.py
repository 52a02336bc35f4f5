"""The reader of Python's lists of calls, compared with transformers' own where a release has one."""

import json
import random

import pytest
from transformers.utils.chat_parsing import content_parsers

from torchax_serve.server.python_call_list import MAX_DEPTH, calls_in

pytestmark = pytest.mark.fast
LISTS = [
    ("[]", []),
    ("[f()]", [("f", {})]),
    ('[get_weather(city="Paris", days=2)]', [("get_weather", {"city": "Paris", "days": 2})]),
    ("[a.b-c(x='it\\'s \"q\"', y=[1,-2.5e3,{}])]", [("a.b-c", {"x": 'it\'s "q"', "y": [1, -2500.0, {}]})]),
    ("[f(z={'k': [True,null,None,false]})]", [("f", {"z": {"k": [True, None, None, False]}})]),
    (' [ f ( x = "\\u00e4\\ud83d\\ude00\\n" ) , g() ] ', [("f", {"x": "ä😀\n"}), ("g", {})]),
]
OTHERS = [
    *("[f(1)]", "[f(x=1,)]", "[f(x=1)] x", "[f(x=1,x=2)]", "[f(x=01)]", "[f(x='a\nb')]", "[f(x=1)", "[,]", "f()"),
    *('[f(x="\\x41")]', '[f(x="\\ud800")]', '[f(x="\ud800")]', "[f(x=1e999)]", f"[f(x={2**53})]", "[f({'a': 1})]"),
    f"[f(x={'[' * (MAX_DEPTH + 1)}{']' * (MAX_DEPTH + 1)})]",
]


@pytest.mark.parametrize(("text", "expected"), LISTS)
def test_calls_with_named_arguments_are_read(text, expected):
    assert calls_in(text) == [{"name": name, "arguments": arguments} for name, arguments in expected]


@pytest.mark.parametrize("text", OTHERS, ids=json.dumps)
def test_what_is_no_list_of_calls_is_an_error(text):
    with pytest.raises(ValueError):
        calls_in(text)


def test_changed_texts_are_read_as_by_transformers():
    parser = getattr(content_parsers, "_python_call_list", calls_in)

    def read(function, text):
        try:
            return function(text, {})
        except ValueError:
            return None

    rng = random.Random(0)
    for _ in range(3000):
        text = list(rng.choice(LISTS)[0])
        for _ in range(rng.randint(0, 3)):
            place = rng.randrange(len(text) + 1)
            text[place : place + rng.randint(0, 1)] = rng.choice(["", *"[](){}=,:\"'\\ab1-.e \nu"])
        assert repr(read(calls_in, "".join(text))) == repr(read(parser, "".join(text))), text
