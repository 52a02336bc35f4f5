"""Structured output: every answer follows its grammar, and a bad grammar is a 400 within seconds."""

import concurrent.futures
import json
import re
import time

import openai
import psutil
import pydantic
import pytest
from thorough import thorough

from torchax_serve.sampling.json_schema import closed

QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def ask(client, **fields):
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=200, **fields)
    return answer.choices[0]


@pytest.mark.parametrize("temperature", [thorough(0), 1.5])
def test_a_json_schema_is_followed(client, temperature):
    schema = {"name": "person", "schema": SCHEMA, "strict": True}
    choice = ask(
        client, response_format={"type": "json_schema", "json_schema": schema}, temperature=temperature, seed=1
    )
    value = json.loads(choice.message.content)
    assert set(value) == {"name", "age"} and 0 <= value["age"] <= 99 and len(value["name"]) <= 8
    assert choice.finish_reason == "stop"


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    good: bool
    grade: int = pydantic.Field(ge=1, le=5)


def test_the_clients_stream_helper_reads_the_answer(client):
    fields = {"model": "tiny", "messages": QUESTION, "response_format": Person, "max_tokens": 50, "logprobs": True}
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    (choice,) = final.choices
    assert isinstance(choice.message.parsed, Person)
    assert "".join(event.delta for event in events if event.type == "content.delta") == choice.message.content
    (done,) = [event for event in events if event.type == "content.done"]
    assert done.parsed == choice.message.parsed == Person.model_validate_json(choice.message.content)
    assert len(choice.logprobs.content) == final.usage.completion_tokens


def test_the_clients_own_parse_reads_the_answer(client):
    answer = client.chat.completions.parse(model="tiny", messages=QUESTION, response_format=Person, max_tokens=50)
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_objects_have_no_properties_that_the_schema_does_not_name():
    plain = {"type": "object", "properties": {"a": {"properties": {"b": {}}}, "c": {"enum": [{"properties": {}}]}}}
    inner = {"properties": {"b": {}}, "additionalProperties": False}
    outer = {"type": "object", "properties": {"a": inner, "c": {"enum": [{"properties": {}}]}}}
    assert closed(plain) == {**outer, "additionalProperties": False}
    said = {"properties": {"a": {}}, "additionalProperties": True}
    assert closed(said) == said
    joined = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    names = [{"properties": {key: {}, other: {}}, "additionalProperties": False} for key, other in ("ab", "ba")]
    assert closed(joined) == {"allOf": names}


def test_any_json_object(client):
    choice = ask(client, response_format={"type": "json_object"}, temperature=1, seed=3)
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)
    else:
        assert choice.message.content.startswith("{")


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": r"[0-9]{3}-[a-f]{2}"}, r"\d{3}-[a-f]{2}"),
        ({"structured_outputs": {"regex": r"(yes|no)!"}}, r"(yes|no)!"),
        ({"guided_choice": ["red", "green and blue", 'a "quoted" one']}, r'red|green and blue|a "quoted" one'),
        ({"structured_outputs": {"choice": ["ł", "ó🦊"]}}, "ł|ó🦊"),
        ({"structured_outputs": {"grammar": 'start: "a" B\nB: /[0-9]{2}/'}}, r"a\d\d"),
        ({"guided_grammar": 'root ::= "x" [0-9] [0-9]'}, r"x\d\d"),
        ({"structured_outputs": {"json": {"enum": ["on", "off"]}}}, '"on"|"off"'),
    ],
)
def test_grammars_of_every_kind(client, fields, pattern):
    for seed in range(3):
        choice = ask(client, temperature=1.2, seed=seed, extra_body=fields)
        assert re.fullmatch(pattern, choice.message.content), choice.message.content
        assert choice.finish_reason == "stop"
    text = client.completions.create(model="tiny", prompt="Hi", max_tokens=50, extra_body=fields).choices[0].text
    assert re.fullmatch(pattern, text)


def test_a_streamed_answer_follows_its_grammar_too(client):
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(
            model="tiny", messages=QUESTION, stream=True, extra_body={"guided_regex": "[a-z]{5}"}
        )
    ]
    assert re.fullmatch("[a-z]{5}", "".join(pieces))


def test_answers_next_to_it_are_not_changed(client, model):
    questions = [f"What is {number} plus 4?" for number in range(6)]
    expected = [model.chat(question) for question in questions]

    def plain(question):
        answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": question}])
        return answer.choices[0].message.content

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        held = [pool.submit(ask, client, extra_body={"guided_regex": "[0-9]{30}"}) for _ in range(3)]
        assert list(pool.map(plain, questions)) == expected
        assert all(re.fullmatch("[0-9]{30}", each.result().message.content) for each in held)


NUMBER = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
TAG = {
    "type": "structural_tag",
    "structures": [
        {"begin": "e[", "schema": NUMBER, "end": "]"},
        {"begin": "a=", "schema": {"enum": ["x", "y"]}, "end": ";"},
    ],
    "triggers": ["e", "a="],
}
UNTAGGED = {name: value for name, value in TAG.items() if name != "type"}


@pytest.mark.parametrize(
    "fields",
    [{"response_format": TAG}, {"extra_body": {"structured_outputs": {"structural_tag": json.dumps(UNTAGGED)}}}],
    ids=["response_format", "structured_outputs"],
)
def test_structural_tags_hold_what_a_trigger_begins(client, fields):
    """The rest of the text is free; every trigger in it begins a tag, whose content follows its schema."""
    num_tags = 0
    for seed in range(6):
        story = [{"role": "user", "content": "Tell me a story about the sea."}]
        answer = client.chat.completions.create(
            model="tiny", messages=story, max_tokens=80, temperature=1.5, seed=seed, **fields
        )
        text = answer.choices[0].message.content
        free = re.sub(r'e\[\{"n": [0-9]\}\]|a="[xy]";', "|", text)
        num_tags += free.count("|")
        unfinished = re.sub(r"(e(\[.{0,8})?|a=.{0,4})$", "", free)  # at the limit of tokens
        assert "e" not in unfinished and "a=" not in unfinished, text
    assert num_tags > 3


def test_structural_tags_with_a_format(client):
    number = {"type": "json_schema", "json_schema": NUMBER}
    tags = {"type": "tags_with_separator", "tags": [{"begin": "e[", "content": number, "end": "]"}], "separator": ","}
    form = {"type": "sequence", "elements": [{"type": "const_string", "value": "So: "}, {**tags, "at_least_one": True}]}
    choice = ask(client, response_format={"type": "structural_tag", "format": {**form}}, temperature=1.5, seed=1)
    cut = "" if choice.finish_reason == "stop" else r".{0,12}"
    assert re.fullmatch(r'So: (e\[\{"n": [0-9]\}\],)*(e\[\{"n": [0-9]\}\])?' + cut, choice.message.content)
    assert choice.message.content.startswith('So: e[{"n": ')


@pytest.mark.parametrize(
    "tag",
    [
        {"type": "structural_tag", "format": {"type": "any_tokens"}},
        {**TAG, "triggers": ["<"]},
        {**TAG, "triggers": []},
        {**TAG, "structures": [{"begin": "e["}]},
        {**TAG, "structures": [{"begin": "e[", "schema": {}, "end": 3}]},
        {**TAG, "at_least_one": True},
    ],
)
def test_structural_tags_of_another_form_are_named(client, tag):
    with pytest.raises(openai.BadRequestError, match="structural_tag") as caught:
        ask(client, response_format=tag)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "(unclosed"}, "guided_regex"),
        ({"guided_regex": "(?<=look)behind"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "start: undefined"}, "guided_grammar"),
        ({"structured_outputs": {"shape": "round"}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"guided_json": {"type": "object", "patternProperties": {"(": {}}}}, "guided_json"),
        ({"guided_json": {"type": "string", "unevaluatedItems": False, "not": {}}}, "guided_json"),
        ({"guided_json": {"$ref": "https://example.com/schema"}}, "guided_json"),
        ({"guided_json": {"enum": ["x" * 9] * 40_000}}, "guided_json"),
    ],
)
def test_bad_grammars_are_named(http, fields, param):
    response = http.post("/v1/chat/completions", json={"model": "tiny", "messages": QUESTION, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_leave_no_token_are_named(http, client, stream):
    """Before the request runs where that is known, and else as its error, which concerns no other request."""
    (token_id,) = http.post("/tokenize", json={"model": "tiny", "prompt": "a", "add_special_tokens": False}).json()[
        "tokens"
    ]
    body = {"model": "tiny", "messages": QUESTION, "stream": stream}
    first = http.post("/v1/chat/completions", json={**body, "guided_regex": "[0-9]+", "allowed_token_ids": [token_id]})
    assert first.status_code == 400
    late = {**body, "guided_regex": "[0-9]{2}", "min_tokens": 20}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        plain = pool.submit(ask, client, extra_body={"guided_regex": "[0-9]{30}"})
        later = pool.submit(http.post, "/v1/chat/completions", json=late).result()
        assert re.fullmatch("[0-9]{30}", plain.result().message.content)
    assert later.status_code == (200 if stream else 400)
    events = later.text.strip().split("\n\n")
    errors = [first.json(), json.loads(events[-1].removeprefix("data: "))]
    for found, field in zip(errors, ("allowed_token_ids", "min_tokens"), strict=True):
        error = found["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", field, "invalid_value")
        assert error["message"].startswith(f"{field}, structured output: expected a token that may follow ")


HOSTILE = [
    {"guided_regex": "(a+)+b"},
    {"guided_regex": "((a{1,100}){1,100}){1,100}"},
    {"guided_regex": "(" * 30_000 + "a" + ")" * 30_000},
    {"guided_regex": "(.*a){30}.{500}"},
    {"guided_grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    {"guided_json": {"type": "array", "items": {"type": "array", "items": {}}, "minItems": 10**9}},
    {"guided_json": {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(40)]}] * 8}},
    {"guided_choice": [f"{index:05d}" for index in range(1024)]},
    {"guided_json": {"enum": [f"{index:05d}" for index in range(100_000)]}},
    {"guided_grammar": "start: " + " | ".join(f'"{index}"' for index in range(30_000))},
]


@pytest.mark.parametrize("fields", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_grammars_are_answered_within_seconds(http, server, fields):
    """Also where other programs use the processors: the event loop's own work decides how long others wait for it."""
    before = set(psutil.Process().children(recursive=True))
    server.context.loop_lag.worst_busy_s = 0.0
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        body = {"model": "tiny", "messages": QUESTION, "max_tokens": 8, **fields}
        asked = pool.submit(http.post, "/v1/chat/completions", json=body)
        while not asked.done():
            assert http.get("/health").status_code == 200
            time.sleep(0.05)
    response = asked.result()
    assert time.monotonic() - began < 9  # 5 of them for the check, and what other programs take meanwhile
    assert server.context.loop_lag.worst_busy_s < 0.1
    assert response.status_code in (200, 400), response.text
    assert not [child for child in psutil.Process().children(recursive=True) if child not in before]
    known = http.post("/v1/completions", json={"model": "tiny", "prompt": "Hi", "max_tokens": 2})
    assert known.status_code == 200
