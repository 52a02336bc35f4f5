"""Requests larger than the cache: refused where they cannot begin, ended where they outgrow it, never left waiting."""

import concurrent.futures
import dataclasses

import httpx
import pytest
from running_server import ENGINE, RunningServer

from torchax_serve import serve

OPTIONS = dataclasses.replace(ENGINE, max_num_seqs=4, kv_cache_memory_bytes=1 << 20)
PLAIN = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def small():
    with serve(engine=OPTIONS) as model:
        model.engine.check_integrity = True
        running = RunningServer(model)
        yield running
        running.stop()


@pytest.fixture
def asked(small):
    with httpx.Client(base_url=small.url, timeout=60) as http:
        yield lambda **fields: http.post("/v1/completions", json={**PLAIN, **fields})


def test_a_prompt_larger_than_the_cache_is_refused(small, asked):
    num_tokens = min(group.num_pages for group in small.model.engine.stats().scheduler.pages) * OPTIONS.page_size
    assert num_tokens < 450
    known = asked().json()["choices"]
    answer = asked(prompt=[5 + index % 100 for index in range(num_tokens + 20)])
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error", answer.text
    assert asked().json()["choices"] == known
    assert small.pages_are_back(small.model)


def test_answers_that_outgrow_the_cache_end_by_length(small, asked):
    """Alone, and of several together, which make room for each other first."""
    known = asked().json()["choices"]
    alone = asked(max_tokens=480).json()
    assert alone["choices"][0]["finish_reason"] == "length" and 8 < alone["usage"]["completion_tokens"] < 480
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda index: asked(max_tokens=480, prompt=f"Tale {index}").json(), range(6)))
    assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"length"}
    assert all(answer["usage"]["completion_tokens"] > 8 for answer in answers)
    assert asked().json()["choices"] == known
    assert small.pages_are_back(small.model)
