"""``/v1/chat/completions`` by OpenAI's own client; the tokens are those of the model's own calls."""

import asyncio
import json
import time

import openai
import pytest

from torchax_serve import SamplingParams

QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]


def test_an_answer_is_that_of_the_model(client, model):
    answer = client.chat.completions.create(model="tiny", messages=QUESTION)
    assert answer.choices[0].message.content == model.chat(QUESTION)
    assert answer.choices[0].message.role == "assistant"
    assert (answer.choices[0].finish_reason, answer.model, answer.object) == ("stop", "tiny", "chat.completion")
    stream = model.chat(QUESTION, stream=True)
    assert answer.usage.completion_tokens == len(list(stream) and stream.token_ids)
    assert answer.usage.prompt_tokens == stream.stats.prompt_tokens


def test_a_streamed_answer_equals_a_complete_one(client):
    complete = client.chat.completions.create(model="tiny", messages=QUESTION, logprobs=True, top_logprobs=2)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=QUESTION,
            stream=True,
            logprobs=True,
            top_logprobs=2,
            stream_options={"include_usage": True},
        )
    )
    *others, last = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in others)
    assert text == complete.choices[0].message.content
    assert others[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in others][-1] == "stop"
    assert all(chunk.usage is None for chunk in others) and last.choices == []
    assert last.usage.completion_tokens == complete.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    streamed = [entry for chunk in others if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in complete.choices[0].logprobs.content]


def test_log_probabilities_join_to_the_text(client):
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, logprobs=True, top_logprobs=3, extra_body={"skip_special_tokens": False}
    ).choices[0]
    entries = answer.logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == answer.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= 0 and entry.top_logprobs[0].logprob >= entry.logprob
        assert entry.token == entry.top_logprobs[0].token  # greedy


def test_several_answers_have_seeds_of_their_own(client, model):
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, n=3, temperature=1.5, seed=7)
    texts = [choice.message.content for choice in answer.choices]
    expected = [model.chat(QUESTION, SamplingParams(temperature=1.5, seed=7 + index)) for index in range(3)]
    assert texts == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    merged = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(
        model="tiny", messages=QUESTION, n=3, temperature=1.5, seed=7, stream=True
    ):
        for choice in chunk.choices:
            merged[choice.index] += choice.delta.content or ""
    assert list(merged.values()) == expected


def test_a_stop_string_ends_the_answer(client, model):
    full = model.chat(QUESTION)
    stop = full[4:7]
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, stop=[stop]).choices[0]
    assert answer.message.content == full[: full.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, stop=stop, extra_body={"include_stop_str_in_output": True}
    ).choices[0]
    assert answer.message.content == full[: full.index(stop)] + stop


def test_max_tokens_ends_the_answer(client):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model="tiny", messages=QUESTION, **{name: 2})
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 2)


def test_fields_without_effect_are_taken(client):
    plain = client.chat.completions.create(model="tiny", messages=QUESTION)
    answer = client.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        user="u",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
        verbosity="low",
        reasoning_effort="low",
        response_format={"type": "text"},
        modalities=["text"],
    )
    assert answer.choices[0].message.content == plain.choices[0].message.content


def test_contents_may_be_parts_and_the_system_role_developer(client, model):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be short."}]},
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "3 plus 4?"}]},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages)
    messages[0]["role"] = "system"
    assert answer.choices[0].message.content == model.chat(messages)


def test_token_ids_and_cached_tokens(client, model):
    prompt = [{"role": "user", "content": "Tell me a long story about a fox, a crow and a piece of cheese. " * 3}]
    for _ in range(2):
        answer = client.chat.completions.create(
            model="tiny", messages=prompt, max_tokens=4, extra_body={"return_token_ids": True}
        )
    assert (
        answer.choices[0].token_ids
        == model.generate_batch([answer.prompt_token_ids], SamplingParams(max_new_tokens=4))[0].token_ids
    )
    assert 0 < answer.usage.prompt_tokens_details.cached_tokens < answer.usage.prompt_tokens
    salted = client.chat.completions.create(
        model="tiny", messages=prompt, max_tokens=4, extra_body={"cache_salt": "mine"}
    )
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_async_streams_run_together(server, model):
    async def ask(client, question):
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": question}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all(questions):
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, question) for question in questions))

    questions = [f"What is {number} plus 4?" for number in range(12)]
    assert asyncio.run(ask_all(questions)) == [model.chat(question) for question in questions]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"model": "other"}, "model", "model_not_found"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": "warm"}, "temperature", "invalid_value"),
        ({"top_p": 2}, "top_p", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 2**31}, "max_tokens", "invalid_value"),
        ({"max_tokens": 10_000}, "messages", "context_length_exceeded"),
        ({"n": 10**9}, "n", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
        ({"stop": ["a"] * 20_000}, "stop", "invalid_value"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio", "unsupported_parameter"),
        ({"tmperature": 1}, "tmperature", "unknown_parameter"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids", "invalid_value"),
        ({"allowed_token_ids": [1536]}, "allowed_token_ids", "invalid_value"),
        ({"min_tokens": 2**62}, "min_tokens", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0]", "invalid_value"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2}, "allowed_token_ids", "invalid_value"),
    ],
)
def test_bad_fields_are_named(http, fields, param, code):
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 3, **fields}
    response = http.post("/v1/chat/completions", content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == (404 if code == "model_not_found" else 400), error
    assert (error["param"], error["code"]) == (param, code), error
    assert set(error) == {"message", "type", "param", "code"}


def test_every_error_class_of_the_client(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=QUESTION, temperature=-1)


def test_a_request_that_has_waited_too_long_is_told_to_come_again(start_server, model):
    hurried = start_server(queue_timeout_s=0.1)
    with openai.OpenAI(base_url=f"{hurried.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        for stream in (False, True):
            model.engine._run_on_engine_thread(lambda: time.sleep(0.6))
            with pytest.raises(openai.APIError) as caught:
                list(client.chat.completions.create(model="tiny", messages=QUESTION, stream=stream))
            assert caught.value.code == "queue_deadline_exceeded"
            if not stream:
                assert caught.value.status_code == 503
                assert caught.value.response.headers["retry-after"] == "1"
        answer = client.chat.completions.create(model="tiny", messages=QUESTION)
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_first_token_that_takes_too_long_is_told(start_server, model, stream):
    hurried = start_server(first_token_timeout_s=0.2)
    with openai.OpenAI(base_url=f"{hurried.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        model.engine._run_on_engine_thread(lambda: time.sleep(1.5))
        with pytest.raises(openai.APIError) as caught:
            list(client.chat.completions.create(model="tiny", messages=QUESTION, stream=stream))
        assert caught.value.code == "first_token_deadline_exceeded"
        assert stream or caught.value.status_code == 504
    assert hurried.pages_are_back(model)
