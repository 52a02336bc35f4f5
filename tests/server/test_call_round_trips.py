"""What a template of a family writes of a message is read as the same message, for all messages, cut anywhere."""

# ruff: noqa: RUF001
import json
import re
import string

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from thorough import thorough
from transformers.utils.chat_template_utils import render_jinja_template

from torchax_serve.server.parsed_message import joined_calls
from torchax_serve.server.response_families import FAMILIES
from torchax_serve.server.response_parsing import AnswerParser

BY_NAME = {family.name: family for family in FAMILIES}
CALLS = "{%- for call in m.tool_calls or [] %}"
NAME, JSON = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"
XML_THOUGHT = "{% if m.reasoning %}<think>\n{{ m.reasoning }}\n</think>\n\n{% endif %}{{ m.content }}"
PLAIN_THOUGHT = "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}"
HERMES_CALL = '\n<tool_call>\n{"name": "' + NAME + '", "arguments": ' + JSON + "}\n</tool_call>{% endfor %}"
PYTHON_CALL = (
    NAME + "({% for k, v in call.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}"
    "{% endfor %})"
)


def dsml(around):
    """The template of DeepSeek's DSML."""
    return (
        PLAIN_THOUGHT
        + "{% if m.tool_calls %}\n\n<｜DSML｜"
        + around
        + ">\n"
        + CALLS
        + '<｜DSML｜invoke name="'
        + NAME
        + '">\n{% for k, v in call.function.arguments.items() %}<｜DSML｜parameter name="{{ k }}" '
        "string=\"{{ 'true' if v is string else 'false' }}\">{{ v if v is string else v | tojson }}"
        "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n{% endfor %}</｜DSML｜" + around + ">{% endif %}"
    )


def hunyuan(suffix):
    """The template of Hunyuan 3."""
    body = (
        "<think~>{{ m.reasoning }}</think~>{{ m.content }}{% if m.tool_calls %}<tool_calls~>\n"
        + CALLS
        + "<tool_call~>"
        + NAME
        + "<tool_sep~>\n{% for k, v in call.function.arguments.items() %}<arg_key~>{{ k }}</arg_key~>\n"
        "<arg_value~>{{ v if v is string else v | tojson }}</arg_value~>\n{% endfor %}</tool_call~>\n{% endfor %}"
        "</tool_calls~>{% endif %}"
    )
    return body.replace("~", suffix)


# What stands in front of an assistant's message, and the message, as in the checkpoints' own templates.
TEMPLATES = {
    "hermes": ("<|im_start|>assistant\n", XML_THOUGHT + CALLS + HERMES_CALL),
    "qwen-xml": (
        "<|im_start|>assistant\n",
        XML_THOUGHT
        + CALLS
        + "\n<tool_call>\n<function="
        + NAME
        + ">\n{% for k, v in call.function.arguments.items() %}"
        "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>{% endfor %}",
    ),
    "glm": (
        "<|assistant|>\n",
        PLAIN_THOUGHT + CALLS + "\n<tool_call>" + NAME + "{% for k, v in call.function.arguments.items() %}\n<arg_key>"
        "{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}\n</tool_call>"
        "{% endfor %}",
    ),
    "deepseek": (
        "<｜Assistant｜>",
        PLAIN_THOUGHT
        + "{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
        + CALLS
        + "{% if not loop.first %}{{ '\n' }}{% endif %}"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        + NAME
        + "\n```json\n"
        + JSON
        + "\n```<｜tool▁call▁end｜>{% endfor %}"
        "<｜tool▁calls▁end｜>{% endif %}",
    ),
    "deepseek-v3.1": (
        "<｜Assistant｜>",
        PLAIN_THOUGHT
        + "{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
        + CALLS
        + "<｜tool▁call▁begin｜>"
        + NAME
        + "<｜tool▁sep｜>"
        + JSON
        + "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}",
    ),
    "kimi": (
        "<|im_assistant|>assistant<|im_middle|>",
        PLAIN_THOUGHT + "{% if m.tool_calls %}<|tool_calls_section_begin|>" + CALLS + "<|tool_call_begin|>{{ call.id }}"
        "<|tool_call_argument_begin|>" + JSON + "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}",
    ),
    "mistral": (
        "[INST]hi[/INST]",
        "{% if m.reasoning %}[THINK]{{ m.reasoning }}[/THINK]{% endif %}{{ m.content }}"
        + CALLS
        + "[TOOL_CALLS]"
        + NAME
        + "[CALL_ID]{{ call.id }}[ARGS]"
        + JSON
        + "{% endfor %}",
    ),
    "mistral-list": (
        "[INST]hi[/INST]",
        "{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS] ["
        + CALLS
        + '{"name": "'
        + NAME
        + '", "arguments": '
        + JSON
        + ', "id": "{{ call.id }}"}{{ ", " if not loop.last }}{% endfor %}]{% endif %}',
    ),
    "llama": (
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "{% if m.tool_calls %}"
        + CALLS
        + '{"name": "'
        + NAME
        + '", "parameters": '
        + JSON
        + "}{{ '; ' if not loop.last }}"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}",
    ),
    "llama4": (
        "<|header_start|>assistant<|header_end|>\n\n",
        "{% if m.tool_calls %}<|python_start|>"
        + CALLS
        + '{"name": "'
        + NAME
        + '", "parameters": '
        + JSON
        + "}{% endfor %}<|python_end|>{% else %}{{ m.content }}{% endif %}",
    ),
    "gpt-oss": (
        "<|start|>assistant",
        "{% if m.reasoning %}<|channel|>analysis<|message|>{{ m.reasoning }}<|end|><|start|>assistant{% endif %}"
        "{% if m.content %}<|channel|>{{ 'commentary' if m.tool_calls else 'final' }}<|message|>{{ m.content }}"
        "{{ '<|end|><|start|>assistant' if m.tool_calls else '<|return|>' }}{% endif %}"
        + CALLS
        + "<|channel|>commentary to=functions."
        + NAME
        + " <|constrain|>json<|message|>"
        + JSON
        + "<|call|>{% endfor %}",
    ),
    "gemma4": (
        "<|turn>model\n",
        "{% macro value(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is mapping %}{{ '{' }}"
        "{% for k in v %}{{ k }}:{{ value(v[k]) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
        "{% elif v is sequence %}[{% for each in v %}{{ value(each) }}{{ ',' if not loop.last }}{% endfor %}]"
        "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
        "{% if m.reasoning %}<|channel>thought\n{{ m.reasoning }}<channel|>{% endif %}{{ m.content }}"
        + CALLS
        + "<|tool_call>call:"
        + NAME
        + "{{ value(call.function.arguments) }}<tool_call|>{% endfor %}",
    ),
    "functiongemma": (
        "<start_of_turn>model\n",
        "{% macro value(v) %}{% if v is string %}<escape>{{ v }}<escape>{% elif v is mapping %}{{ '{' }}"
        "{% for k in v %}{{ k }}:{{ value(v[k]) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
        "{% elif v is sequence %}[{% for each in v %}{{ value(each) }}{{ ',' if not loop.last }}{% endfor %}]"
        "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}{{ m.content }}"
        + CALLS
        + "<start_function_call>call:"
        + NAME
        + "{{ value(call.function.arguments) }}<end_function_call>{% endfor %}",
    ),
    "lfm2": (
        "<|im_start|>assistant\n",
        PLAIN_THOUGHT
        + "{% if m.tool_calls %}<|tool_call_start|>["
        + CALLS
        + '{"name": "'
        + NAME
        + '", "arguments": '
        + JSON
        + ', "id": "{{ call.id }}"}{{ ", " if not loop.last }}{% endfor %}]<|tool_call_end|>{% endif %}',
    ),
    "lfm2.5": (
        "<|im_start|>assistant\n",
        PLAIN_THOUGHT
        + "{% if m.tool_calls %}<|tool_call_start|>["
        + CALLS
        + PYTHON_CALL
        + "{{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>{% endif %}",
    ),
    "cohere": (
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "{% if m.reasoning %}<|START_THINKING|>{{ m.reasoning }}<|END_THINKING|>{% endif %}"
        "{% if m.content %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
        "{% if m.tool_calls %}<|START_ACTION|>[\n"
        + CALLS
        + '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "'
        + NAME
        + '", "parameters": '
        + JSON
        + '}{{ "," if not loop.last }}\n{% endfor %}]<|END_ACTION|>{% endif %}',
    ),
    "minimax": (
        "]~b]ai\n",
        XML_THOUGHT
        + "{% if m.tool_calls %}\n<minimax:tool_call>\n"
        + CALLS
        + '<invoke name="'
        + NAME
        + '">\n{% for k, v in call.function.arguments.items() %}<parameter name="{{ k }}">'
        "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>"
        "{% endif %}",
    ),
    "seed-oss": (
        "<seed:bos>assistant\n",
        "{% if m.reasoning %}<seed:think>{{ m.reasoning }}</seed:think>{% endif %}{{ m.content }}"
        + CALLS
        + "\n<seed:tool_call>\n<function="
        + NAME
        + ">\n{% for k, v in call.function.arguments.items() %}<parameter={{ k }}>"
        "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>{% endfor %}",
    ),
    "deepseek-dsml": ("<｜Assistant｜>", dsml("function_calls")),
    "deepseek-v4": ("<｜Assistant｜>", dsml("tool_calls")),
    "hunyuan3": ("<｜hy_Assistant:opensource｜>", hunyuan(":opensource")),
    "hunyuan3-preview": ("<｜hy_Assistant｜>", hunyuan("")),
    "solar-open2": (
        "<|im:start|>assistant<|im:content|>",
        "<|think:start|>{{ m.reasoning }}<|think:end|>{{ m.content }}"
        + CALLS
        + "<|tool_call:start|>"
        + NAME
        + "\n{% for k, v in call.function.arguments.items() %}<|tool_arg:start|>{{ k }}<|tool_arg:value|>"
        "{{ v if v is string else v | tojson }}<|tool_arg:end|>\n{% endfor %}<|tool_call:end|>{% endfor %}",
    ),
    "solar-open": (
        "<|begin|>assistant",
        "{% if m.reasoning %}<|think|>{{ m.reasoning }}<|end|><|begin|>assistant{% endif %}"
        "{% if m.content %}<|content|>{{ m.content }}{{ '<|end|><|begin|>assistant' if m.tool_calls else '<|flush|>' }}"
        "{% endif %}{% if m.tool_calls %}<|tool_calls|>"
        + CALLS
        + "<|tool_call:begin|>{{ call.id }}<|tool_call:name|>"
        + NAME
        + "<|tool_call:args|>"
        + JSON
        + "<|tool_call:end|>{% endfor %}<|calls|>{% endif %}",
    ),
    "kimi-k3": (
        '<|open|>message role="assistant"<|sep|>',
        "<|open|>think<|sep|>{{ m.reasoning }}<|close|>think<|sep|><|open|>response<|sep|>{{ m.content }}"
        "<|close|>response<|sep|>{% if m.tool_calls %}<|open|>tools<|sep|>"
        + CALLS
        + '<|open|>call tool="'
        + NAME
        + '" index="{{ loop.index }}"<|sep|>{% for k, v in call.function.arguments.items() %}<|open|>argument '
        'key="{{ k }}" type="{% if v is boolean %}boolean{% elif v is none %}null{% elif v is number %}number'
        "{% elif v is string %}string{% elif v is mapping %}object{% else %}array{% endif %}"
        '"<|sep|>{{ v if v is string else v | tojson }}<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>'
        "{% endfor %}<|close|>tools<|sep|>{% endif %}<|close|>message<|sep|><|end_of_msg|>",
    ),
    "minimax-m3": (
        "]~b]ai\n",
        "{% macro xml(v) %}{% if v is mapping %}{% for k, each in v.items() %}]<]minimax[>[<{{ k }}>{{ xml(each) }}"
        "]<]minimax[>[</{{ k }}>{% endfor %}{% elif v is iterable and v is not string %}{% for each in v %}"
        "]<]minimax[>[<item>{{ xml(each) }}]<]minimax[>[</item>{% endfor %}{% elif v is boolean %}{{ v | tojson }}"
        "{% else %}{{ v }}{% endif %}{% endmacro %}"
        "{% if m.reasoning %}<mm:think>{{ m.reasoning }}</mm:think>{% else %}</mm:think>{% endif %}{{ m.content }}"
        "{% if m.tool_calls %}]<]minimax[>[<tool_call>\n"
        + CALLS
        + ']<]minimax[>[<invoke name="'
        + NAME
        + '">{{ xml(call.function.arguments) }}]<]minimax[>[</invoke>\n{% endfor %}]<]minimax[>[</tool_call>'
        "{% endif %}",
    ),
    "minicpm5": (
        "<|im_start|>assistant\n",
        XML_THOUGHT
        + CALLS
        + "{% if m.content or not loop.first %}\n{% endif %}"
        + '<function name="'
        + NAME
        + '">{% for k, v in call.function.arguments.items() %}<param name="{{ k }}">'
        "{% if v is string and ('<' in v or '&' in v or '\n' in v) %}<![CDATA[{{ v }}]]>{% else %}{{ v }}{% endif %}"
        "</param>{% endfor %}</function>{% endfor %}",
    ),
    "minicpm3": (
        "<|im_start|>assistant\n",
        "{% if m.reasoning %}<|thought_start|>\n{{ m.reasoning }}\n<|thought_end|>\n{% endif %}"
        "{% if m.tool_calls %}<|tool_call_start|>\n```python\n"
        + CALLS
        + PYTHON_CALL
        + "{{ '\n' if not loop.last }}{% endfor %}\n```\n<|tool_call_end|>\n{% endif %}{{ m.content }}",
    ),
    "apertus": (
        "<|assistant_start|>",
        "{% if m.reasoning %}<|inner_prefix|>{{ m.reasoning }}<|inner_suffix|>{% endif %}{{ m.content }}"
        "{% if m.tool_calls %}<|tools_prefix|>["
        + CALLS
        + '{"'
        + NAME
        + '": '
        + JSON
        + "}{{ ', ' if not loop.last }}{% endfor %}]<|tools_suffix|>{% endif %}",
    ),
    "functionary": (
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "{% if m.content %}>>>all\n{{ m.content }}{% endif %}" + CALLS + ">>>" + NAME + "\n" + JSON + "{% endfor %}",
    ),
    "tool-calls": (
        "Question: hi\n",
        PLAIN_THOUGHT
        + "{% if m.tool_calls %}\n<tool_calls>["
        + CALLS
        + '{"name": "'
        + NAME
        + '", "arguments": '
        + JSON
        + ', "id": "{{ call.id }}"}{{ ", " if not loop.last }}{% endfor %}]</tool_calls>{% endif %}',
    ),
    "think": ("<think>", "{% if m.reasoning %}<think>\n{{ m.reasoning }}\n</think>\n\n{% endif %}{{ m.content }}"),
}
HAS_IDS = {"kimi", "mistral", "mistral-list", "lfm2", "tool-calls", "solar-open"}
"""Families whose models write the ids."""
LATE_IDS = {"mistral-list", "lfm2", "tool-calls"}
"""Those of them with ids behind the arguments: streamed ids are the server's."""
HAS_REASONING = set(BY_NAME) - {"mistral-list", "llama", "llama4", "functiongemma", "functionary"}
ALWAYS_THOUGHT = {"hunyuan3", "hunyuan3-preview", "solar-open2", "minimax-m3"}
"""Families whose templates write the end of a reasoning in front of each content."""
ONE_CALL = {"gpt-oss"}
NO_TEXT_WITH_CALLS = {"llama", "llama4"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "other_text": {"$ref": "#/$defs/text"},
                    "number": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "flag": {"enum": [True, False]},
                    "items": {"type": "array", "items": {}},
                    "inner": {"allOf": [{"type": "object"}]},
                },
                "$defs": {"text": {"type": "string"}},
            },
        },
    }
    for name in ("weather", "get_time", "a.b-c")
]
PIECES = [
    *(
        "</tool_call>",
        "<tool_call>",
        "<think>",
        "</think>",
        "</function>",
        "<parameter=x>",
        "</parameter>",
        "</arg_value>",
    ),
    *(
        "<arg_key>",
        "<|tool_call_end|>",
        "<｜tool▁call▁end｜>",
        "\n```",
        "<tool_call|>",
        "[TOOL_CALLS]",
        "[/THINK]",
        "<|call|>",
    ),
    *(
        '"',
        "'",
        "\\",
        "{",
        "}",
        "[",
        "]",
        ", ",
        ": ",
        "\n",
        "\t",
        "  ",
        " ",
        "é",
        "🦊",
        "\u2028",
        "null",
        "1",
        "a",
        "<",
        "|",
    ),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
PROSE = st.lists(
    st.sampled_from(['"', "'", "\\", " ", "  ", "\n", "é", "🦊", "a", "B.", "1", "<", "{"]), max_size=8
).map("".join)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "other_text": TEXTS,
        "number": st.none() | st.integers(-(10**9), 10**9) | st.integers(-(10**25), 10**25),
        "flag": st.booleans(),
        "items": st.lists(TEXTS | st.integers(-9, 9) | st.none(), max_size=3),
        "inner": st.dictionaries(st.sampled_from(["key", "Łódź", "x_1"]), TEXTS | st.booleans(), max_size=2),
    },
)


@st.composite
def messages(draw, family):
    most = 0 if family == "think" else 1 if family in ONE_CALL else 3
    calls = draw(st.lists(st.tuples(st.sampled_from(["weather", "get_time", "a.b-c"]), ARGUMENTS), max_size=most))
    content = draw(PROSE) if not (calls and family in NO_TEXT_WITH_CALLS) else ""
    if calls or family in NO_TEXT_WITH_CALLS:
        content = content.strip("\n") if content.strip() else ""  # line breaks in front of a call are the template's
    reasoning = draw(PROSE).strip("\n") if family in HAS_REASONING else ""
    if reasoning:
        reasoning, content = f"a{reasoning}b", content.lstrip("\n")
    if family in ALWAYS_THOUGHT:
        content = content.lstrip("\n")
    if content and draw(st.booleans()):
        content = f"Use {draw(st.sampled_from(['<think>', '</think>', '[THINK]', '`<tool_call>`', '<|x|>']))} {content}"
    ids = draw(
        st.lists(
            st.text(string.ascii_letters + string.digits, min_size=9, max_size=9), min_size=3, max_size=3, unique=True
        )
    )
    first = draw(st.integers(0, 20))
    made = []
    for index, (name, arguments) in enumerate(calls):
        call_id = f"functions.{name}:{first + index}" if family == "kimi" else ids[index]
        made.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return {"content": content, "reasoning": reasoning, "tool_calls": made}


def written(family, message):
    """What the model writes."""
    body = TEMPLATES[family][1]
    source = "{% set m = messages[0] %}" + body
    texts, _ = render_jinja_template([[{"role": "assistant", **message}]], chat_template=source)
    return texts[0]


def read(family, prompt, pieces, tools=TOOLS):
    parser = AnswerParser(BY_NAME[family], prompt, tools)
    steps = [*map(parser.push, pieces), parser.flush()]
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in joined_calls(steps)
    ]
    content, reasoning = ("".join(getattr(step, name) for step in steps) for name in ("content", "reasoning"))
    streamed = [piece["id"] for step in steps for piece in step.tool_calls if "id" in piece]
    return {"content": content, "reasoning": reasoning, "tool_calls": calls}, streamed


def is_ambiguous(family, message):
    """Whether a text of the message is, in its place, what the format has around texts."""
    values = [
        value
        for call in message["tool_calls"]
        for value in call["function"]["arguments"].values()
        if isinstance(value, str)
    ]
    values += [
        json.dumps(v, ensure_ascii=False)
        for c in message["tool_calls"]
        for v in c["function"]["arguments"].values()
        if not isinstance(v, str)
    ]
    if family in ("qwen-xml", "seed-oss"):
        return any(re.search(r"</parameter>\s*(?:<parameter=|</function>|\Z)", value) for value in values)
    if family == "minimax":
        return any(re.search(r'</parameter>\s*(?:<parameter name="|</invoke>|\Z)', value) for value in values)
    if family in ("glm", "hunyuan3-preview"):
        return any(re.search(r"</arg_value>\s*(?:<arg_key>|</tool_call>|\Z)", value) for value in values)
    if family == "minimax-m3":  # where no schema says what a text is
        arguments = [call["function"]["arguments"] for call in message["tool_calls"]]
        inner = [value for each in arguments for value in (each.get("items") or [None])]
        inner += [value for each in arguments for value in (each.get("inner") or {}).values()]
        return (
            any("number" in each and each["number"] is None for each in arguments)
            or not all(isinstance(value, str) for value in inner if value is not None)
            or any(value is None for each in arguments for value in each.get("items") or [])
        )
    return False


def without_ids(message):
    return {**message, "tool_calls": [{k: v for k, v in call.items() if k != "id"} for call in message["tool_calls"]]}


ALIKE = {"functiongemma", "lfm2", "cohere", "seed-oss", "tool-calls", "deepseek-dsml", "hunyuan3-preview", "minicpm3"}
"""Families whose format is that of another one with other texts around it."""


@pytest.mark.parametrize("family", [thorough(name) if name in ALIKE else name for name in sorted(BY_NAME)])
@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_messages_come_back(family, data):
    message = data.draw(messages(family))
    assume(not is_ambiguous(family, message))
    prompt = TEMPLATES[family][0]
    text = written(family, message)
    if family == "think" and message["reasoning"]:
        text = text.removeprefix("<think>")  # the prompt has it
    elif family == "think":
        prompt = "Question: hi\n"
    cut = data.draw(st.integers(0, len(text)))
    for pieces in ([text], list(text), [text[:cut], text[cut:]]):
        found, streamed = read(family, prompt, pieces)
        assert without_ids(found) == without_ids(message), text
        if family in HAS_IDS:
            assert found == message
        if family in HAS_IDS - LATE_IDS:
            assert streamed == [call["id"] for call in message["tool_calls"]]
        assert len(set(streamed)) == len(message["tool_calls"])


def test_every_family_has_a_template():
    assert set(TEMPLATES) == set(BY_NAME)
