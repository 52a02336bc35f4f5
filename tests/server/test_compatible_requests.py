"""Requests as clients of vLLM and OpenAI send them: what cannot change an answer is accepted, the rest named."""

import json
import logging

import httpx
import pytest

from torchax_serve.server import notes

QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]


@pytest.fixture
def post(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield lambda path, **body: client.post(path, json=body)


def chat(post, **fields):
    answer = post("/v1/chat/completions", **{"model": "tiny", "messages": QUESTION, "max_tokens": 6, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server, path, **body):
    """Chunks of a streamed answer."""
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}, timeout=60) as response:
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]


def refusal(post, path="/v1/chat/completions", **fields):
    answer = post(path, **{"model": "tiny", "max_tokens": 6, **fields})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{**QUESTION[0], "name": "person"}]},
        {"messages": [{**QUESTION[0], "weight": 1, "cache_control": {"type": "ephemeral"}, "metadata": None}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"], "cache_control": {}}]}
            ]
        },
        {"chat_template_kwargs": {"enable_thinking": False, "some_variable": [1]}},
        {"logprobs": False, "top_logprobs": 0},
        {"logprobs": None, "top_logprobs": None, "tools": None, "tool_choice": None, "response_format": None},
        {"response_format": {"type": "text", "json_schema": None}},
        {"model": None},
        {"model": ""},
        {"truncate_prompt_tokens": -1},
        {"truncate_prompt_tokens": 300, "truncation_side": "left"},
        {"max_tokens": 6.0, "top_k": -1.0, "n": 1.0},
    ],
)
def test_what_cannot_change_an_answer_is_accepted(post, fields):
    plain, found = chat(post), chat(post, **fields)
    assert found["choices"][0]["message"] == plain["choices"][0]["message"] and found["model"] == "tiny"
    assert found["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_a_model_need_not_be_named(post):
    chats = post("/v1/chat/completions", messages=QUESTION, max_tokens=3)
    texts = post("/v1/completions", prompt="Hi", max_tokens=3)
    assert (chats.status_code, texts.status_code) == (200, 200)
    assert chats.json()["model"] == texts.json()["model"] == "tiny"
    assert post("/v1/chat/completions", model="other", messages=QUESTION).status_code == 404


def test_it_is_noted_once(post, caplog):
    notes._noted.clear()
    with caplog.at_level(logging.INFO, logger="torchax_serve.server"):
        for _ in range(2):
            chat(post, messages=[{**QUESTION[0], "weight": 1}], chat_template_kwargs={"unread": 1})
    for name in ("weight", "unread"):
        assert len([record for record in caplog.records if f"'{name}'" in record.getMessage()]) == 1


def test_a_message_of_the_assistant_may_be_the_last_one(post):
    """As OpenAI does it: the answer is a new message."""
    messages = [*QUESTION, {"role": "assistant", "content": "It is"}]
    rendered = {
        continues: post(
            "/v1/chat/completions/render", model="tiny", messages=messages, continue_final_message=continues
        ).json()["prompt"]
        for continues in (False, True)
    }
    assert rendered[True].endswith("It is") and rendered[False].startswith(rendered[True])
    begin = post("/v1/chat/completions/render", model="tiny", messages=QUESTION).json()["prompt"]
    assert rendered[False].endswith(begin[-20:])
    assert chat(post, messages=messages)["choices"][0]["finish_reason"] in ("stop", "length")


def test_no_options_of_a_stream_need_no_stream(post):
    assert chat(post, stream_options={})["choices"]


def test_an_empty_message_of_the_assistant_is_taken(post):
    assert chat(post, messages=[*QUESTION, {"role": "assistant", "content": None}, *QUESTION])["choices"]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"aa": 1, "bb": 2, "temperature": 0}, ["aa", "bb"]),
        ({"response_format": {"type": "json_object", "shema": {}}}, ["shema"]),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {}, "stric": True, "z": 1},
                }
            },
            ["stric", "z"],
        ),
        ({"response_format": {"type": "json_object", "schema": 3}}, ["response_format.schema"]),
        ({"stream": True, "stream_options": {"x": 1, "y": 2}}, ["stream_options.x", "stream_options.y"]),
        ({"audio": {"voice": "a"}, "prediction": {"a": 1}}, ["audio", "prediction"]),
        ({"truncate_prompt_tokens": 0}, ["truncate_prompt_tokens"]),
        ({"truncate_prompt_tokens": 10**6}, ["truncate_prompt_tokens"]),
    ],
)
def test_what_changes_an_answer_is_named(post, fields, names):
    message = refusal(post, messages=QUESTION, **fields)["message"]
    assert all(name in message for name in names)


def test_long_prompts_are_cut(post):
    ids = post("/tokenize", model="tiny", prompt="one two three four five six seven eight").json()["tokens"]
    fields = {"model": "tiny", "prompt": ids, "max_tokens": 2, "return_token_ids": True}
    for side, expected in (("left", ids[-4:]), ("right", ids[:4]), (None, ids[-4:])):
        answer = post("/v1/completions", **fields, truncate_prompt_tokens=4, truncation_side=side).json()
        assert answer["choices"][0]["prompt_token_ids"] == expected
    long = post("/v1/completions", **{**fields, "prompt": ids * 100}, truncate_prompt_tokens=-1).json()
    assert long["usage"]["prompt_tokens"] == 512 - 2
    assert post("/v1/completions", **{**fields, "prompt": ids * 100}).status_code == 400


PROMPTS = ["The model is", " two  spaces", "Łódź 🦊", [5, 6, 7, 8]]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("echo", [True, False])
def test_tokens_stand_where_their_offsets_say(post, server, prompt, echo):
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "logprobs": 0, "echo": echo, "temperature": 0}
    choice = post("/v1/completions", **fields).json()["choices"][0]
    found = choice["logprobs"]
    offsets = found["text_offset"]
    assert offsets == sorted(offsets) and len(offsets) == len(found["tokens"]) == len(found["top_logprobs"])
    for token, begin, end in zip(found["tokens"], offsets, [*offsets[1:], len(choice["text"])], strict=True):
        shown = choice["text"][begin:end]
        assert shown in ("", token) or "\ufffd" in token or token == f" {shown}"
    pieces = [choice for chunk in events(server, "/v1/completions", **fields) for choice in chunk["choices"]]
    assert [offset for each in pieces for offset in (each["logprobs"] or {}).get("text_offset", [])] == offsets


def test_usage_comes_with_every_piece(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"model": "tiny", "messages": QUESTION, "max_tokens": 5, "stream_options": options}
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(server, "/v1/chat/completions", **fields)]
    assert counts == sorted(counts) and counts[-1] == 5


VLLM_ANSWERS = {
    "completion": "id object created model choices service_tier system_fingerprint usage kv_transfer_params "
    "ec_transfer_params metrics",
    "completion choice": "index text logprobs finish_reason stop_reason token_ids prompt_logprobs prompt_token_ids "
    "routed_experts",
    "chat": "id object created model choices service_tier system_fingerprint usage prompt_logprobs prompt_token_ids "
    "prompt_text kv_transfer_params ec_transfer_params metrics",
    "chat choice": "index message logprobs finish_reason stop_reason token_ids routed_experts",
    "message": "role content refusal annotations audio function_call reasoning",
}
"""Fields of vLLM's complete answers, which are null where they have no value."""


def test_complete_answers_have_the_fields_of_vllm(http):
    body = {"prompt": "Hi", "max_tokens": 2}
    completion = http.post("/v1/completions", json=body).json()
    chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})
    chat = chat.json()
    parts = {
        "completion": completion,
        "completion choice": completion["choices"][0],
        "chat": chat,
        "chat choice": chat["choices"][0],
        "message": chat["choices"][0]["message"],
    }
    for name, part in parts.items():
        assert set(part) == set(VLLM_ANSWERS[name].split()), name
    chunks = http.post("/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 2, "stream": True}).text
    first, *_ = (json.loads(line[6:]) for line in chunks.splitlines() if line.startswith("data: {"))
    assert first["prompt_token_ids"] is None and first["choices"][0]["token_ids"] is None
    asked = {"return_token_ids": True, "prompt_logprobs": 0}
    choice = http.post("/v1/completions", json=body | asked).json()["choices"][0]
    assert choice["token_ids"] and choice["prompt_token_ids"] and choice["prompt_logprobs"]


def test_all_fields_that_are_wrong_are_named_at_once(post):
    body = {"prompt": "Hi", "best": 1, "nn": 2, "kv_transfer_params": {"a": 1}, "seed": "x", "stop": 5, "n": 1}
    error = post("/v1/completions", **body).json()["error"]
    named = ["unknown fields 'best', 'nn'", "kv_transfer_params: expected null", "seed: expected ", "stop: expected "]
    assert all(text in error["message"] for text in named), error
    assert (error["param"], error["code"]) == ("best", "unknown_parameter") and error["message"].count("stop:") == 1


def test_a_stop_string_may_not_be_complete_in_the_first_tokens(post):
    """`min_tokens` as in vLLM: there, stop strings are not looked for in the text of those tokens."""
    body = {"prompt": "The model", "max_tokens": 9, "allowed_token_ids": [5], "ignore_eos": True, "stop": "!"}

    def found(**fields):
        answer = post("/v1/completions", **body, **fields).json()
        choice = answer["choices"][0]
        return choice["text"], choice["finish_reason"], choice["stop_reason"], answer["usage"]["completion_tokens"]

    assert found() == ("", "stop", "!", 1)
    assert found(min_tokens=6) == ("!" * 6, "stop", "!", 7)
    assert found(min_tokens=9) == ("!" * 9, "length", None, 9)
