"""Structural tags: the strings that each format takes and refuses, as in xgrammar's documents."""

import pytest
from llguidance import LLMatcher, LLTokenizer

from torchax_serve.server.structural_tag import structural_tag_grammar

TOKENIZER = LLTokenizer("byte")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
J = {"type": "json_schema", "json_schema": SCHEMA}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(v):
    return {"type": "const_string", "value": v}


W, T = tag("<function=get_weather>", J, "</function>"), tag("<function=get_time>", J, "</function>")
CALL_W, CALL_T = '<function=get_weather>{"city": "Rome"}</function>', '<function=get_time>{"city": "Rome"}</function>'
ANY = {"type": "any_text"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<function="], "tags": [W, T]}
ITEMS = {"type": "tags_with_separator", "tags": [W, T], "separator": ","}
DISPATCH = {"type": "dispatch", "rules": [["<w>", J], ["<n>", const("5")]]}
CASES = [
    (const("Let's think."), ["Let's think."], ["Let's think", "x"]),
    (J, ['{"city": "Rome"}'], ['{"city": 1}', "{}", 'x{"city": "Rome"}']),
    ({"type": "grammar", "grammar": 'root ::= ("yes" | "no")'}, ["yes", "no"], ["maybe", "yesno", ""]),
    ({"type": "regex", "pattern": "[A-Z]{3}-[0-9]{4}"}, ["ABC-1234"], ["abc-1234", "ABC-12345"]),
    ({"type": "regex", "pattern": "a/b\\/c"}, ["a/b/c"], ["a/b"]),
    (ANY, ["", "a\nb </x>"], []),
    ({**ANY, "excludes": ["<function="]}, ["a <function", "x"], ["a <function=b"]),
    (
        tag("<think>", ANY, "</think>"),
        ["<think></think>", "<think>a < b\n</think>"],
        ["<think>a", "<think></think>x", "<think>a</think>b</think>", "x"],
    ),
    (
        tag("<r>", J, ["</response>", "</answer>"]),
        ['<r>{"city": "Rome"}</response>', '<r>{"city": "Rome"}</answer>'],
        ['<r>{"city": "Rome"}</r>'],
    ),
    (tag("<r>", {**ANY, "max_chars": 3}, "</r>"), ["<r>äöü</r>", "<r></r>"], ["<r>abcd</r>"]),
    (
        {"type": "sequence", "elements": [const("Answer: "), J]},
        ['Answer: {"city": "Rome"}'],
        ['{"city": "Rome"}', "Answer: "],
    ),
    (
        {
            "type": "sequence",
            "elements": [{"type": "regex", "pattern": "[0-9]+"}, const("5!"), {"type": "regex", "pattern": "x*"}],
        },
        ["15!", "155!xx"],
        ["5!", "1"],
    ),
    ({"type": "or", "elements": [const("yes"), const("no")]}, ["yes", "no"], ["", "yesno"]),
    (
        {"type": "sequence", "elements": [{"type": "optional", "content": const("a")}, const("b")]},
        ["ab", "b"],
        ["a", "aab"],
    ),
    (tag("<", {"type": "optional", "content": const("a")}, ">"), ["<>", "<a>"], ["<aa>"]),
    ({"type": "plus", "content": const("item")}, ["item", "itemitem"], ["", "ite"]),
    ({"type": "star", "content": const("x")}, ["", "xxx"], ["y"]),
    ({"type": "repeat", "min": 1, "max": 3, "content": const("item")}, ["item", "itemitemitem"], ["", "item" * 4]),
    ({"type": "repeat", "min": 2, "max": -1, "content": const("ab")}, ["abab", "ab" * 9], ["ab"]),
    (
        TRIGGERED,
        ["", "free", CALL_W, f"I call. {CALL_W} and {CALL_T}.", "a <function"],
        ["<function=", "<function=other>", "<function=get_weather>{}</function>"],
    ),
    ({**TRIGGERED, "at_least_one": True}, [CALL_W, f"{CALL_W} more {CALL_T} end"], ["", "free", f"free {CALL_W}"]),
    (
        {**TRIGGERED, "stop_after_first": True},
        [CALL_W, f"I call {CALL_W}", "free"],
        [f"{CALL_W} more", CALL_W + CALL_T],
    ),
    (
        {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
        [CALL_W, CALL_T],
        ["", f"free {CALL_W}", f"{CALL_W} more"],
    ),
    ({**TRIGGERED, "excludes": ["</end>"]}, [f"a {CALL_W} b"], [f"a </end> {CALL_W}", "a</end>"]),
    (tag("<a>", TRIGGERED, "</a>"), [f"<a>x{CALL_W}y</a>", "<a></a>"], [f"<a>x{CALL_W}y", "<a></a>x"]),
    (ITEMS, ["", CALL_W, f"{CALL_W},{CALL_T},{CALL_W}"], [f"{CALL_W},", f"{CALL_W}{CALL_T}", "x"]),
    ({**ITEMS, "at_least_one": True}, [CALL_W, f"{CALL_W},{CALL_T}"], [""]),
    ({**ITEMS, "stop_after_first": True}, ["", CALL_W], [f"{CALL_W},{CALL_T}"]),
    (DISPATCH, ["free", 'a <w>{"city": "Rome"} b <n>5', ""], ["<w>x", "<n>a"]),
    ({**DISPATCH, "loop": False}, ["free", "a<n>5"], ["a<n>5b"]),
    (
        {"type": "sequence", "elements": [tag("<think>", ANY, "</think>"), TRIGGERED]},
        [f"<think>hm</think>I {CALL_W}", "<think></think>"],
        ["I", f"<think>{CALL_W}"],
    ),
    (
        {"type": "sequence", "elements": [tag("<think>", ANY, "</think>"), J]},
        ['<think>hm</think>{"city": "Rome"}'],
        ["<think>hm</think>"],
    ),
]


def takes(grammar, text):
    """Whether a text follows a grammar, by a matcher over bytes."""
    matcher = LLMatcher(TOKENIZER, grammar)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = list(text.encode())
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(("form", "taken", "refused"), CASES, ids=range(len(CASES)))
def test_formats_take_their_texts_and_no_others(form, taken, refused):
    grammar = structural_tag_grammar({"type": "structural_tag", "format": form})
    assert {text: takes(grammar, text) for text in (*taken, *refused)} == {
        **dict.fromkeys(taken, True),
        **dict.fromkeys(refused, False),
    }


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "token", "token": 42}, "formats are texts, and token is one of tokens"),
        ({"type": "any_tokens"}, "any_tokens is one of tokens"),
        ({"type": "xml"}, "a format is one of const_string, .*, and got 'xml'"),
        ({"type": "const_string"}, "const_string has the field value"),
        ({"type": "const_string", "value": "a", "case": 1}, "const_string has no field 'case'"),
        ({**J, "style": "qwen_xml"}, 'json_schema.style is "json" here, and got qwen_xml'),
        ({**J, "any_order": True}, "json_schema.any_order is false here"),
        ({**ANY, "max_tokens": 5}, "any_text has no max_tokens here"),
        ({"type": "sequence", "elements": [ANY, const("x")]}, "any_text stands at the end of a tag or of the answer"),
        ({"type": "sequence", "elements": [TRIGGERED, const("x")]}, "triggered_tags stands at the end"),
        ({"type": "sequence", "elements": [{"type": "regex", "pattern": "a*"}, J]}, "a regex stands at the end"),
        ({"type": "star", "content": ANY}, "any_text stands at the end"),
        ({"type": "repeat", "min": 3, "max": 2, "content": J}, "repeat.min and max are"),
        (
            {**TRIGGERED, "triggers": ["<other>"]},
            "each tag begins with one trigger, and '<function=get_weather>' with 0",
        ),
        ({**TRIGGERED, "triggers": ["<", "<function"]}, "each tag begins with one trigger, .* with 2"),
        ({**TRIGGERED, "at_least_one": 1}, "triggered_tags.at_least_one is true or false"),
        (tag({"type": "token", "token": 1}, ANY, "x"), "tag.begin is a text"),
        (tag("a", ANY, ["</a>", "</a>b"]), "no tag.end is the beginning of another one"),
        (tag("a", {"type": "or", "elements": [const("x" * 200)] * 1024}, [f"{i:0128}" for i in range(16)]), "at most"),
        ("any_text", "a format is one of"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(form, message):
    with pytest.raises(ValueError, match=message):
        structural_tag_grammar({"type": "structural_tag", "format": form})


def test_formats_in_each_other_do_not_multiply():
    form = J
    for _ in range(12):
        form = {**TRIGGERED, "tags": [tag("<function=f>", form, "</function>")], "at_least_one": True}
    assert len(structural_tag_grammar({"format": form})) < 20_000
