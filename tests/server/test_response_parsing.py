"""Reasoning and tool calls of each family, from transcripts cut anywhere; what does not parse is content."""

# ruff: noqa: RUF001
import json
import random
import re
import time

import pytest
from tokenizers import AddedToken

from torchax_serve.server.call_ids import replayed
from torchax_serve.server.common_calls import with_common_calls
from torchax_serve.server.parsed_message import joined_calls
from torchax_serve.server.response_families import FAMILIES, response_template_for
from torchax_serve.server.response_parsing import AnswerParser
from torchax_serve.server.schemas import ChatRequest
from torchax_serve.server.tagged_families import TAGGED_FAMILIES
from torchax_serve.server.tools import plan_tools

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
BY_NAME = {family.name: family for family in FAMILIES}
ARGUMENTS = {"city": "Łódź", "days": 3}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)

# (family, prompt, answer, content, reasoning, calls)
TRANSCRIPTS = [
    ("hermes", "<|im_start|>assistant\n", "Hello!", "Hello!", "", []),
    (
        "hermes",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        f"<think>\nLet me see.\n</think>\n\nI look.\n<tool_call>\n"
        f'{{"name": "weather", "arguments": {JSON}}}\n</tool_call>\n<tool_call>\n'
        '{"name": "clock", "arguments": {}}\n</tool_call>',
        "I look.",
        "Let me see.",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    ("hermes", "<|im_start|>assistant\n<think>\n", "Deep thought.\n</think>\n\n42", "42", "Deep thought.", []),
    ("hermes", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "42", "42", "", []),
    (
        "qwen-xml",
        "<|im_start|>assistant\n",
        "<tool_call>\n<function=weather>\n<parameter=city>\nŁódź\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        "",
        [("weather", ARGUMENTS)],
    ),
    (
        "glm",
        "<|assistant|>\n",
        "<think>Hm.</think>Look:\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Łódź</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "Look:",
        "Hm.",
        [("weather", ARGUMENTS)],
    ),
    (
        "deepseek",
        "<｜User｜>hi<｜Assistant｜>",
        f"Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>\n"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Sure.",
        "",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    (
        "deepseek-v3.1",
        "<｜Assistant｜><think>\n",
        f"Hm.\n</think>\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        "Hm.",
        [("weather", ARGUMENTS)],
    ),
    (
        "kimi",
        "<|im_assistant|>assistant<|im_middle|>",
        f"Look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
        "<|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "Look.",
        "",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    (
        "gpt-oss",
        "<|start|>user<|message|>hi<|end|><|start|>assistant",
        "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>",
        "",
        "I need the weather.",
        [("weather", ARGUMENTS)],
    ),
    (
        "gpt-oss",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>",
        "42",
        "Easy.",
        [],
    ),
    (
        "gemma4",
        "<|turn>model\n",
        '<|channel>thought\nHm.<channel|><|tool_call>call:weather{city:<|"|>Łódź<|"|>,days:3}<tool_call|>',
        "",
        "Hm.",
        [("weather", ARGUMENTS)],
    ),
    (
        "mistral",
        "[INST]hi[/INST]",
        f"Sure.[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]clock[ARGS]{{}}",
        "Sure.",
        "",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    (
        "deepseek-v4",
        "<｜User｜>hi<｜Assistant｜><think>",
        'Hm.</think>Look.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Łódź</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "Look.",
        "Hm.",
        [("weather", ARGUMENTS)],
    ),
    (
        "hunyuan3",
        "<｜hy_Assistant:opensource｜><think:opensource>",
        "Hm.</think:opensource>Look.<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Łódź</arg_value:opensource>\n"
        "<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n"
        "</tool_call:opensource>\n<tool_call:opensource>clock<tool_sep:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
        "Look.",
        "Hm.",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    (
        "hunyuan3-preview",
        "<｜hy_Assistant｜>",
        "<think>Hm.</think><tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n"
        "<arg_value>Łódź</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n</tool_calls>",
        "",
        "Hm.",
        [("weather", ARGUMENTS)],
    ),
    (
        "solar-open",
        "<|begin|>user<|content|>hi<|end|><|begin|>assistant",
        "<|think|>Hm.<|end|><|begin|>assistant<|content|>Look.<|end|><|begin|>assistant<|tool_calls|>"
        f"<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>weather<|tool_call:args|>{JSON}<|tool_call:end|>"
        "<|tool_call:begin|>f6g7h8i9j0<|tool_call:name|>clock<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        "Look.",
        "Hm.",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    (
        "solar-open2",
        "<|im:start|>assistant<|im:content|><|think:start|>",
        "Hm.<|think:end|>Look.<|tool_call:start|>weather\n<|tool_arg:start|>city<|tool_arg:value|>Łódź"
        "<|tool_arg:end|>\n<|tool_arg:start|>days<|tool_arg:value|>3<|tool_arg:end|>\n<|tool_call:end|>",
        "Look.",
        "Hm.",
        [("weather", ARGUMENTS)],
    ),
    (
        "kimi-k3",
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>Look.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Łódź'
        '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="clock" index="2"<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="weather" index="3"<|sep|><|open|>json type="object"<|sep|>'
        f"{JSON}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        "Look.",
        "Hm.",
        [("weather", ARGUMENTS), ("clock", {}), ("weather", ARGUMENTS)],
    ),
    (
        "minimax-m3",
        "]~b]ai\n",
        '</mm:think>Look.]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="weather">]<]minimax[>[<city>Łódź'
        "]<]minimax[>[</city>]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n"
        ']<]minimax[>[<invoke name="clock">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
        "Look.",
        "",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    ("minimax-m3", "]~b]ai\n", "<mm:think>Hm.</mm:think>42", "42", "Hm.", []),
    (
        "minicpm5",
        "<|im_start|>assistant\n<think>\n",
        'Hm.\n</think>\n\nLook.\n<function name="weather"><param name="city"><![CDATA[Łódź]]></param>'
        '<param name="days">3</param></function>\n<function name="clock"></function>',
        "Look.",
        "Hm.",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    (
        "minicpm3",
        "<|im_start|>assistant\n",
        "<|thought_start|>\nHm.\n<|thought_end|>\n<|tool_call_start|>\n```python\nweather(city='Łódź',days=3)\n"
        "clock()\n```\n<|tool_call_end|>\nLook.",
        "Look.",
        "Hm.",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    (
        "apertus",
        "<|assistant_start|>",
        f'<|inner_prefix|>Hm.<|tools_prefix|>[{{"weather": {JSON}}}, {{"clock": {{}}}}]<|tools_suffix|>',
        "",
        "Hm.",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    (
        "functionary",
        "<|start_header_id|>assistant<|end_header_id|>\n\n>>>",
        f"all\nLook.>>>weather\n{JSON}>>>clock\n{{}}",
        "Look.",
        "",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    (
        "functionary",
        "<|start_header_id|>assistant<|end_header_id|>\n\n>>>",
        f"weather\n{JSON}",
        "",
        "",
        [("weather", ARGUMENTS)],
    ),
    ("mistral", "[INST]hi[/INST]", "[THINK]Hm.[/THINK]42", "42", "Hm.", []),
    (
        "mistral-list",
        "[INST]hi[/INST]",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}}}, {{"name": "clock", "arguments": {{}}}}]',
        "",
        "",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    (
        "llama",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        f'{{"name": "weather", "parameters": {JSON}}}',
        "",
        "",
        [("weather", ARGUMENTS)],
    ),
    (
        "llama",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        'JSON is like {"name": 1}.',
        'JSON is like {"name": 1}.',
        "",
        [],
    ),
    (
        "llama4",
        "<|header_start|>user<|header_end|>\n\nhi<|eot|><|header_start|>assistant<|header_end|>\n\n",
        f'<|python_start|>{{"name": "weather", "parameters": {JSON}}}<|python_end|>',
        "",
        "",
        [("weather", ARGUMENTS)],
    ),
    (
        "llama4",
        "<|header_start|>assistant<|header_end|>\n\n",
        f'{{"name": "weather", "parameters": {JSON}}}',
        "",
        "",
        [("weather", ARGUMENTS)],
    ),
    ("llama4", "<|header_start|>assistant<|header_end|>\n\n", "Hello!", "Hello!", "", []),
    (
        "functiongemma",
        "<start_of_turn>model\n",
        "Look.<start_function_call>call:weather{city:<escape>Łódź<escape>,days:3}<end_function_call>"
        "<start_function_call>call:clock{}<end_function_call>",
        "Look.",
        "",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    (
        "lfm2",
        "<|im_start|>assistant\n",
        f'<|tool_call_start|>[{{"name": "weather", "arguments": {JSON}}}, {{"name": "clock", "arguments": {{}}}}]'
        "<|tool_call_end|>I look.",
        "I look.",
        "",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    (
        "lfm2.5",
        "<|im_start|>assistant\n",
        "<think>Hm.</think>I look.\n<|tool_call_start|>[weather(city='Łódź', days=3), clock()]<|tool_call_end|>",
        "I look.",
        "Hm.",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    (
        "cohere",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {JSON}}},\n'
        '    {"tool_call_id": "1", "tool_name": "clock", "parameters": {}}\n]<|END_ACTION|>',
        "",
        "Hm.",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    (
        "cohere",
        "<|CHATBOT_TOKEN|>",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>42<|END_RESPONSE|>",
        "42",
        "Hm.",
        [],
    ),
    (
        "minimax",
        "]~b]ai\n<think>\n",
        'Hm.\n</think>\n\nLook.\n<minimax:tool_call>\n<invoke name="weather">\n'
        '<parameter name="city">Łódź</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
        '<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
        "Look.",
        "Hm.",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    (
        "seed-oss",
        "<seed:bos>assistant\n",
        "<seed:think>Hm.</seed:think>Look.\n<seed:tool_call>\n<function=weather>\n<parameter=city>Łódź</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        "Look.",
        "Hm.",
        [("weather", ARGUMENTS)],
    ),
    (
        "deepseek-dsml",
        "<｜User｜>hi<｜Assistant｜><think>",
        'Hm.</think>Look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Łódź</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="clock">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "Look.",
        "Hm.",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    (
        "tool-calls",
        "<think>\n",
        f'Hm.</think>Look.<tool_calls>[{{"name": "weather", "arguments": {JSON}}}, '
        '{"name": "clock", "arguments": {}}]</tool_calls>',
        "Look.",
        "Hm.",
        [("weather", ARGUMENTS), ("clock", {})],
    ),
    ("think", "Question: hi\n<think>\n", "Hm.</think>42", "42", "Hm.", []),
]


def parsed(family, prompt, pieces, **options):
    parser = AnswerParser(BY_NAME[family], prompt, options.pop("tools", TOOLS), **options)
    steps = [*map(parser.push, pieces), parser.flush()]
    functions = [call["function"] for call in joined_calls(steps)]
    calls = [(function["name"], _parsed_json(function["arguments"])) for function in functions]
    assert not parser.has_complete_calls or not any(isinstance(arguments, str) for _, arguments in calls)
    return "".join(step.content for step in steps), "".join(step.reasoning for step in steps), calls


def _parsed_json(text):
    """The value of a JSON text; the text itself if it is incomplete."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def cuts(text, rng):
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 12))))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda each: each[0])
def test_transcripts_of_each_family(transcript):
    family, prompt, answer, *expected = transcript
    assert list(parsed(family, prompt, [answer])) == expected
    assert list(parsed(family, prompt, list(answer))) == expected
    rng = random.Random(answer)
    for _ in range(30):
        assert list(parsed(family, prompt, cuts(answer, rng))) == expected


def test_every_family_has_a_transcript_and_is_recognised():
    assert {transcript[0] for transcript in TRANSCRIPTS} == set(BY_NAME)

    class Tokenizer:
        response_template = None

    for family in FAMILIES:
        Tokenizer.chat_template = " ".join(family.signs)
        assert response_template_for(Tokenizer).name == family.name
    Tokenizer.chat_template = "plain"
    assert response_template_for(Tokenizer) is None
    tokens = ("<|tool_call_start|>", "<|tool_call_end|>")
    Tokenizer.added_tokens_decoder = {index: AddedToken(text) for index, text in enumerate(tokens)}
    assert response_template_for(Tokenizer).name == "lfm2.5"  # whose template may have no text of calls


BROKEN = [
    ("hermes", "<tool_call>\nno json\n</tool_call> rest"),
    ("hermes", '<tool_call>{"name": 5}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "text"}</tool_call>'),
    ("hermes", "<tool_call><tool_call><think></tool_call>"),
    ("hermes", "<think>" * 50),
    ("llama", '{"name": "weather", "parameters": '),
    ("mistral-list", "[TOOL_CALLS] [1, 2]"),
    ("gemma4", "<|tool_call>call:weather{{{{<tool_call|>"),
    ("kimi", "<|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>nonsense"),
    ("gpt-oss", "<|channel|>commentary to=functions.a<|message|>\x01\x02{"),
]


@pytest.mark.parametrize(("family", "answer"), BROKEN)
def test_answers_that_do_not_parse_are_content(family, answer):
    whole = parsed(family, "", [answer])
    rng = random.Random(answer)
    for _ in range(30):
        assert parsed(family, "", cuts(answer, rng)) == whole
    assert whole[2] == []


@pytest.mark.parametrize("family", sorted(BY_NAME))
def test_random_texts_raise_nothing_and_do_not_depend_on_cuts(family):
    rng = random.Random(family)
    text = "".join(transcript[2] for transcript in TRANSCRIPTS if transcript[0] == family)
    markers = [text[start : start + rng.randint(1, 30)] for start in rng.sample(range(len(text)), min(20, len(text)))]
    for _ in range(60):
        answer = "".join(rng.choice([*markers, "{", '"', "x", "\n", "🦊"]) for _ in range(rng.randint(1, 15)))
        assert parsed(family, "", list(answer)) == parsed(family, "", [answer])


def is_linear(once, num_pieces, least=0.0):
    """Returns whether eight times the pieces take less than 24 times the seconds, at best of three times each."""
    short = max(min(once(num_pieces) for _ in range(3)), least)
    return any(once(8 * num_pieces) < 24 * short for _ in range(3))  # a garbage collection is not its time


@pytest.mark.parametrize("family", sorted(BY_NAME))
def test_time_is_linear_in_the_length(family):
    """Of plain answers, and of those whose call or thought never ends."""
    answer = next(transcript[2] for transcript in TRANSCRIPTS if transcript[0] == family)

    def once(begin, num_pieces):
        began = time.process_time()
        parsed(family, "", [begin, *["some words "] * num_pieces])
        return time.process_time() - began

    for begin in ("", answer[: len(answer) // 2]):
        assert is_linear(lambda num_pieces, begin=begin: once(begin, num_pieces), 1000, 0.005), begin


@pytest.mark.parametrize(
    ("family", "begin", "piece"),
    [
        ("kimi", '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "', "Łódź "),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>', "Łódź "),
        ("qwen-xml", "<tool_call>\n<function=weather>\n", "<parameter=city>\nŁódź\n</parameter>\n"),
        ("qwen-xml", "<tool_call>\n<function=weather>\n<parameter=city>\n", "Łódź "),
    ],
)
def test_time_is_linear_in_the_length_of_arguments(family, begin, piece):
    def once(num_pieces):
        began = time.process_time()
        parsed(family, "", [begin, *[piece] * num_pieces])
        return time.process_time() - began

    assert is_linear(once, 2_000)


def test_without_tools_a_call_is_content():
    content, _, calls = parsed("hermes", "", ['<tool_call>{"name": "a", "arguments": {}}</tool_call>'], tools=[])
    assert calls == [] and '"name"' in content


@pytest.mark.parametrize("transcript", [each for each in TRANSCRIPTS if each[5]], ids=lambda each: each[0])
def test_arguments_come_in_pieces_of_one_json_text(transcript):
    family, prompt, answer, *_ = transcript
    parser = AnswerParser(BY_NAME[family], prompt, TOOLS)
    steps = [*map(parser.push, answer), parser.flush()]
    pieces = [piece for step in steps for piece in step.tool_calls if piece["index"] == 0]
    assert len(pieces) > {
        **dict.fromkeys((family.name for family in TAGGED_FAMILIES if "gemma" not in family.name), 1),
        **dict.fromkeys(("lfm2.5", "minicpm3"), 0),
    }.get(family, 4)
    assert pieces[0]["type"] == "function" and pieces[0]["id"] and pieces[0]["function"]["name"] == "weather"
    assert all(set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"} for piece in pieces[1:])
    assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == ARGUMENTS
    assert parser.has_complete_calls


@pytest.mark.parametrize(
    ("family", "answer", "arguments", "content"),
    [
        ("kimi", '{"city": "Rome", "days": 3', '{"city": "Rome", "days": ', ""),
        ("kimi", '{"city": "Rome", days: 3}<|tool_call_end|>', '{"city": "Rome", ', "days: 3}"),
        ("kimi", '{"city": "a\nb\\u0', '{"city": "a\\nb', ""),
        ("kimi", '{"city": "Rome"} and more<|tool_call_end|>', '{"city": "Rome"}', "and more"),
        ("gemma4", '{city:<|"|>Ro"me', '{"city":"Ro\\"me', ""),
    ],
)
def test_calls_that_are_cut_or_break_off_are_no_complete_ones(family, answer, arguments, content):
    """What has been streamed cannot be taken back: the rest is content, and nobody can take the call for complete."""
    begin = {
        "kimi": "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>",
        "gemma4": "<|tool_call>call:weather",
    }
    for pieces in ([begin[family] + answer], list(begin[family] + answer)):
        parser = AnswerParser(BY_NAME[family], "", TOOLS)
        steps = [*map(parser.push, pieces), parser.flush()]
        (call,) = joined_calls(steps)
        assert call["function"] == {"name": "weather", "arguments": arguments}
        assert "".join(step.content for step in steps) == content
        assert parser.has_complete_calls == (arguments == '{"city": "Rome"}')


REPEATED = {
    "qwen-xml": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=city>\nŁódź\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n<arg_key>city</arg_key>\n<arg_value>Łódź</arg_value>\n</tool_call>"
    ),
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3, "city": "Łódź"}}\n</tool_call>'
    ),
}


@pytest.mark.parametrize("family", REPEATED)
def test_an_argument_that_is_repeated_has_its_last_value(family):
    """As transformers' parser and vLLM's have it; a complete answer has each name once."""
    for pieces in ([REPEATED[family]], list(REPEATED[family])):
        parser = AnswerParser(BY_NAME[family], "", TOOLS)
        steps = [*map(parser.push, pieces), parser.flush()]
        streamed = "".join(piece["function"]["arguments"] for step in steps for piece in step.tool_calls)
        (call,) = joined_calls(steps)
        assert json.loads(streamed) == json.loads(call["function"]["arguments"]) == ARGUMENTS
        assert call["function"]["arguments"].count('"city"') == 1


def test_lists_and_objects_may_be_written_as_python_writes_them():
    """Templates that write `value | string` teach it; a text stays a text."""
    types = {"l": ["array", "null"], "o": "object", "s": "string", "both": ["array", "string"], "n": "array"}
    properties = {name: {"type": kind} for name, kind in types.items()}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    written = {"l": "['a', \"b\"]", "o": "{'a': [True, None]}", "s": "['a']", "both": "['a']", "n": "{1, 2}"}
    body = "".join(f"<parameter={name}>{text}</parameter>\n" for name, text in written.items())
    answer = f"<seed:tool_call>\n<function=f>\n{body}</function>\n</seed:tool_call>"
    expected = written | {"l": ["a", "b"], "o": {"a": [True, None]}}
    for pieces in ([answer], list(answer)):
        assert parsed("seed-oss", "", pieces, tools=tools)[2] == [("f", expected)]


def test_words_for_types_say_what_no_schema_says():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}]
    written = [("n", "true", "3"), ("text", "true", "[1]"), ("list", "false", "[1]"), ("odd", "false", "[1")]
    body = "".join(
        f'<｜DSML｜parameter name="{key}" string="{kind}">{text}</｜DSML｜parameter>\n' for key, kind, text in written
    )
    answer = f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n{body}</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    expected = {"n": 3, "text": "[1]", "list": [1], "odd": "[1"}
    for pieces in ([answer], list(answer)):
        assert parsed("deepseek-v4", "", pieces, tools=tools)[2] == [("f", expected)]


def test_tags_in_each_other_are_objects_and_arrays():
    point = {"type": "object", "properties": {"x": {"type": "number"}, "item": {"type": "string"}}}
    properties = {
        "points": {"type": "array", "items": {"$ref": "#/$defs/point"}},
        "grid": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        "by_name": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "none": {"type": "array"},
        "free": {},
    }
    schema = {"type": "object", "properties": properties, "$defs": {"point": point}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    arguments = {
        "points": [{"x": 1.5, "item": "<b>"}, {"item": "2"}],
        "grid": [[1, 2], [3]],
        "by_name": {"Łódź": True},
        "none": [],
        "free": {"a": ["1", "x"]},
    }

    def tags(key, value):
        inner = "".join(tags("item", each) for each in value) if isinstance(value, list) else str(value)
        inner = "".join(tags(*each) for each in value.items()) if isinstance(value, dict) else inner
        inner = json.dumps(value) if isinstance(value, bool) else inner
        return f"]<]minimax[>[<{key}>{inner}]<]minimax[>[</{key}>"

    body = "".join(tags(*each) for each in arguments.items())
    answer = f']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">{body}]<]minimax[>[</invoke>\n'
    answer += "]<]minimax[>[</tool_call>"
    for pieces in ([answer], list(answer)):
        assert parsed("minimax-m3", "", pieces, tools=tools) == ("", "", [("f", arguments)])


def test_names_may_stand_behind_the_arguments():
    answer = f'<tool_call>{{"arguments": {JSON}, "name": "weather"}}</tool_call>'
    assert parsed("hermes", "", list(answer)) == parsed("hermes", "", [answer]) == ("", "", [("weather", ARGUMENTS)])


def test_only_so_many_calls():
    family, prompt, answer, *_ = TRANSCRIPTS[1]
    assert len(parsed(family, prompt, [answer], max_tool_calls=1)[2]) == 1


CALL = f'{{"name": "weather", "arguments": {JSON}}}'
XML = (
    "<function=weather>\n<parameter=city>\nŁódź\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
XML_BODY = "<parameter=city>Łódź</parameter><parameter=days>3</parameter>"
SPELLINGS = [  # of one call, in other spellings than the family's own: (family, answer, content, number of calls)
    ("qwen-xml", f"I look.\n\n{XML}", "I look.", 1),
    ("qwen-xml", f"{XML}\n{XML}", "", 2),
    ("qwen-xml", f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
    ("qwen-xml", f"<tool_call><function=weather>{JSON}</function></tool_call>", "", 1),
    ("hermes", f"<tool_call>{CALL}{CALL}</tool_call>", "", 2),
    ("hermes", f"<tool_call>\n{CALL}\n{CALL}\n</tool_call>", "", 2),
    ("hermes", f"<tool_call>\n[{CALL}, {CALL}]\n</tool_call>", "", 2),
    ("hermes", f"<tool_call>\n{CALL}", "", 1),
    ("hermes", f"<tool_call>\n<{XML[1:]}", "", 1),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {json.dumps(JSON)}}}</tool_call>', "", 1),
    ("hermes", f'<tool_call>{{"thought": "a", "name": "weather", "arguments": {JSON}}}</tool_call>', "", 1),
    ("hermes", f'<tool_call>{{"type": "function", "function": {CALL}}}</tool_call>', "", 1),
    ("mistral", f"Sure.[TOOL_CALLS] [{CALL}]", "Sure.", 1),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abcdefgh1[ARGS]{JSON}", "", 1),
    ("mistral-list", f"[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]weather{JSON}", "", 2),
    ("mistral-list", f"[TOOL_CALLS]{CALL}", "", 1),
    ("llama", f"<|python_tag|>{CALL}", "", 1),
    ("llama", f"{CALL}; {CALL}", "", 2),
    ("llama", f"<function=weather>{JSON}</function>", "", 1),
    ("llama", '[weather(city="Łódź", days=3), weather(city="Łódź", days=3)]', "", 2),
    ("llama4", '<|python_start|>[weather(city="Łódź", days=3)]<|python_end|>', "", 1),
    (
        "glm",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Łódź</arg_value><arg_key>days</arg_key><arg_value>3"
        "</arg_value></tool_call>",
        "",
        1,
    ),
    (
        "kimi",
        f"<|tool_call_section_begin|><|tool_call_begin|>weather:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
        "<|tool_call_section_end|>",
        "",
        1,
    ),
    ("kimi", f"<|tool_call_begin|> functions.weather:7 <|tool_call_argument_begin|> {JSON} <|tool_call_end|>", "", 1),
    ("llama", f"Sure.\n<|python_tag|>{CALL}", "Sure.", 1),
    ("llama", f"I look.\n\n{CALL.replace('arguments', 'parameters')}", "I look.", 1),
    ("llama4", f"Sure.<|python_start|>{CALL}<|python_end|>", "Sure.", 1),
    ("lfm2", '<|tool_call_start|>[weather(city="Łódź", days=3)]<|tool_call_end|>', "", 1),
    ("lfm2.5", f"<|tool_call_start|>{CALL}<|tool_call_end|>", "", 1),
    ("lfm2.5", "<|tool_call_start|>weather(days=3, city='Łódź')\nweather( city = 'Łódź' , days=3 )", "", 2),
    ("seed-oss", f"<function=weather>{XML_BODY}</function>", "", 1),
    ("tool-calls", f"<tool_calls>\n{CALL}\n{CALL}\n</tool_calls>", "", 2),
    ("tool-calls", f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
]


@pytest.mark.parametrize(("family", "answer", "content", "num_calls"), SPELLINGS)
def test_other_spellings_of_calls(family, answer, content, num_calls):
    expected = (content, "", [("weather", ARGUMENTS)] * num_calls)
    rng = random.Random(answer)
    for pieces in ([answer], list(answer), *(cuts(answer, rng) for _ in range(20))):
        assert parsed(family, "", pieces) == expected


PYTHON = [  # strings as models write them, in what is meant to be Python: (text behind `city=`, value)
    ("'it's \"it\", isn't it'", "it's \"it\", isn't it"),
    ("'two\nlines'", "two\nlines"),
    (r"'\d+\n\\n'", "\\d+\n\\n"),
    ('"</x>[a](b), c=1"', "</x>[a](b), c=1"),
    ("'<|tool_call_end|>'", "<|tool_call_end|>"),
    ("''", ""),
    ("' a ' ", " a "),
    ("None", None),
    ("['a', {'b': [True, null, -1.5e3]}]", ["a", {"b": [True, None, -1500.0]}]),
]


@pytest.mark.parametrize(("written", "value"), PYTHON)
def test_strings_of_python_calls_are_read_as_they_are_meant(written, value):
    answer = f"<|tool_call_start|>[weather(city={written}), clock()]<|tool_call_end|>Done."
    rng = random.Random(answer)
    for pieces in ([answer], list(answer), *(cuts(answer, rng) for _ in range(20))):
        assert parsed("lfm2.5", "", pieces) == ("Done.", "", [("weather", {"city": value}), ("clock", {})])


@pytest.mark.parametrize("call", ["weather('Rome')", "weather(city=Rome)", "weather(city='Rome'", "just words"])
def test_what_is_no_python_call_is_content(call):
    answer = f"<|tool_call_start|>[{call}]<|tool_call_end|>"
    whole = parsed("lfm2.5", "", [answer])
    assert parsed("lfm2.5", "", list(answer)) == whole
    assert whole[1:] == ("", []) and call in whole[0]


@pytest.mark.parametrize("family", ["llama", "llama4"])
def test_json_in_other_text_is_a_call_of_the_requests_tools_alone(family):
    answer = f'As JSON:\n{{"name": "Ann", "parameters": {JSON}}}\nand\n{{"name": "weather", "age": 1}}.'
    for pieces in ([answer], list(answer)):
        assert parsed(family, "", pieces) == (answer, "", [])


def test_places_of_calls_are_no_ids():
    """Cohere's models count the calls of each answer, so that two answers would have the same ids."""
    family, prompt, answer, *_ = next(each for each in TRANSCRIPTS if each[0] == "cohere")
    ids = set()
    for _ in range(2):
        parser = AnswerParser(BY_NAME[family], prompt, TOOLS)
        ids |= {call["id"] for call in joined_calls([parser.push(answer), parser.flush()])}
    assert len(ids) == 4


NO_ARGUMENTS = [  # calls of functions without arguments, whose place is empty or null
    ("hermes", '<tool_call>{"name": "clock", "arguments": null}</tool_call>', ""),
    ("hermes", 'Now.<tool_call>{"name": "clock", "arguments": ""}</tool_call>', "Now."),
    ("llama", '{"name": "clock", "parameters": null}', ""),
    ("kimi", "<|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|><|tool_call_end|>", ""),
    ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n\n```<｜tool▁call▁end｜>", ""),
    ("deepseek-v3.1", "<｜tool▁call▁begin｜>clock<｜tool▁sep｜><｜tool▁call▁end｜>", ""),
    ("gpt-oss", "<|channel|>commentary to=functions.clock <|constrain|>json<|message|><|call|>", ""),
]


@pytest.mark.parametrize(("family", "answer", "content"), NO_ARGUMENTS)
def test_calls_without_arguments(family, answer, content):
    rng = random.Random(answer)
    for pieces in ([answer], list(answer), *(cuts(answer, rng) for _ in range(20))):
        assert parsed(family, "", pieces) == (content, "", [("clock", {})])


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("kimi", "<|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>"),
        ("deepseek-v3.1", "<｜tool▁call▁begin｜>clock<｜tool▁sep｜> "),
    ],
)
def test_a_call_that_is_cut_in_front_of_its_arguments_is_none(family, answer):
    assert parsed(family, "", [answer])[2] == []


@pytest.mark.parametrize(
    ("family", "call", "closing"),
    [
        ("hermes", f"<tool_call>\n{CALL}", "\n</tool_call>"),
        ("kimi", f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{JSON}", "<|tool_call_end|>"),
        (
            "deepseek",
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON}",
            "\n```<｜tool▁call▁end｜>",
        ),
        ("gpt-oss", f"<|channel|>commentary to=functions.weather<|message|>{JSON}", "<|call|>"),
        ("qwen-xml", f"<tool_call>\n{CALL}", "\n</tool_call>"),
    ],
)
def test_a_closing_text_that_is_cut_is_no_content(family, call, closing):
    for length in range(len(closing) + 1):
        assert parsed(family, "", [call + closing[:length]]) == ("", "", [("weather", ARGUMENTS)])
    assert parsed(family, "", [f"{call} other"])[0] == "other"


def test_reasoning_of_kimi_ends_at_a_call():
    call = f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{JSON}"
    assert parsed("kimi", "", list(f"<think>Hm.\n{call}<|tool_call_end|>")) == ("", "Hm.", [("weather", ARGUMENTS)])


def test_reasoning_of_qwen_ends_at_a_call():
    """Of the request's tools: without any, the same text is reasoning."""
    prompt = "<|im_start|>assistant\n<think>\n"
    answer = f"I'd write <tool_call>.\n\n<tool_call>\n<{XML[1:]}"
    for pieces in ([answer], list(answer)):
        found = parsed("qwen-xml", prompt, pieces)
        assert found == ("", "I'd write <tool_call>.", [("weather", ARGUMENTS)])
        assert parsed("qwen-xml", prompt, pieces, tools=[]) == ("", answer, [])


PROSE = [
    "Use <think> in <think>text</think> ok",
    "The tag [THINK] begins a thought, [/THINK] ends it.",
    "    return x",
    "a line\n",
    "\n\n  two\n\nparagraphs  \n",
    " ",
    "The <tool_call> tag stands in front of a call, </tool_call> behind.",
    "Write <function=f> or <parameter=a>.",
    "<tool_call>no call</tool_call>\n",
    '```json\n{"a": 1}\n```\n',
    '{"name": "Ann", "age": 3}\n',
    '[{"name": "Ann"}]',
]


@pytest.mark.parametrize("family", sorted(BY_NAME))
@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "no tools"])
def test_content_is_as_it_was_written(family, tools):
    for answer in PROSE:
        rng = random.Random(answer)
        for pieces in ([answer], list(answer), cuts(answer, rng)):
            assert parsed(family, "", pieces, tools=tools) == (answer, "", []), answer


@pytest.mark.parametrize("family", sorted(BY_NAME))
def test_what_is_no_call_comes_at_once(family):
    """Behind a text that might begin a call, at most a few characters wait."""
    for answer in PROSE:
        parser, shown, waiting = AnswerParser(BY_NAME[family], "", TOOLS), 0, 0
        for index, char in enumerate(f"{answer}and so on."):
            shown += len(parser.push(char).content)
            waiting = max(waiting, index + 1 - shown)
        assert waiting <= 24, answer


ANCHORS = {
    "kimi-k3": '<|open|>message role="assistant"<|sep|>',
    "hunyuan3": "<｜hy_Assistant:opensource｜>",
    "hunyuan3-preview": "<｜hy_Assistant｜>",
}
"""Texts in front of answers that a pattern describes."""


@pytest.mark.parametrize("family", sorted(set(BY_NAME) - {"gpt-oss"}))
def test_begun_answers_are_continued(family):
    """The text behind the anchor is a part of the message that the answer does not have."""
    anchor = str(BY_NAME[family].template.get("start_anchor", ANCHORS.get(family, "")))
    assert parsed(family, f"{anchor}The answer", [" is <think> 42.\n"]) == (" is <think> 42.\n", "", [])
    if (markers := BY_NAME[family].markers) is not None and family not in ("think", "tool-calls"):
        begun = f"{anchor}{markers.opening}\nI think"
        assert parsed(family, begun, [f" so.\n{markers.closing}\n\n  Yes "]) == ("  Yes ", " so.", [])
        begun = f"{anchor}{markers.opening}\nHm.\n{markers.closing}\n\nThe answer"
        assert parsed(family, begun, [" is 42."]) == (" is 42.", "", [])


@pytest.mark.parametrize(
    ("family", "form"),
    [("mistral", "[a-zA-Z0-9]{9}"), ("mistral-list", "[a-zA-Z0-9]{9}"), ("kimi", r"functions\.weather:\d+")],
)
def test_ids_have_the_form_that_the_template_demands(family, form):
    answers = {
        "mistral": f"[TOOL_CALLS]weather[CALL_ID]wrong-id[ARGS]{JSON}[TOOL_CALLS]weather[ARGS]{JSON}",
        "mistral-list": f'[TOOL_CALLS] [{{"id": "no", "name": "weather", "arguments": {JSON}}}, {CALL}]',
        "kimi": "".join(
            f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
            for _ in range(2)
        ),
    }
    parser = AnswerParser(BY_NAME[family], "", TOOLS)
    ids = [call["id"] for call in joined_calls([parser.push(answers[family]), parser.flush()])]
    assert len(set(ids)) == 2 and all(re.fullmatch(form, each) for each in ids)


def test_a_template_that_demands_nine_characters_has_them_in_any_family():
    class Tokenizer:
        chat_template = (
            "<tool_call>{% if call.id is not defined or call.id|length != 9 %}{{ raise_exception('') }}{% endif %}"
        )

    family = response_template_for(Tokenizer)
    parser = AnswerParser(family, "", TOOLS)
    (call,) = joined_calls([parser.push(f"<tool_call>{CALL}</tool_call>"), parser.flush()])
    assert (family.name, len(call["id"])) == ("hermes", 9)


def test_ids_of_other_servers_are_replaced_by_the_same_one_in_call_and_result():
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [{**call, "id": "call_abcdefghijkl"}, {**call, "id": "Abc123xyz"}]},
        {"role": "tool", "tool_call_id": "Abc123xyz", "content": "a"},
        {"role": "tool", "tool_call_id": "call_abcdefghijkl", "content": "b"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "c"},
    ]
    found = replayed(messages, "nine")
    first, second = (each["id"] for each in found[1]["tool_calls"])
    assert re.fullmatch("[a-zA-Z0-9]{9}", first) and second == "Abc123xyz"
    assert [message["tool_call_id"] for message in found[2:4]] == [second, first]
    assert found[5]["tool_call_id"] == found[4]["tool_calls"][0]["id"] != first
    found = replayed(messages, "indexed")
    assert [each["id"] for each in found[1]["tool_calls"]] == ["functions.weather:0", "functions.weather:1"]
    assert [message["tool_call_id"] for message in found[2:4]] == ["functions.weather:1", "functions.weather:0"]
    assert found[5]["tool_call_id"] == "functions.weather:2"
    assert replayed(messages, "any") == messages


COMMON = [
    CALL,
    f"[{CALL}]",
    f"\n```json\n{CALL}\n```",
    f"```\n[{CALL}]\n```",
    f'{{"name": "weather", "parameters": {JSON}}}',
    f'{{"type": "function", "function": {CALL}}}',
    f'{{"tool_calls": [{{"id": "a", "type": "function", "function": {CALL}}}]}}',
    f'{{"function": "weather", "arguments": {JSON}}}',
    f"<tool_call>{CALL}</tool_call>",
    f"<|python_tag|>{CALL}",
    f"<function=weather>{JSON}</function>",
    f"[TOOL_CALLS][{CALL}]",
    XML,
    f"<tool_calls>[{CALL}]</tool_calls>",
    f"<TOOLCALL>[{CALL}]</TOOLCALL>",
    f"<|tool_call|>{CALL}<|/tool_call|>",
    f"<|tool_call|>[{CALL}]",
    f"functools[{CALL}]",
    f"<longcat_tool_call>\n{CALL}\n</longcat_tool_call>\n",
    f"<function_call> {CALL}",
    "<function_calls>\nweather(city='Łódź', days=3)\n</function_calls>",
    "[weather(city='Łódź', days=3)]",
]


@pytest.mark.parametrize("answer", COMMON)
@pytest.mark.parametrize("known", [None, "think"])
def test_models_of_no_known_family_are_read_in_the_common_forms(answer, known):
    family = with_common_calls(None if known is None else BY_NAME[known], is_strict=False)
    for pieces in ([answer], list(answer)):
        parser = AnswerParser(family, "", TOOLS)
        steps = [*map(parser.push, pieces), parser.flush()]
        (call,) = joined_calls(steps)
        assert "".join(step.content for step in steps) == ""
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", ARGUMENTS)
    for answer in PROSE:
        parser = AnswerParser(family, "", TOOLS)
        assert "".join(step.content for step in [*map(parser.push, answer), parser.flush()]) == answer


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_template_without_a_place_for_tools_asks_for_the_common_form(choice):
    """Of a known family, too: that of DeepSeek R1 shows calls and no tools, so that the prompt says how to call."""
    request = ChatRequest(messages=[{"role": "user", "content": "Hi"}], tools=TOOLS, tool_choice=choice)
    plan = plan_tools(request, BY_NAME["deepseek"], template="{{ message.tool_calls }}")
    own = next(transcript[2] for transcript in TRANSCRIPTS if transcript[0] == "deepseek")
    for answer in (f"<tool_call>{CALL}</tool_call>", own):
        parser = AnswerParser(plan.family, "", TOOLS)
        assert joined_calls([parser.push(answer), parser.flush()])[0]["function"]["name"] == "weather"
    assert (plan.grammar is None) == (choice == "auto") and plan.family.call.begin.startswith("<tool_call>")
    assert plan_tools(request, BY_NAME["deepseek"], template="{{ tools }}").family is BY_NAME["deepseek"]


@pytest.mark.parametrize("family", sorted(BY_NAME))
def test_special_tokens_are_shown_where_they_are_texts_of_the_family(family):
    special = [
        "<|tool_call_begin|>",
        "<｜tool▁call▁begin｜>",
        "[TOOL_CALLS]",
        "[/THINK]",
        "<|python_tag|>",
        '<|"|>',
        "<think>",
    ]
    own = {
        "kimi": {"<|tool_call_begin|>", "<think>"},
        "deepseek": {"<｜tool▁call▁begin｜>", "<think>"},
        "deepseek-v3.1": {"<｜tool▁call▁begin｜>", "<think>"},
        "mistral": {"[TOOL_CALLS]", "[/THINK]"},
        "mistral-list": {"[TOOL_CALLS]", "[/THINK]"},
        "llama": {"<|python_tag|>"},
        "llama4": set(),
        "gemma4": {'<|"|>'},
        "gpt-oss": set(special),
        **{name: set() for name in ("functiongemma", "cohere", "seed-oss", "apertus", "functionary", "hunyuan3")},
        "minicpm3": set(),
        **{name: set() for name in ("kimi-k3", "minimax-m3", "solar-open", "solar-open2")},
    }
    assert {text for text in special if BY_NAME[family].has_text(text)} == own.get(family, {"<think>"})


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["plain", "tools"])
def test_texts_between_messages_of_gpt_oss_are_shown_in_no_answer(tools):
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    for pieces in ([text], [*text], re.split(r"(?<=>)", text)):
        parser = AnswerParser(BY_NAME["gpt-oss"], "<|start|>assistant", tools)
        steps = [*map(parser.push, pieces), parser.flush()]
        assert "".join(step.content for step in steps) == "Yes."
