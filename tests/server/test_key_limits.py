"""Limits of keys: requests and tokens a minute, requests at once, models."""

import threading

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_adapters.errors import InvalidArgumentError
from torchax_serve.server.auth import ApiKeys
from torchax_serve.server.errors import ApiError
from torchax_serve.server.key_limits import KeyLimits, KeyUsage, TokenBucket

KEYS = {
    "few": "few-key-0123456789 requests_per_minute=2",
    "short": "short-key-0123456789 tokens_per_minute=60",
    "single": "single-key-0123456789 max_concurrency=1",
    "other": "other-key-0123456789 models=another",
    "free": "free-key-0123456789",
}


@pytest.fixture(scope="module")
def limited(start_server):
    return start_server(api_keys=tuple(KEYS.items()))


def client_of(limited, name):
    key = KEYS[name].split()[0]
    return openai.OpenAI(base_url=f"{limited.url}/v1", api_key=key, max_retries=0, timeout=60)


def ask(client, **options):
    return client.completions.with_raw_response.create(**{"model": "tiny", "prompt": "Hi", "max_tokens": 2, **options})


def test_requests_a_minute(limited):
    with client_of(limited, "few") as client:
        assert [ask(client).headers["x-ratelimit-remaining-requests"] for _ in range(2)] == ["1", "0"]
        with pytest.raises(openai.RateLimitError) as refused:
            ask(client)
    assert refused.value.code == "rate_limit_exceeded"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 30
    assert refused.value.response.headers["x-ratelimit-limit-requests"] == "2"
    with client_of(limited, "free") as client:
        assert not [name for name in ask(client).headers if name.startswith("x-ratelimit")]


def test_tokens_a_minute_are_those_of_prompts_and_answers(limited):
    with client_of(limited, "short") as client:
        used = client.completions.create(model="tiny", prompt="Hi", max_tokens=8, extra_body={"ignore_eos": True}).usage
        left = int(client.models.with_raw_response.list().headers["x-ratelimit-remaining-tokens"])
        assert 0 <= left - (60 - used.total_tokens) <= 10  # what has come back meanwhile
        with pytest.raises(openai.RateLimitError, match="60 tokens a minute"):
            for _ in range(20):
                ask(client, max_tokens=16, extra_body={"ignore_eos": True})


def test_requests_at_once(limited):
    with client_of(limited, "single") as client:
        stream = client.completions.create(
            model="tiny", prompt="Hi", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="at once"):
            ask(client)
        stream.close()
        ended = threading.Event()
        for _ in range(200):
            try:
                ask(client)
                break
            except openai.RateLimitError:
                ended.wait(0.05)
        else:
            raise AssertionError("the stream that was left still counts")


def test_models_of_a_key(limited):
    with client_of(limited, "other") as client:
        assert list(client.models.list()) == []
        with pytest.raises(openai.NotFoundError) as refused:
            ask(client)
    assert refused.value.code == "model_not_found"
    key = KEYS["other"].split()[0]
    answer = httpx.get(f"{limited.url}/v1/models/tiny", headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 404


@pytest.mark.parametrize(
    "words, reason",
    [
        ("speed=3", "of requests_per_minute, tokens_per_minute"),
        ("tokens_per_minute=0", "a number > 0, got '0'"),
        ("tokens_per_minute=x", "a number > 0, got 'x'"),
        ("max_concurrency=1 max_concurrency=2", "each once"),
    ],
)
def test_limits_that_are_none(words, reason):
    with pytest.raises(InvalidArgumentError, match=reason):
        ApiKeys([("alice", f"some-key-0123 {words}")])


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)), max_size=30),
)
def test_a_bucket_never_gives_more_than_a_minute_holds(per_minute, calls):
    now = [0.0]
    bucket, taken = TokenBucket(per_minute, lambda: now[0]), 0
    for pause_s, units in calls:
        now[0] += pause_s
        if bucket.level() >= units:
            bucket.take(units)
            taken += units
        assert bucket.level() <= per_minute
        assert taken <= per_minute * (1 + now[0] / 60) + 1e-6
        assert bucket.seconds_until(per_minute) <= 60 * (per_minute - bucket.level()) / per_minute + 1e-6


def test_a_refused_request_takes_nothing():
    usage = KeyUsage(KeyLimits(requests_per_minute=5, max_concurrency=1), lambda: 0.0)
    usage.begin()
    for _ in range(3):
        with pytest.raises(ApiError):
            usage.begin()
    assert usage.headers()["x-ratelimit-remaining-requests"] == "4"
    usage.end()
    usage.begin()
