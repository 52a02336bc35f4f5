"""Metrics: their names, what they count, and that nobody's text becomes a label or a line of the log."""

import io
import json
import logging
import time

import jax
import pytest
from prometheus_client.parser import text_string_to_metric_families

from torchax_serve.server.logs import handler

SECRET = "my-secret-prompt-of-the-test"
VLLM = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:num_preemptions",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_success",
}


def families(http):
    return {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}


def value(http, name, **labels):
    for family in families(http).values():
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return 0.0


def test_tokens_and_answers_are_counted(http, client):
    def counts():
        return (
            value(http, "vllm:request_success_total", finished_reason="length"),
            value(http, "vllm:request_generation_tokens_sum"),
            value(http, "vllm:time_to_first_token_seconds_count"),
            value(http, "torchax_serve_http_requests_total", route="/v1/completions", status="200"),
        )

    before = counts()
    client.completions.create(model="tiny", prompt="Hi", max_tokens=7, extra_body={"ignore_eos": True})
    until = time.monotonic() + 5
    while (after := counts())[3] == before[3] and time.monotonic() < until:  # written behind the last byte
        time.sleep(0.01)
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 7, 1, 1]
    assert value(http, "vllm:inter_token_latency_seconds_count") > 0
    assert value(http, "torchax_serve_num_requests_running") == 0


def test_compilations_are_counted(http):
    before = value(http, "torchax_serve_compilations_total"), value(http, "torchax_serve_compilation_seconds_total")
    number = time.monotonic_ns() % 10**6
    jax.jit(lambda x: x * number + 1)(3.0).block_until_ready()
    after = value(http, "torchax_serve_compilations_total"), value(http, "torchax_serve_compilation_seconds_total")
    assert after[0] > before[0] and after[1] > before[1]


def test_names_are_those_of_vllm(http, client):
    client.completions.create(model="tiny", prompt="Hi", max_tokens=2)
    assert set(families(http)) >= VLLM
    assert {name.replace("vllm:", "torchax_serve_") for name in VLLM} <= set(families(http))


def test_a_gateway_finds_the_size_of_the_cache_and_the_load(http, client, model, server, monkeypatch):
    client.completions.create(model="tiny", prompt="Hi", max_tokens=2)
    (sample,) = families(http)["vllm:cache_config_info"].samples
    assert sample.value == 1
    pages = [group for group in model.engine.stats().scheduler.pages if group.page_size]
    assert sample.labels == {"block_size": str(pages[0].page_size), "num_gpu_blocks": str(pages[0].num_pages)}
    assert "vllm:lora_requests_info" not in families(http)  # a model without adapters
    assert http.get("/load").json() == {"server_load": 0}
    until = time.monotonic() + 5
    while server.context.num_in_flight and time.monotonic() < until:  # an answer ends behind its last byte
        time.sleep(0.01)
    monkeypatch.setattr(server.context, "num_in_flight", 5)
    assert http.get("/load").json() == {"server_load": 5}


def test_labels_are_bounded_whatever_clients_send(http):
    def num_samples():
        return sum(len(family.samples) for family in families(http).values())

    http.get("/unknown/0")
    http.post("/v1/completions", json={"model": "m0"})
    http.request("BREW", "/v1/models")
    before = num_samples()
    for index in range(60):
        http.get(f"/unknown/{index}")
        http.post("/v1/completions", json={"model": f"m{index}", "prompt": SECRET})
        http.request(f"BREW{index % 7}", "/v1/models", headers={"Authorization": f"Bearer {index}"})
    assert num_samples() <= before + 2
    assert SECRET not in http.get("/metrics").text


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_log_lines_have_the_id_and_no_text_of_a_request(http, log_format):
    written = io.StringIO()
    lines = handler(log_format, written)
    access = logging.getLogger("torchax_serve.access")
    access.setLevel(logging.INFO)
    access.addHandler(lines)
    try:
        http.post(
            f"/v1/completions?{SECRET}", json={"model": "tiny", "prompt": SECRET}, headers={"X-Request-Id": "the-id"}
        )
        until = time.monotonic() + 5
        while "the-id" not in written.getvalue() and time.monotonic() < until:  # written behind the last byte
            time.sleep(0.01)
    finally:
        access.removeHandler(lines)
        access.setLevel(logging.NOTSET)
    text = written.getvalue()
    assert "the-id" in text and "/v1/completions" in text and SECRET not in text
    if log_format == "json":
        line = json.loads(text.splitlines()[-1])
        assert (line["status"], line["route"], line["request_id"]) == (200, "/v1/completions", "the-id")


def test_errors_of_the_server_show_nothing(http, model, monkeypatch):
    from torchax_serve.server import model_service

    def fail(*args, **kwargs):
        raise RuntimeError(f"about {SECRET} in /home/user")

    monkeypatch.setattr(model_service, "encode_prompt", fail)
    response = http.post("/v1/completions", json={"model": "tiny", "prompt": SECRET})
    assert response.status_code == 500
    assert SECRET not in response.text and "/home" not in response.text and "Runtime" not in response.text
