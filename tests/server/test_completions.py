"""``/v1/completions`` by OpenAI's own client, and lm-eval's requests for log-likelihoods."""

import openai
import pytest
from tokenizers.processors import TemplateProcessing

from torchax_serve import SamplingParams
from torchax_serve.engine.admission import Admission

PROMPT = "Once upon a time"


@pytest.mark.parametrize("kind", ["text", "ids", "texts", "lists of ids"])
def test_prompts_of_every_kind(client, model, kind):
    ids = model.tokenizer(PROMPT)["input_ids"]
    prompt = {"text": PROMPT, "ids": ids, "texts": [PROMPT, "Hello"], "lists of ids": [ids, ids]}[kind]
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=6)
    prompts = prompt if kind in ("texts", "lists of ids") else [prompt]
    expected = model.generate_batch(prompts, SamplingParams(max_new_tokens=6))
    assert [choice.text for choice in answer.choices] == [each.text for each in expected]
    assert answer.usage.completion_tokens == sum(len(each.token_ids) for each in expected)
    assert answer.usage.prompt_tokens == sum(each.prompt_len for each in expected)


def test_a_prompt_that_would_wait_with_too_many_tokens_is_429(http, server, model, monkeypatch):
    assert server.pages_are_back(model)
    monkeypatch.setattr(model.engine, "admission", Admission(0, max_num_waiting=64, max_num_waiting_tokens=13))
    body = {"model": "tiny", "max_tokens": 2}
    refused = http.post("/v1/completions", json=body | {"prompt": [5] * 20})
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    error = refused.json()["error"]
    assert error["code"] == "rate_limit_exceeded" and "tokens that wait" in error["message"]
    assert server.pages_are_back(model)
    assert http.post("/v1/completions", json=body | {"prompt": [5] * 6}).status_code == 200


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
    ],
)
def test_a_proxy_sets_the_priority_by_vllms_header(http, model, monkeypatch, route, body):
    seen, make = [], model.engine._input_processor.make
    monkeypatch.setattr(
        model.engine._input_processor, "make", lambda request: (seen.append(request.priority), make(request))[1]
    )
    body |= {"model": "tiny"}
    for headers, given in (({}, {}), ({}, {"priority": 3}), ({"X-Vllm-Priority": "-7"}, {"priority": 3})):
        assert http.post(route, json=body | given, headers=headers).status_code == 200
    assert seen == [0, 3, -7]
    for wrong in ("high", "1.5", "", "9" * 19):
        answer = http.post(route, json=body, headers={"X-Vllm-Priority": wrong})
        assert answer.status_code == 400
        assert "X-Vllm-Priority: expected a whole number of at most 18 digits, got" in answer.text


def test_sixteen_tokens_by_default(client):
    answer = client.completions.create(model="tiny", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


def test_a_streamed_completion_equals_a_complete_one(client):
    fields = {"model": "tiny", "prompt": [PROMPT, "Hello"], "max_tokens": 8, "logprobs": 2}
    complete = client.completions.create(**fields)
    texts, tokens = {0: "", 1: ""}, {0: [], 1: []}
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert list(texts.values()) == [choice.text for choice in complete.choices]
    assert list(tokens.values()) == [choice.logprobs.tokens for choice in complete.choices]


def test_echo_with_log_probabilities_of_the_prompt(client, model):
    ids = model.tokenizer(PROMPT)["input_ids"]
    answer = client.completions.create(model="tiny", prompt=ids, max_tokens=1, echo=True, logprobs=1, temperature=0)
    found = answer.choices[0].logprobs
    completion = model.generate_batch([ids], SamplingParams(max_new_tokens=1, logprobs=1, prompt_logprobs=1))[0]
    expected = [None if each is None else each.logprob for each in completion.prompt_logprobs]
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:-1] == pytest.approx(expected[1:])
    assert len(found.tokens) == len(found.top_logprobs) == len(ids) + 1
    assert answer.choices[0].text.endswith(completion.text)


def test_a_prompt_can_be_scored_without_an_answer(client):
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == PROMPT
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.prompt_tokens
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (0, "length")


def test_prompt_log_probabilities_as_vllm_spells_them(client, model):
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 2})
    first, second, *_ = answer.choices[0].prompt_logprobs
    ids = model.tokenizer(PROMPT)["input_ids"]
    assert first is None and str(ids[1]) in second
    assert sorted(entry["rank"] for entry in second.values() if entry["rank"]) == [1, 2]


def test_bad_words_are_never_written(client, model):
    full = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8).choices[0].text
    word = full.split()[0]
    text = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=8, extra_body={"bad_words": [word]}
    ).choices[0]
    assert word not in text.text.split()


def test_an_empty_text_is_a_prompt_where_the_tokenizer_adds_a_token(client, http, model):
    begin = model.tokenizer("")["input_ids"]
    options = {"max_tokens": 3, "echo": True, "logprobs": 1, "extra_body": {"return_token_ids": True}}
    answer = client.completions.create(model="tiny", prompt=["", "Hi"], **options)
    assert [each.prompt_token_ids for each in answer.choices] == [begin, model.tokenizer("Hi")["input_ids"]]
    (expected,) = model.generate_batch([begin], SamplingParams(max_new_tokens=3))
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert answer.choices[0].logprobs.text_offset[:2] == [0, 0]
    backend = model.tokenizer.backend_tokenizer
    own, backend.post_processor = backend.post_processor, TemplateProcessing(single="$A", special_tokens=[])
    try:
        refused = http.post("/v1/completions", json={"model": "tiny", "prompt": "", "max_tokens": 1})
    finally:
        backend.post_processor = own
    assert refused.status_code == 400 and refused.json()["error"]["message"] == (
        "prompt[0]: expected some text, got an empty string, to which the tokenizer of tiny adds no token; "
        "write at least one character"
    )


@pytest.mark.parametrize("ids", [[-1], [1536], [2**40], []])
def test_token_ids_outside_of_the_vocabulary_are_refused(http, ids):
    response = http.post("/v1/completions", json={"model": "tiny", "prompt": ids, "max_tokens": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


def test_a_prompt_longer_than_the_context_is_refused(http):
    response = http.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 600, "max_tokens": 1})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_answers_to_one_prompt_share_its_pages(client, model):
    """Each is the one that it is by itself; the prompt is computed once, and counted once."""
    prompt, options = "Once upon a time there was a king who had a very long name and " * 4, {"temperature": 1.0}
    before = model.stats().scheduler
    answer = client.completions.create(
        model="tiny", prompt=prompt, n=5, seed=11, max_tokens=6, extra_body={"cache_salt": "together"}, **options
    )
    after = model.stats().scheduler
    prompt_len = answer.usage.prompt_tokens
    assert after.num_prompt_tokens - before.num_prompt_tokens == 5 * prompt_len
    assert after.num_hit_tokens - before.num_hit_tokens == 4 * (prompt_len - 1)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    for index, choice in enumerate(answer.choices):
        alone = client.completions.create(
            model="tiny", prompt=prompt, seed=11 + index, max_tokens=6, extra_body={"cache_salt": str(index)}, **options
        )
        assert choice.text == alone.choices[0].text


def test_of_answers_that_do_not_fit_into_the_queue_none_is_taken(client, server, model):
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="tiny", prompt="Hi", n=100, temperature=1, max_tokens=200)  # 8 run, 64 wait
    assert server.pages_are_back(model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 1e308}, "temperature: expected a number > 0 and <= 3.4e+38, got 1e+308; "),
        ({"temperature": 1e-40}, "temperature: expected a number > 0, at least 1.2e-38, got 1e-40; "),
        ({"temperature": -1}, "temperature: expected a number >= 0, got -1.0; 0 is greedy"),
        ({"top_k": -2}, "top_k: expected a whole number >= -1, got -2; 0 and -1 switch it off"),
        (
            {"logprobs": -2},
            "logprobs: expected a whole number >= -1, got -2; 0 gives that of the sampled token only, -1 all",
        ),
        ({"logprobs": 21}, "logprobs: expected at most 20, got 21; --max-logprobs allows more"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: expected at most 20, got -1, those of the whole vocabulary; "),
        ({"bad_words": [""]}, "bad_words: expected at most 256 texts of 1 to 1024 characters, got one of 0 characters"),
        ({"bad_words": ["a"] * 257}, "bad_words: expected at most 256 texts of 1 to 1024 characters, got 257 texts"),
        ({"stream": True, "stream_options": {"x": 1}}, "unknown field 'stream_options.x'; leave it out"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs: expected one grammar of the answer, got structured_outputs.choice next to ",
        ),
    ],
)
def test_errors_name_the_limit_that_was_passed(http, fields, message):
    response = http.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)
