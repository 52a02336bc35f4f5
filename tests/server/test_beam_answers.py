"""Beam search over HTTP: the sequences of transformers' ``generate``, by OpenAI's client."""

import time

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from model_adapters.loading.model_source import EMBEDDED

PROMPT = "Once upon a time"
BEAMS = {"use_beam_search": True}


@pytest.fixture(scope="module")
def eager():
    return AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()


def texts_of(eager, model, ids, num_answers, **options):
    """Texts of the best sequences by transformers."""
    inputs = torch.tensor([ids])
    found = eager.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        num_return_sequences=num_answers,
        do_sample=False,
        pad_token_id=0,
        **{"num_beams": num_answers, **options},
    )
    return model.tokenizer.batch_decode(found[:, len(ids) :], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"n": 3}, {}),
        ({"n": 2, "best_of": 4, "extra_body": {"length_penalty": 2.0}}, {"num_beams": 4, "length_penalty": 2.0}),
        ({"n": 3, "extra_body": {"early_stopping": True}}, {"early_stopping": True}),
    ],
)
def test_choices_are_the_best_sequences(client, model, eager, fields, options):
    ids = model.tokenizer(PROMPT)["input_ids"]
    body = {**BEAMS, **fields.pop("extra_body", {})}
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, extra_body=body, **fields)
    expected = texts_of(eager, model, ids, fields["n"], max_new_tokens=12, eos_token_id=[1, 4], **options)
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.prompt_tokens == len(ids)
    assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}


def test_chats_and_several_prompts(client, model, eager):
    messages = [{"role": "user", "content": "Hi"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, n=2, max_tokens=8, extra_body=BEAMS)
    ids = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    expected = texts_of(eager, model, ids, 2, max_new_tokens=8, eos_token_id=[1, 4])
    assert [choice.message.content for choice in answer.choices] == expected
    prompts = [PROMPT, "The dog"]
    found = client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=5, extra_body=BEAMS)
    each = [texts_of(eager, model, model.tokenizer(text)["input_ids"], 2, max_new_tokens=5) for text in prompts]
    assert [choice.text for choice in found.choices] == each[0] + each[1]
    assert found.usage.completion_tokens == 20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**BEAMS, "stream": True}, "stream: expected none next to use_beam_search"),
        ({**BEAMS, "logprobs": 1}, "logprobs: expected none next to use_beam_search"),
        ({**BEAMS, "temperature": 0.7}, "temperature: expected none next to use_beam_search"),
        ({**BEAMS, "guided_regex": "a"}, "guided_regex: expected none next to use_beam_search"),
        ({**BEAMS, "n": 3, "best_of": 2}, "best_of: expected n=3 to 128 beams, got 2"),
        ({**BEAMS, "prompt": [PROMPT] * 10, "best_of": 16}, "best_of: expected at most 128 answers to all prompts"),
        ({**BEAMS, "n": 30}, "n: expected at most 18 beams, whose next tokens --max-logprobs allows, got 30"),
        ({"length_penalty": 2.0}, "length_penalty: expected use_beam_search true with it, got none; leave it out"),
        ({"early_stopping": True}, "early_stopping: expected use_beam_search true with it, got none; leave it out"),
    ],
)
def test_what_a_search_has_not_is_named(http, fields, message):
    response = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, **fields})
    assert response.status_code == 400 and response.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize("num_answers", [1, 8])
def test_a_search_ends_with_its_reader(server, model, num_answers):
    impatient = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=0.05)
    with impatient, pytest.raises(openai.APITimeoutError):
        impatient.completions.create(
            model="tiny", prompt=PROMPT, n=num_answers, best_of=8, max_tokens=400, extra_body=BEAMS
        )
    assert server.pages_are_back(model, within_s=20)
    time.sleep(0.2)  # a step that was being submitted ends
    num_steps = model.engine.stats().num_steps
    time.sleep(0.5)
    assert model.engine.stats().num_steps == num_steps


def test_stop_tokens_end_sequences_that_ignore_the_models_own(client, model, eager):
    ids = model.tokenizer(PROMPT)["input_ids"]

    def sequences(stop_ids):
        fields = {**BEAMS, "ignore_eos": True, "return_token_ids": True, "stop_token_ids": stop_ids}
        answer = client.completions.create(model="tiny", prompt=PROMPT, n=2, max_tokens=12, extra_body=fields)
        return [choice.model_extra["token_ids"] for choice in answer.choices]

    free = sequences([])
    assert [len(each) for each in free] == [12, 12]
    stop_id = free[0][5]
    options = {"max_new_tokens": 12, "num_beams": 2, "num_return_sequences": 2, "do_sample": False, "pad_token_id": -1}
    inputs = torch.tensor([ids])
    rows = eager.generate(inputs, attention_mask=torch.ones_like(inputs), eos_token_id=stop_id, **options)
    expected = [[token_id for token_id in row[len(ids) :].tolist() if token_id >= 0] for row in rows]
    assert sequences([stop_id]) == expected != free


def test_the_first_step_of_a_search_has_the_time_of_a_first_token(start_server):
    url = start_server(first_token_timeout_s=1e-6).url
    response = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, **BEAMS, "n": 2})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "first_token_deadline_exceeded"
