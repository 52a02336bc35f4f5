"""Chat templates as they really are: slow, hostile, blind to what they are given; and messages as clients send them."""

import dataclasses
import json
import subprocess
import sys
import time

import numpy as np
import pytest
from eager_model import TEMPLATE, eager_model
from hypothesis import given, settings
from hypothesis import strategies as st

from model_adapters.errors import ChatTemplateError, InvalidArgumentError, TorchaxServeError, UnsupportedArgumentError
from torchax_serve.sampling_params import SamplingParams
from torchax_serve.text import chat, chat_prompt_ids
from torchax_serve.text.chat_template import ChatOptions
from torchax_serve.text.template_renderer import TemplateJob, TemplateRenderer

USER = {"role": "user", "content": "Hi"}
EVERYTHING = (
    "{% if tools %}T{{ tools | tojson }}{% endif %}{% if documents %}D{{ documents[0].text }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}C{{ m.tool_calls | tojson }}{% endif %}"
    "{% if m.reasoning_content %}R{{ m.reasoning_content }}{% endif %}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<quick>{% endif %}"
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def prompt_of(template, messages, system=None, **options):
    model = eager_model(chat_template=template)
    model.config = type(model.config)(**{**model.config.to_dict(), "max_position_embeddings": 10**6})
    ids = chat_prompt_ids(model, messages, system=system, options=ChatOptions(**options))
    return model.tokenizer.decode(ids)


def expected_of(template, messages, **kwargs):
    tokenizer = eager_model(chat_template=template).tokenizer
    kwargs = {"add_generation_prompt": True, "tokenize": False, **kwargs}
    text = tokenizer.apply_chat_template(messages, **kwargs)
    return tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def renderer():
    renderer = TemplateRenderer()
    yield renderer
    renderer.close()


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set n = namespace(x='aaaaaa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "{{ 'a' | center(10**10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_endless_template_ends_at_the_deadline_and_the_next_one_renders(renderer, template):
    renderer.render(TemplateJob("x", [], {}))  # has started
    began = time.monotonic()
    try:
        texts = renderer.render(TemplateJob(template, [[USER]], {}), deadline_s=1.5).texts
        error = texts[0]
    except ChatTemplateError as caught:
        error = caught
    assert time.monotonic() - began < 30
    assert isinstance(error, ChatTemplateError)
    assert "\n" not in str(error)
    assert renderer.render(TemplateJob("{{ messages[0].content }}", [[USER]], {})).texts == ["Hi"]


def test_template_sees_only_its_arguments(renderer, tmp_path):
    """The sandbox is transformers' own; that nothing of Python can be reached from it is jinja's promise."""
    leaves = [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ range.__self__ }}",
    ]
    for template in leaves:
        job = TemplateJob(template, [[USER]], {})
        text = renderer.render(job).texts[0]
        assert isinstance(text, ChatTemplateError) or text.strip() == "", template


def test_killed_process_is_replaced(renderer):
    renderer.render(TemplateJob("x", [[USER]], {}))
    renderer._process.kill()
    renderer._process.wait()
    assert renderer.render(TemplateJob("y", [[USER]], {})).texts == ["y"]


def test_chat_reports_an_endless_template_in_one_line(monkeypatch):
    monkeypatch.setattr("torchax_serve.text.template_renderer.TemplateRenderer.render.__defaults__", (1.5,))
    with pytest.raises(ChatTemplateError, match=r"chat template of tiny does not render within 1\.5 s") as caught:
        chat(eager_model(chat_template=ENDLESS[0]), "Hi")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["You are kind.", "", " \n"])
def test_empty_system_prompt_does_not_count_as_dropped(content):
    """Equal to the template's default, or empty."""
    template = (
        "{% if messages[0].role == 'system' %}{{ messages[0].content or 'You are kind.' }}{% set messages = "
        "messages[1:] %}{% else %}You are kind.{% endif %}{% for m in messages %}<{{ m.content }}>{% endfor %}"
    )
    messages = [{"role": "system", "content": content}, USER]
    assert prompt_of(template, messages) == prompt_of(template, [USER], content) == expected_of(template, messages)


@pytest.mark.parametrize("role", ["tool", "function", "developer", "observer"])
def test_messages_of_a_dropped_role_are_refused(role):
    template = "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match=f"leaves messages of role '{role}' out; write what they say"):
        prompt_of(template, [USER, {"role": role, "content": "7"}])
    messages = [USER, {"role": role, "content": "7"}]
    assert prompt_of(TEMPLATE, messages) == expected_of(TEMPLATE, messages)


def test_tools_calls_and_their_results():
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "call_1"}]},
        {"role": "tool", "content": "3", "tool_call_id": "call_1", "name": "add"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
    expected = expected_of(EVERYTHING, messages, tools=tools)
    assert prompt_of(EVERYTHING, messages, tools=tools) == expected
    as_json = json.dumps(CALL["function"]["arguments"])
    call = {**CALL, "id": "call_1", "function": {**CALL["function"], "arguments": as_json}}
    messages[1] = {"role": "assistant", "tool_calls": (call,)}
    assert prompt_of(EVERYTHING, messages, tools=tools) == expected


OLDER = (  # as that of DeepSeek R1: calls of messages without a content, arguments as text
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "{{ 'C ' + c.function.name + ' ' + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("content", [None, ""])
def test_calls_are_shown_as_older_templates_expect_them(content):
    messages = [USER, {"role": "assistant", "content": content, "tool_calls": [CALL, CALL]}, USER]
    expected = [{"role": "user", "content": """HiC add {"a": 1}C add {"a": 1}Hi"""}]
    assert prompt_of(OLDER, messages) == expected_of("{{ messages[0].content }}", expected)


@pytest.mark.parametrize(
    "shown", ["{{ m.tool_calls[0].function.name if m.tool_calls }}", "{{ 'a call' if m.tool_calls }}"]
)
def test_a_call_that_the_template_leaves_out_is_refused(shown):
    template = f"{{% for m in messages %}}{{{{ m.content }}}}{shown}{{% endfor %}}"
    other = {**CALL, "function": {**CALL["function"], "name": "subtract"}}
    with pytest.raises(ChatTemplateError, match=r"leaves a call of messages\[1\] out; write one call a message"):
        prompt_of(template, [USER, {"role": "assistant", "content": "", "tool_calls": [CALL, other]}, USER])


@pytest.mark.parametrize("call_id", ["functions.add:0", "add:12"])
def test_a_call_may_be_shown_by_an_id_that_has_its_name(call_id):
    """As Kimi K2's template shows it."""
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}{% endfor %}"
    )
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": call_id}]}, USER]
    assert prompt_of(template, messages) == expected_of(template, messages)
    messages[1]["tool_calls"] = [{**CALL, "id": "call_add"}]
    with pytest.raises(ChatTemplateError, match=r"leaves a call of messages\[1\] out"):
        prompt_of(template, messages)


def test_function_becomes_the_tool_schema_of_transformers():
    def add(a: int, b: int) -> int:
        """
        Adds two numbers.

        Args:
            a: the one
            b: the other
        """
        return a + b

    model = eager_model(chat_template=EVERYTHING)
    prompts = []
    model.new_tokens = lambda request: prompts.append(model.tokenizer.decode(request.prompt_ids)) or iter([5])
    model.config = type(model.config)(**{**model.config.to_dict(), "max_position_embeddings": 10**6})
    chat(model, "Hi", tools=[add])
    assert prompts == [expected_of(EVERYTHING, [USER], tools=[add])]
    with pytest.raises(InvalidArgumentError, match=r"tools\[0\]: expected a function with type hints"):
        chat(model, "Hi", tools=[lambda a: a])


def test_documents_and_variables_of_the_template():
    documents = [{"title": "A", "text": "B"}]
    assert prompt_of(EVERYTHING, [USER], documents=documents) == expected_of(EVERYTHING, [USER], documents=documents)
    quick = prompt_of(EVERYTHING, [USER], variables={"enable_thinking": False})
    assert quick == expected_of(EVERYTHING, [USER], enable_thinking=False)
    assert quick.endswith("<quick>")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": [CALL]}, "tools: the chat template of tiny has no place for tools"),
        ({"documents": [{"text": "x"}]}, "documents: the chat template of tiny has no place for documents"),
        ({"variables": {"enable_thinking": False}}, "reads .*, got 'enable_thinking'; leave it out"),
        ({"variables": {"messages": []}}, "got 'messages', which is an argument of chat"),
        ({"variables": {"range": 1}}, "got 'range'"),
    ],
)
def test_options_that_the_template_does_not_read_are_refused(options, words):
    with pytest.raises(UnsupportedArgumentError, match=words):
        prompt_of(TEMPLATE, [USER], **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": "add"}, "tools: expected a list or None, got 'add'"),
        ({"tools": [7]}, r"tools\[0\]: expected a JSON schema"),
        ({"documents": [object()]}, "documents: expected values of JSON"),
        ({"chat_template_kwargs": []}, r"chat_template_kwargs: expected a dict or None, got \[\]"),
        ({"continue_final_message": 1}, "continue_final_message: expected True or False, got 1"),
        ({"continue_final_message": True}, "expected a last message of role assistant, got one of role 'user'"),
    ],
)
def test_options_of_other_types_are_refused(options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        chat(eager_model(), "Hi", **options)


def test_a_last_message_of_the_assistant_is_continued_or_refused():
    messages = [USER, {"role": "assistant", "content": "The answer"}]
    with pytest.raises(InvalidArgumentError, match="got the assistant's; continue_final_message=True continues it"):
        chat(eager_model(), messages)
    expected = expected_of(EVERYTHING, messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt_of(EVERYTHING, messages, continues=True) == expected
    assert expected.endswith("The answer")


def test_keys_that_the_template_does_not_read_are_refused():
    with pytest.raises(UnsupportedArgumentError, match=r"messages\[0\]\.name: the chat template of tiny does not read"):
        prompt_of(TEMPLATE, [{**USER, "name": "Ada"}])
    with pytest.raises(UnsupportedArgumentError, match=r"messages\[1\]\.tool_calls: the chat template of tiny"):
        prompt_of(TEMPLATE, [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, USER])
    assert prompt_of(TEMPLATE, [{**USER, "name": None, "tool_calls": []}]) == expected_of(TEMPLATE, [USER])
    whole = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    assert "Ada" in prompt_of(whole, [{**USER, "name": "Ada"}])


@pytest.mark.parametrize("kind", ["video_url", "image_url", "input_audio", "file", "refusal", "cat"])
def test_unsupported_content_parts_are_refused(kind):
    part = {"type": kind, kind: "x"}
    with pytest.raises(
        UnsupportedArgumentError, match=rf"messages\[0\]\.content\[0\]: .* got '{kind}', which no model"
    ):
        prompt_of(TEMPLATE, [{"role": "user", "content": [part, {"type": "text", "text": "Hi"}]}])
    text = {"type": "text", "text": "Hi", "cache_control": {}}
    with pytest.raises(UnsupportedArgumentError, match="got 'cache_control'; leave them out"):
        prompt_of(TEMPLATE, [{"role": "user", "content": [text]}])


def test_contents_have_the_form_that_the_template_reads():
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert prompt_of(TEMPLATE, [{"role": "user", "content": parts}]) == expected_of(
        TEMPLATE, [{"role": "user", "content": "A\nB"}]
    )
    loop = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    assert prompt_of(loop, [{"role": "user", "content": parts}]) == "[A][B]"
    assert prompt_of(loop, "Hi") == "[Hi]"  # of a string, each character would be a part without text


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user"}, r"messages\[0\]\.content: expected a text or a list of parts, got none"),
        ({"role": "user", "content": None}, r"messages\[0\]\.content: expected a text"),
        ({"role": "user", "content": 7}, r"messages\[0\]\.content: expected a text or a list of parts, got 7"),
        ({"role": "user", "content": b"Hi"}, r"messages\[0\]\.content: expected a text"),
        ({"role": "user", "content": ["Hi"]}, r"content\[0\]: expected a part like"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\]\.text: expected a string, got None"),
        ({"role": "user", "content": "\ud800"}, r"messages\[0\]\.content: expected text that UTF-8 can encode"),
        ({"role": "\udfff", "content": "Hi"}, r"messages\[0\]\.role: expected text that UTF-8"),
        ({"role": "user", "content": "Hi", 3: 4}, r"messages\[0\]: expected names of keys, got 3"),
        ({"role": "user", "content": "Hi", "x": {1: 2}}, r"messages\[0\]\.x: expected strings as keys"),
        ({"role": "user", "content": "Hi", "x": {1}}, r"messages\[0\]\.x: expected values of JSON"),
        ({"role": "assistant", "tool_calls": [{}]}, r"messages\[0\]\.tool_calls\[0\]: expected one of"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            r"tool_calls\[0\]\.arguments: expected JSON",
        ),
    ],
    ids=str,
)
def test_invalid_messages_are_refused(message, words):
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        chat(eager_model(), [message, USER])
    assert "\n" not in str(caught.value)


def test_numpy_scalars_become_numbers():
    template = "{% for m in messages %}{{ m.content }}{{ m.score }}{% endfor %}"
    assert prompt_of(template, [{**USER, "score": np.int64(3)}]) == "Hi3"


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"temperature": 0.5}, r"chat\(\) has no argument 'temperature'; write SamplingParams\(temperature=0.5\)"),
        ({"max_tokens": 5}, r"write SamplingParams\(max_new_tokens=5\)"),
        ({"max_new_tokens": 5}, r"write SamplingParams\(max_new_tokens=5\)"),
        ({"sampling_params": 5}, "give it as params"),
        ({"add_generation_prompt": True}, "continue_final_message=True continues the last one"),
        ({"toools": 5}, "did you mean tools"),
    ],
)
def test_keywords_of_other_libraries_get_a_hint(keywords, words):
    with pytest.raises(UnsupportedArgumentError, match=words):
        chat(eager_model(), "Hi", **keywords)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)
anything = st.one_of(json_values, st.binary(max_size=4), st.just("\ud800"), st.just(object()))


@settings(max_examples=60)
@given(
    st.one_of(anything, st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "x"]), anything)))
)
def test_any_messages_give_a_prompt_or_a_one_line_error(messages):
    try:
        assert prompt_of(EVERYTHING, messages)
    except TorchaxServeError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000


def test_equal_params_give_equal_answers():
    model = eager_model()
    short = SamplingParams(max_new_tokens=3)
    assert chat(model, "Hi", short) == chat(model, [USER], dataclasses.replace(short))


INTERRUPTED = """
import os, signal, time
from torchax_serve.text.template_renderer import TemplateJob, TemplateRenderer

signal.signal(signal.SIGINT, lambda *_: None)  # the parent goes on, as a chat does after an answer that was broken off
renderer = TemplateRenderer()
renderer.start()
for _ in range(3):  # while it starts, and when it is ready
    os.killpg(os.getpgrp(), signal.SIGINT)
    time.sleep(0.1)
job = TemplateJob("{{ messages[0].content }}", [[{"role": "user", "content": "Hello"}]], {})
first, process = renderer.render(job, 60).texts, renderer._process
os.killpg(os.getpgrp(), signal.SIGINT)
time.sleep(0.5)
print(first, renderer.render(job, 60).texts, renderer._process is process)
renderer.close()
"""


def test_ctrl_c_at_the_terminal_is_not_for_the_process_of_templates():
    """The terminal sends it to the whole group of processes; a traceback of another one would land on the prompt."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=300, start_new_session=True
    )
    assert (done.stdout, done.stderr) == ("['Hello'] ['Hello'] True\n", "")
