"""Log-probabilities of the whole vocabulary and ranks, by OpenAI's client and by eager PyTorch."""

import dataclasses

import numpy as np
import openai
import pytest
import torch
from running_server import ENGINE, RunningServer
from transformers import AutoModelForCausalLM

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import EngineOptions, SamplingParams, serve

PROMPT_IDS = [5, 17, 300, 42, 9]


@pytest.fixture(scope="module")
def all_model():
    with serve(engine=dataclasses.replace(ENGINE, max_logprobs=-1)) as model:
        yield model


@pytest.fixture(scope="module")
def all_client(all_model):
    running = RunningServer(all_model)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    running.stop()


@pytest.fixture(scope="module")
def expected():
    """Log-probabilities behind each token of the prompt and of 3 greedy tokens, [num_tokens, vocab]; the tokens."""
    eager = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT_IDS])
    with torch.no_grad():
        for _ in range(3):
            ids = torch.cat([ids, eager(ids).logits[:, -1:].argmax(-1)], 1)
        return eager(ids).logits[0].log_softmax(-1).numpy(), ids[0].tolist()


def test_all_log_probabilities_of_prompt_and_answer(all_client, expected):
    answer = all_client.completions.create(
        model="tiny",
        prompt=PROMPT_IDS,
        max_tokens=3,
        temperature=0,
        logprobs=-1,
        extra_body={"prompt_logprobs": -1, "ignore_eos": True, "return_tokens_as_token_ids": True},
    )
    logprobs, ids = expected
    assert answer.choices[0].logprobs.tokens == [f"token_id:{i}" for i in ids[len(PROMPT_IDS) :]]
    found = answer.choices[0].logprobs.top_logprobs
    for step, top in enumerate(found):
        row = logprobs[len(PROMPT_IDS) - 1 + step]
        assert len(top) == len(row)
        np.testing.assert_allclose([top[f"token_id:{i}"] for i in range(len(row))], row, atol=1e-4)
    prompt = answer.choices[0].prompt_logprobs
    for position in range(1, len(PROMPT_IDS)):
        row = logprobs[position - 1]
        of_token = prompt[position]
        np.testing.assert_allclose([of_token[str(i)]["logprob"] for i in range(len(row))], row, atol=1e-4)
        assert sorted(each["rank"] for each in of_token.values()) == list(range(1, len(row) + 1))


def test_all_log_probabilities_of_a_streamed_chat(all_client, all_model):
    vocab_size = all_model.engine.vocab_size
    stream = all_client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=2,
        logprobs=True,
        top_logprobs=-1,
        stream=True,
    )
    found = [chunk.choices[0].logprobs for chunk in stream]
    entries = [entry for logprobs in found if logprobs is not None for entry in logprobs.content]
    assert [len(entry.top_logprobs) for entry in entries] == [vocab_size] * len(entries) and entries
    for entry in entries:
        values = [each.logprob for each in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert np.exp(values).sum() == pytest.approx(1, abs=1e-4)


def test_a_token_outside_of_the_likeliest_has_its_rank(all_client, expected):
    answer = all_client.completions.create(
        model="tiny", prompt=PROMPT_IDS, max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    logprobs, _ = expected
    for position, token_id in enumerate(PROMPT_IDS[1:]):
        row = logprobs[position]
        rank = int((row >= row[token_id]).sum())
        assert answer.choices[0].prompt_logprobs[position + 1][str(token_id)]["rank"] == rank


@pytest.mark.parametrize(
    ("max_logprobs", "asked", "message"),
    [
        (3, {"logprobs": 4}, r"logprobs: expected at most 3, got 4; EngineOptions\(max_logprobs=\.\.\.\) allows more"),
        (3, {"prompt_logprobs": -1}, "prompt_logprobs: expected at most 3, got -1, those of the whole vocabulary"),
        (3, {"logprobs": 3, "prompt_logprobs": 0}, None),
    ],
)
def test_the_limit_holds(all_model, monkeypatch, max_logprobs, asked, message):
    monkeypatch.setattr(all_model.engine._runner, "max_logprobs", max_logprobs)
    params = SamplingParams(max_new_tokens=1, **asked)
    if message is None:
        assert all_model.generate_batch([PROMPT_IDS], params)[0].logprobs
        return
    with pytest.raises(InvalidArgumentError, match=message):
        all_model.generate_batch([PROMPT_IDS], params)


def test_drafts_have_twenty_at_most():
    with pytest.raises(InvalidArgumentError, match="max_logprobs: expected 0 to 20 next to speculative decoding"):
        EngineOptions(max_logprobs=-1, speculative={"method": "ngram", "num_speculative_tokens": 2})
