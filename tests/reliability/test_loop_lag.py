"""Large bodies and hostile schemas do not block the event loop: no piece of its work takes more than 100 ms."""

import asyncio
import concurrent.futures
import json
import threading
import time

import httpx

from torchax_serve.server.loop_lag import PERIOD_S, LoopLag

MOST_S = 0.1
"""Longest that the loop may be blocked, in seconds."""
CHAT = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "max_tokens": 2, "prompt": "hi"}
MIB = 1 << 20


def nested(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def formatted(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def hostile():
    """Yields (path, body) of requests that take long to parse, to check or to compile."""
    yield "/v1/chat/completions", json.dumps({**CHAT, "messages": [{"role": "user", "content": "x" * (3 * MIB)}]})
    yield "/v1/chat/completions", json.dumps({**CHAT, "messages": [{"role": "user", "content": "a"}] * 60_000})
    yield "/v1/chat/completions", json.dumps({**CHAT, "metadata": {str(n): "x" for n in range(100_000)}})
    yield "/v1/chat/completions", json.dumps({**CHAT, "logit_bias": {str(n): 1 for n in range(60_000)}})
    yield "/v1/chat/completions", json.dumps({**CHAT, "response_format": formatted(nested(30))})
    tools = [{"type": "function", "function": {"name": "a"}}] * 20_000
    yield "/v1/chat/completions", json.dumps({**CHAT, "tools": tools})
    yield "/v1/completions", json.dumps({**TEXT, "prompt": list(range(1, 2)) * 400_000})
    yield "/v1/completions", json.dumps({**TEXT, "prompt": [[1]] * 200_000})
    yield "/v1/completions", json.dumps({**TEXT, "stop": ["ab"] * 200_000})
    yield "/v1/completions", json.dumps({**TEXT, "stop_token_ids": list(range(300_000))})
    yield "/v1/completions", json.dumps({**TEXT, "guided_choice": [f"choice {n}" for n in range(1000)]})
    yield "/v1/completions", json.dumps({**TEXT, "guided_json": {"enum": [f"value {n}" for n in range(9_000)]}})
    yield "/v1/completions", json.dumps({**TEXT, "guided_regex": "(" * 30_000 + ")" * 30_000})
    yield "/v1/completions", json.dumps({**TEXT, "guided_regex": "((a+)+b){1,1000}"})
    yield "/v1/completions", "[" * 200_000
    yield "/v1/completions", '{"prompt": ' + "9" * (2 * MIB) + "}"
    yield "/v1/embeddings", json.dumps({"model": "tiny", "input": ["word " * 20] * 20_000})
    yield "/tokenize", json.dumps({"model": "tiny", "prompt": "word " * 190_000})
    yield "/detokenize", json.dumps({"model": "tiny", "tokens": [5] * 300_000})


def test_the_loop_is_never_blocked(start_server):
    server = start_server()
    requests = [(path, body.encode()) for path, body in hostile()]
    assert sum(len(body) for _, body in requests) > 15 * MIB
    lag = server.context.loop_lag
    lag.worst_busy_s = 0.0  # what came before is another test's

    def send(request):
        path, body = request
        headers = {"Content-Type": "application/json"}
        return path, httpx.post(f"{server.url}{path}", content=body, headers=headers, timeout=120).status_code

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(send, requests))
    assert {status for _, status in statuses} <= {200, 400, 404, 413, 429}, statuses
    assert 0 < lag.worst_busy_s < MOST_S


def test_the_lag_is_seen_in_the_metrics(start_server):
    server = start_server()
    until = time.monotonic() + 20
    while "torchax_serve_event_loop_lag_seconds" not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < until
    blocked = threading.Event()

    def block():
        end = time.thread_time() + 0.3
        while time.thread_time() < end:
            pass
        blocked.set()

    server.server._loop.call_soon_threadsafe(block)
    assert blocked.wait(60)
    httpx.get(f"{server.url}/livez")
    assert server.context.loop_lag.worst_busy_s >= 0.3


def test_lag_of_a_loop_that_is_blocked():
    async def run():
        lag = LoopLag()
        watcher = asyncio.create_task(lag.watch())
        await asyncio.sleep(2 * PERIOD_S)
        time.sleep(0.25)
        await asyncio.sleep(2 * PERIOD_S)
        watcher.cancel()
        return lag

    lag = asyncio.run(run())
    assert lag.worst_busy_s < 0.2 < lag.worst_s
    assert lag.take() > 0.2 and lag.take() == 0.0
