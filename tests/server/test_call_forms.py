"""Answers held to tool calls: the grammar of each family takes what its models write, and what it takes parses."""

# ruff: noqa: RUF001
import json
import random
import re

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchax_serve.sampling.grammar import GrammarCompiler
from torchax_serve.server.call_forms import call_grammar
from torchax_serve.server.errors import ApiError
from torchax_serve.server.parsed_message import joined_calls
from torchax_serve.server.response_families import FAMILIES
from torchax_serve.server.response_parsing import AnswerParser

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["°C", "°F"]},
        "hours": {"$ref": "#/$defs/hours"},
    },
    "required": ["days", "unit"],
    "additionalProperties": False,
    "$defs": {"hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
CLOSED = {key: value for key, value in PARAMETERS["properties"].items() if key != "city"}
FINITE = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS | {"properties": CLOSED}}}]
ARGUMENTS = {"city": "Łódź: ü", "days": 3, "unit": "°C"}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
SPECIAL = ["<eos>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"]
SPECIAL += ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"]
SPECIAL += ["<|tool_call_argument_begin|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"]
SPECIAL += ["<|START_ACTION|>", "<|END_ACTION|>", "<minimax:tool_call>", "</minimax:tool_call>"]
SPECIAL += ["<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|tool_call>", "<tool_call|>", '<|"|>']
SPECIAL += ["<|tool_call_start|>", "<|tool_calls|>", "<|calls|>", "<|open|>", "<|close|>", "<|sep|>", "｜DSML｜"]
SPECIAL += [f"<|tool_call:{part}|>" for part in ("begin", "end", "name", "args", "start")]
SPECIAL += [f"<|tool_arg:{part}|>" for part in ("start", "value", "end")]
SPECIAL += [f"<{slash}{part}:opensource>" for slash in ("", "/") for part in ("tool_call", "arg_key", "arg_value")]
SPECIAL += ["<tool_sep:opensource>", "<|tools_prefix|>", "<|tools_suffix|>", "<start_function_call>", "<escape>"]
XML = (
    "<parameter=city>\nŁódź: ü\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=unit>\n°C\n</parameter>\n"
    "</function>\n</tool_call>"
)
SEED = "<parameter=city>Łódź: ü</parameter>\n<parameter=days>3</parameter>\n<parameter=unit>°C</parameter>\n"
INVOKED = re.sub("<parameter=(.*?)>", r'<parameter name="\1">', SEED)
GEMMA = '{city:<|"|>Łódź: ü<|"|>,days:3,unit:<|"|>°C<|"|>}'
HY = (
    "<tool_call~>weather<tool_sep~>\n<arg_key~>city</arg_key~>\n<arg_value~>Łódź: ü</arg_value~>\n<arg_key~>days"
    "</arg_key~>\n<arg_value~>3</arg_value~>\n<arg_key~>unit</arg_key~>\n<arg_value~>°C</arg_value~>\n</tool_call~>\n"
)
HY_CLOCK = "<tool_call~>clock<tool_sep~>\n</tool_call~>\n"
DSML = '<｜DSML｜invoke name="weather">\n' + "".join(
    f'<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>\n'
    for key, is_text, value in (("city", "true", "Łódź: ü"), ("days", "false", 3), ("unit", "true", "°C"))
)
DSML += "</｜DSML｜invoke>"
K3 = '<|open|>call tool="weather" index="1"<|sep|>' + "".join(
    f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
    for key, kind, value in (("city", "string", "Łódź: ü"), ("days", "number", 3), ("unit", "string", "°C"))
)
K3 += "<|close|>call<|sep|>"
K3_CLOCK = '<|open|>call tool="clock" index="2"<|sep|><|close|>call<|sep|>'
SOLAR2 = "<|tool_call:start|>weather\n" + "".join(
    f"<|tool_arg:start|>{key}<|tool_arg:value|>{value}<|tool_arg:end|>\n"
    for key, value in (("city", "Łódź: ü"), ("days", 3), ("unit", "°C"))
)
SOLAR2 += "<|tool_call:end|>"
SOLAR = f"<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>weather<|tool_call:args|>{JSON}<|tool_call:end|>"
MINICPM = SEED.replace("<parameter=", '<param name="').replace(">Ł", '">Ł').replace(">3", '">3').replace(">°", '">°')
MINICPM = f'<function name="weather">{MINICPM.replace("</parameter>" + chr(10), "</param>")}</function>'
PYTHON = "weather(city='Łódź: ü', days=3, unit=\"°C\")"
FUNCTION = GEMMA.replace('<|"|>', "<escape>")
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Łódź: ü</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>°C</arg_value>\n</tool_call>"
)

M3 = "".join(
    f"]<]minimax[>[<{key}>{value}]<]minimax[>[</{key}>"
    for key, value in (("city", "Łódź: ü"), ("days", 3), ("unit", "°C"))
)
M3 = f']<]minimax[>[<invoke name="weather">{M3}]<]minimax[>[</invoke>\n'
M3_CLOCK = ']<]minimax[>[<invoke name="clock">]<]minimax[>[</invoke>\n'

# What models of a family write: a call, and two where there may be several.
ANSWERS = {
    "gpt-oss": [f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>"],
    "kimi": [
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{JSON}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ],
    "deepseek": [
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>"
        f"\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ],
    "deepseek-v3.1": [
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock"
        "<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ],
    "gemma4": [
        f"<|tool_call>call:weather{GEMMA}<tool_call|>",
        f"<|tool_call>call:weather{GEMMA}<tool_call|><|tool_call>call:clock{{}}<tool_call|>",
    ],
    "cohere": [
        f'<|START_ACTION|>[\n    {{"tool_name": "weather", "parameters": {JSON}}}\n]<|END_ACTION|>',
        f'<|START_ACTION|>[\n    {{"tool_name": "weather", "parameters": {JSON}}},\n    {{"tool_name": "clock", '
        '"parameters": {}}\n]<|END_ACTION|>',
    ],
    "minimax": [
        f'<minimax:tool_call>\n<invoke name="weather">\n{INVOKED}</invoke>\n</minimax:tool_call>',
        f'<minimax:tool_call>\n<invoke name="weather">\n{INVOKED}</invoke>\n<invoke name="clock">\n</invoke>\n'
        "</minimax:tool_call>",
    ],
    "minimax-m3": [f"]<]minimax[>[<tool_call>\n{calls}]<]minimax[>[</tool_call>" for calls in (M3, M3 + M3_CLOCK)],
    "tool-calls": [
        f'<tool_calls>[{{"name": "weather", "arguments": {JSON}}}]</tool_calls>',
        f'<tool_calls>[{{"name": "weather", "arguments": {JSON}}}, {{"name": "clock", "arguments": {{}}}}]'
        "</tool_calls>",
    ],
    "seed-oss": [
        f"<seed:tool_call>\n<function=weather>\n{SEED}</function>\n</seed:tool_call>",
        f"<seed:tool_call>\n<function=weather>\n{SEED}</function>\n</seed:tool_call>\n<seed:tool_call>\n"
        "<function=clock>\n</function>\n</seed:tool_call>",
    ],
    **{
        family: [
            f"<｜DSML｜{around}>\n{DSML}\n</｜DSML｜{around}>",
            f'<｜DSML｜{around}>\n{DSML}\n<｜DSML｜invoke name="clock">\n</｜DSML｜invoke>\n</｜DSML｜{around}>',
        ]
        for family, around in (("deepseek-dsml", "function_calls"), ("deepseek-v4", "tool_calls"))
    },
    **{
        family: [f"<tool_calls~>\n{calls}</tool_calls~>".replace("~", suffix) for calls in (HY, HY + HY_CLOCK)]
        for family, suffix in (("hunyuan3", ":opensource"), ("hunyuan3-preview", ""))
    },
    "kimi-k3": [f"<|open|>tools<|sep|>{calls}<|close|>tools<|sep|>" for calls in (K3, K3 + K3_CLOCK)],
    "solar-open": [f"<|tool_calls|>{SOLAR}<|calls|>"],
    "solar-open2": [SOLAR2, f"{SOLAR2}\n<|tool_call:start|>clock\n<|tool_call:end|>"],
    "minicpm5": [MINICPM, f'{MINICPM}\n<function name="clock"></function>'],
    "minicpm3": [
        f"<|tool_call_start|>\n```python\n{calls.replace(', ', ',')}\n```\n<|tool_call_end|>"
        for calls in (PYTHON, f"{PYTHON}\nclock()")
    ],
    **{
        family: [f"<|tool_call_start|>[{calls}]<|tool_call_end|>" for calls in (PYTHON, f"{PYTHON}, clock()")]
        for family in ("lfm2", "lfm2.5")
    },
    "functiongemma": [
        f"<start_function_call>call:weather{FUNCTION}<end_function_call>",
        f"<start_function_call>call:weather{FUNCTION}<end_function_call><start_function_call>call:clock{{}}"
        "<end_function_call>",
    ],
    "functionary": [f"weather\n{JSON}", f"weather\n{JSON}>>>clock\n{{}}"],
    "apertus": [
        f'<|tools_prefix|>[{{"weather": {JSON}}}]<|tools_suffix|>',
        f'<|tools_prefix|>[{{"weather": {JSON}}}, {{"clock": {{}}}}]<|tools_suffix|>',
    ],
    "glm": [GLM, f"{GLM}\n<tool_call>clock\n</tool_call>"],
    "qwen-xml": [
        f"<tool_call>\n<function=weather>\n{XML}",
        f"<tool_call>\n<function=weather>\n{XML}\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    ],
    "hermes": [
        f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>',
        f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>\n<tool_call>\n{{"name": "clock", '
        '"arguments": {}}\n</tool_call>',
    ],
    "mistral": [f"[TOOL_CALLS]weather[ARGS]{JSON}", f"[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]clock[ARGS]{{}}"],
    "mistral-list": [
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}}}]',
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}}}, {{"name": "clock", "arguments": {{}}}}]',
    ],
    "llama": [f'{{"name": "weather", "parameters": {JSON}}}'],
    "llama4": [f'{{"name": "weather", "parameters": {JSON}}}'],
}
PROMPTS = {"functionary": "<|start_header_id|>assistant<|end_header_id|>\n\n>>>"}
LEADS = {"functionary": ("all\n", ">>>")}
"""Texts in front of an answer's text, and between it and a call, where there are some."""
FORMS = {family.name: family for family in FAMILIES if family.call is not None}


def tokenizer_with(special):
    backend = Tokenizer(models.BPE({char: index for index, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_with(SPECIAL)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def masks_of(compiler, tokenizer, family, tools=TOOLS, *, is_forced=True, max_calls=None):
    special = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    grammar = call_grammar(FORMS[family].call, tools, special, is_forced=is_forced, max_calls=max_calls)
    return compiler.masks(grammar)()


def allowed(masks, output_ids, vocab_size):
    words = np.full(-(-vocab_size // 32), -1, np.int32)
    masks.fill(words, output_ids)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
    return np.flatnonzero(bits).tolist()


def takes(masks, tokenizer, text):
    """Whether an answer may be written, and end."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for position, token in enumerate([*ids, tokenizer.eos_token_id]):
        if token not in allowed(masks, ids[:position], len(tokenizer)):
            return False
    return True


def calls_of(family, text, tools=TOOLS):
    parser = AnswerParser(FORMS[family], PROMPTS.get(family, ""), tools)
    steps = [parser.push(text), parser.flush()]
    assert "".join(step.content + step.reasoning for step in steps).strip() == ""
    found = [call["function"] for call in joined_calls(steps)]
    return [(call["name"], json.loads(call["arguments"])) for call in found]


def test_every_form_has_answers():
    assert set(ANSWERS) == set(FORMS)


@pytest.mark.parametrize("family", sorted(FORMS))
def test_what_models_write_is_taken(compiler, tokenizer, family):
    for number, text in enumerate(ANSWERS[family]):
        assert takes(masks_of(compiler, tokenizer, family), tokenizer, text)
        found = calls_of(family, text)
        assert found[0] == ("weather", ARGUMENTS) and all(call == ("clock", {}) for call in found[1:])
        is_single = len(found) == 1
        assert takes(masks_of(compiler, tokenizer, family, max_calls=1), tokenizer, text) == is_single, number
        for wrong in (text.replace("3", "30"), text.replace("°C", "K"), text.replace("weather", "other"), "Hi"):
            assert not takes(masks_of(compiler, tokenizer, family), tokenizer, wrong), wrong


@pytest.mark.parametrize("family", sorted(FORMS))
def test_strict_calls_stand_in_free_text(compiler, tokenizer, family):
    text = ANSWERS[family][0]
    begin, between = LEADS.get(family, ("", ""))
    lead = "" if family.startswith("llama") else f"{begin}I look it up.\n{between}"
    masks = masks_of(compiler, tokenizer, family, is_forced=False)
    assert takes(masks, tokenizer, lead + text)
    assert takes(masks_of(compiler, tokenizer, family, is_forced=False), tokenizer, f"{begin}Just a text.")
    wrong = text.replace("°C", "K")
    assert not takes(masks_of(compiler, tokenizer, family, is_forced=False), tokenizer, lead + wrong)


@pytest.mark.parametrize("family", sorted(FORMS))
def test_whatever_is_sampled_parses(compiler, tokenizer, family):
    rng = random.Random(family)
    for _ in range(5):
        masks, ids = masks_of(compiler, tokenizer, family, FINITE, max_calls=1), []
        while len(ids) < 500:
            token = rng.choice(allowed(masks, ids, len(tokenizer)))
            if token == tokenizer.eos_token_id:
                break
            ids.append(token)
        ((name, arguments),) = calls_of(family, tokenizer.decode(ids), FINITE)
        assert name == "weather" and set(arguments) <= set(CLOSED)
        assert 1 <= arguments["days"] <= 9 and arguments["unit"] in ("°C", "°F")


NESTED = {
    "type": "object",
    "properties": {
        "zone": {"anyOf": [{"type": "string", "pattern": "^[A-Z]{3}$"}, {"type": "null"}]},
        "Area": {"type": ["integer", "string"], "minimum": 3, "maximum": 5, "maxLength": 4},
        "tree": {"$ref": "#/$defs/node"},
        "tags": {"type": "array", "items": {"enum": ["a<b", 'c"d', 7, True, None]}, "minItems": 1, "maxItems": 3},
        "none": {"type": "array", "items": {"type": "string"}, "maxItems": 0},
        "by_name": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "text": {"type": "string", "description": "Anything."},
    },
    "required": ["tags", "Area"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"size": {"type": "number"}, "child": {"$ref": "#/$defs/node"}},
            "required": ["size"],
        }
    },
}


TAGGED = {
    "zone": {"type": "string", "pattern": "^[A-Z]{3}$"},
    "Area": {"type": "integer", "minimum": 3, "maximum": 5},
    "tags": {"type": "array", "items": {"enum": ["a<b", 'c"d', 7]}, "minItems": 1, "maxItems": 3},
}
"""Properties of one type each: that of a text of two types is told by the text."""


def sampled_arguments(family, schema, special, ends, share, max_tokens):
    """Yields the arguments of 25 sampled calls of a function; tokens that begin like one of `ends` are more likely."""
    tokenizer = tokenizer_with(special)
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    tools = [{"type": "function", "function": {"name": "f-1", "parameters": schema}}]
    ids_of = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    rng = random.Random(5)
    masks_for = compiler.masks(call_grammar(FORMS[family].call, tools, ids_of, is_forced=True, max_calls=1))
    for _ in range(25):
        masks, ids = masks_for(), []
        while len(ids) < max_tokens:
            tokens = allowed(masks, ids, len(tokenizer))
            ending = [token for token in tokens if tokenizer.decode([token]).startswith(ends)]
            token = rng.choice(ending if ending and rng.random() < share else tokens)
            if token == tokenizer.eos_token_id:
                ((name, arguments),) = calls_of(family, tokenizer.decode(ids), tools)
                assert name == "f-1"
                yield arguments
                break
            ids.append(token)


@pytest.mark.parametrize("is_special", [True, False])
def test_whatever_is_sampled_of_gemma_follows_the_schema(is_special):
    special, keys = [each for each in SPECIAL if is_special or each != '<|"|>'], set()
    for arguments in sampled_arguments("gemma4", NESTED, special, ('<|"|>', "}", "]", "<", "|", '"', ">"), 0.4, 400):
        keys |= arguments.keys()
        jsonschema.validate(arguments, NESTED)
    assert len(keys) > 4


def test_whatever_is_sampled_of_nested_tags_follows_the_schema():
    schema, keys = {**NESTED, "properties": {**NESTED["properties"], **TAGGED}}, set()
    special = [*SPECIAL, "]<]minimax[>["]
    for arguments in sampled_arguments("minimax-m3", schema, special, ("]", "/"), 0.6, 900):
        keys |= arguments.keys()
        jsonschema.validate(arguments, schema)
    assert len(keys) > 4


@pytest.mark.parametrize("family", sorted(FORMS))
def test_numbers_are_those_that_were_written(family):
    schema = {**PARAMETERS, "properties": {**PARAMETERS["properties"], "days": {"type": "number"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}, *TOOLS[1:]]
    for written, value in [("12345678901234567890123", 12345678901234567890123), ("-2.5E+777", float("-inf"))]:
        if family in ("lfm2", "lfm2.5", "minicpm3") and isinstance(value, float):
            continue  # Python has no such number: the call is text
        text = ANSWERS[family][0].replace("3", written)
        assert calls_of(family, text, tools)[0] == ("weather", {**ARGUMENTS, "days": value})


@pytest.mark.parametrize(
    "written, value", [("5", 5), ("3e999", float("inf")), ("NaN", "NaN"), ("-Infinity", "-Infinity")]
)
def test_numbers_of_nested_tags(written, value):
    node = {"type": "object", "properties": {"size": {"type": "number"}}}
    tree = {"type": "array", "items": node}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"tree": tree}}}}]
    text = '<tool_call>\n<invoke name="f"><tree><item><size>7</size></item><item><size>N</size></item></tree></invoke>'
    text = text.replace("<", "]<]minimax[>[<").replace("N", written)
    assert calls_of("minimax-m3", text, tools) == [("f", {"tree": [{"size": 7}, {"size": value}]})]


def test_quotes_in_names_of_arguments(compiler, tokenizer):
    schema = {"type": "object", "properties": {'the "x"': {"type": "integer"}}, "required": ['the "x"']}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    text = (
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="the &quot;x&quot;" '
        'type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    )
    assert takes(masks_of(compiler, tokenizer, "kimi-k3", tools), tokenizer, text)
    assert calls_of("kimi-k3", text, tools) == [("f", {'the "x"': 3})]


def test_gemma_takes_any_arguments_without_a_schema(compiler, tokenizer):
    tools = [{"type": "function", "function": {"name": "weather"}}]
    for text in ("{}", "{a:1}", '{a:[],b:{c:<|"|>x "y" <| z<|"|>,d:[true,null,-1.5e3]}}'):
        call = f"<|tool_call>call:weather{text}<tool_call|>"
        assert takes(masks_of(compiler, tokenizer, "gemma4", tools), tokenizer, call)
        assert len(calls_of("gemma4", call, tools)) == 1
    for text in ("{a}", "{a:x}", "[]", '{"a":1}', "{a:1,}", '{a:<|"|>x}'):
        call = f"<|tool_call>call:weather{text}<tool_call|>"
        assert not takes(masks_of(compiler, tokenizer, "gemma4", tools), tokenizer, call)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "string", "format": "date"}, "the keyword 'format'"),
        ({"contains": {"type": "string"}, "type": "array", "maxContains": 2}, "contains without minContains"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems next to items out of a short enum"),
        ({"type": "set"}, "the type 'set'"),
        ({"enum": [[1]]}, "enum or const with objects"),
        ({"$ref": "https://other/schema"}, r"\$ref to"),
        ({"type": "string", "maxLength": 10**9}, "minLength or maxLength beyond"),
        ({"type": "object", "properties": {"a b": {}}}, "names of arguments"),
        (False, "a schema that is false"),
        (5, "a schema that is no object"),
    ],
)
def test_schemas_that_gemma_cannot_be_held_to_are_named(schema, said):
    tools = [{"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": schema}}}}]
    with pytest.raises(ApiError, match=said):
        call_grammar(FORMS["gemma4"].call, tools, {}, is_forced=True, max_calls=1)


@pytest.mark.parametrize(
    ("family", "name", "said"),
    [("qwen-xml", "x>y", "without <, > and line breaks"), ("minimax", 'x"y', "without <, >, quotes and line breaks")],
)
def test_names_of_arguments_that_a_form_cannot_have(family, name, said):
    schema = {"properties": {name: {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "a", "parameters": schema}}]
    with pytest.raises(ApiError, match=said):
        call_grammar(FORMS[family].call, tools, {}, is_forced=True, max_calls=1)


BASE = {"type": "object", "properties": {"id": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["id"]}
MAIL, PHONE = ({"properties": {key: {"enum": ["x", "y"]}}, "required": [key]} for key in ("mail", "phone"))
COMBINED = {
    "anyOf": ({**BASE, "anyOf": [MAIL, PHONE]}, {"id": 1, "mail": "x"}, {"id": 1}),
    "oneOf": ({**BASE, "oneOf": [MAIL, PHONE]}, {"id": 1, "phone": "y"}, {"id": 1, "mail": "x", "phone": "y"}),
    "allOf": ({"allOf": [{"$ref": "#/$defs/base"}, MAIL], "$defs": {"base": BASE}}, {"id": 1, "mail": "y"}, {"id": 1}),
    "$ref": ({"$ref": "#/$defs/base", "$defs": {"base": BASE}}, {"id": 1}, {}),
    "required alone": ({**BASE, "required": ["id", "further"]}, {"further": "1", "id": 1}, {"id": 1}),
    "text or null": (
        {**BASE, "properties": {"mail": {"anyOf": [{"enum": ["x"]}, {"type": "null"}]}}, "required": ["mail"]},
        {"mail": None},
        {"mail": "z"},
    ),
    "nullable of OpenAPI": (
        {
            "type": "object",
            "nullable": True,
            "properties": {
                "base": {"$ref": "#/$defs/base", "nullable": True},
                "mail": {"type": "string", "enum": ["x"], "nullable": True},
                "number": {"type": "integer", "nullable": True},
            },
            "required": ["base", "mail", "number"],
            "$defs": {"base": BASE},
        },
        {"number": None, "mail": None, "base": None},
        {"number": None, "mail": "z", "base": None},
    ),
    "neutral": (
        {
            **BASE,
            "properties": {"a": {"type": "array", "items": {"enum": [1]}, "uniqueItems": False}},
            "required": ["a"],
        },
        {"a": [1, 1]},
        {"a": [2]},
    ),
}


def call_text(family, arguments):
    """A call as templates write it."""
    if family == "gemma4":

        def value(each):
            if isinstance(each, dict):
                return "{" + ",".join(f"{key}:{value(inner)}" for key, inner in sorted(each.items())) + "}"
            return f'<|"|>{each}<|"|>' if isinstance(each, str) else json.dumps(each, separators=(",", ":"))

        return f"<|tool_call>call:f{value(arguments)}<tool_call|>"
    if family == "qwen-xml":
        texts = {key: each if isinstance(each, str) else json.dumps(each) for key, each in arguments.items()}
        body = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
        return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    return f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize("family", ["gemma4", "qwen-xml", "hermes"])
@pytest.mark.parametrize("name", COMBINED)
def test_calls_are_held_to_combined_schemas(compiler, tokenizer, family, name):
    schema, taken, refused = COMBINED[name]
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    orders = [dict(reversed(taken.items())), taken]
    assert any(
        takes(masks_of(compiler, tokenizer, family, tools), tokenizer, call_text(family, order)) for order in orders
    )
    assert not takes(masks_of(compiler, tokenizer, family, tools), tokenizer, call_text(family, refused))
    ((_, arguments),) = calls_of(family, call_text(family, taken), tools)
    assert arguments == taken


def test_texts_of_arguments_are_held_to_patterns(compiler, tokenizer):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^[a-z]{2}$"}, "b": {"type": "string", "maxLength": 2}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for arguments, is_valid in (({"a": "xy", "b": "é1"}, True), ({"a": "x"}, False), ({"b": "xyz"}, False)):
        text = call_text("qwen-xml", arguments)
        assert takes(masks_of(compiler, tokenizer, "qwen-xml", tools), tokenizer, text) == is_valid
