"""Memory of a server in a process of its own, while clients ask for too much or send what nobody should."""

import os
import socket

import httpx
import pytest
from thorough import except_for

MIB = 1 << 20
LIMIT = 16 * MIB
MOST_S = 1.0
"""Longest that such a request may take, in seconds of the processor, which other programs do not change."""
LONG_LISTS = ("prompts", "token ids", "allowed tokens", "biases")
"""Of up to a million values, each of which is read; on a machine with a load of 30 that took 1.2 s."""
LONG = "x" * (10 * MIB)
# Bodies of JSON that ask for too much; none may cost more memory than LIMIT, or more than an error.
ABSURD = {
    "n": {"n": 10**9},
    "min_tokens 2^31": {"min_tokens": 2**31},
    "min_tokens 2^62": {"min_tokens": 2**62},
    "stop strings": {"stop": ["a"] * 20_000},
    "cache_salt": {"cache_salt": LONG},
    "model": {"model": LONG},
    "prompt": {"prompt": LONG},
    "prompts": {"prompt": ["a"] * 1_000_000},
    "token ids": {"prompt": [5] * 1_000_000},
    "bad words": {"bad_words": ["b"] * 100_000},
    "allowed tokens": {"allowed_token_ids": list(range(200_000))},
    "biases": {"logit_bias": {str(index): 1 for index in range(300_000)}},
    "no token is left": {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2},
}


# Those take seconds to read.
@pytest.mark.parametrize(
    "name", except_for(ABSURD.keys() - {"prompts", "token ids", "allowed tokens", "biases"}, ABSURD)
)
def test_requests_for_too_much_cost_an_error_no_memory_and_no_time(process, name):
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 4}
    with httpx.Client(base_url=process.url, timeout=300) as http:
        known = http.post("/v1/completions", json=body).json()["choices"]
        for _ in range(4):  # each thread that parses bodies keeps some memory of its own
            http.post("/v1/completions", json={**body, **ABSURD[name]})
        grown, taken = [], []
        for _ in range(3):  # an allocator takes more at times; what is lost is lost each time
            before, began = process.memory_bytes(), process.processor_s()
            answer = http.post("/v1/completions", json={**body, **ABSURD[name]})
            assert answer.status_code in (400, 404), answer.text
            assert len(answer.text) < 4000
            grown.append(process.memory_bytes() - before)
            taken.append(process.processor_s() - began)
        assert min(grown) < LIMIT, grown
        assert min(taken) < (3 * MOST_S if name in LONG_LISTS else MOST_S), taken
        assert http.post("/v1/completions", json=body).json()["choices"] == known


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n"
RUDE = {
    "headers of 100 MB": lambda: (GET, *(b"X: " + b"a" * MIB for _ in range(100))),
    "5,000 headers": lambda: (GET, b"X: a\r\n" * 5000),
    "URL of 1 MB": lambda: (b"GET /" + b"a" * MIB + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",),
    "a million chunks": lambda: (
        HEAD,
        b"Transfer-Encoding: chunked\r\n\r\n",
        *(b"1\r\n \r\n" * 1000,) * 1000,
        b"0\r\n\r\n",
    ),
    "half a body": lambda: (HEAD, b"Content-Length: 1000000\r\n\r\n", b" " * 500_000),
    "a body of 100 MB": lambda: (HEAD, b"Content-Length: 104857600\r\n\r\n", *(b" " * MIB,) * 100),
    "a compressed body": lambda: (
        HEAD,
        b"Content-Encoding: gzip\r\nContent-Length: 1000000\r\n\r\n",
        b"\x1f\x8b" * 500_000,
    ),
}


def rude_exchange(process, parts):
    """Sends parts and no more; what comes back until the server closes."""
    received = b""
    with socket.create_connection(("127.0.0.1", process.port), timeout=20) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                received += piece
        except OSError:
            pass
    return received


@pytest.mark.parametrize("name", RUDE)
def test_rude_clients_cost_no_memory(process, name):
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 4}
    with httpx.Client(base_url=process.url, timeout=300) as http:
        known = http.post("/v1/completions", json=body).json()["choices"]
        rude_exchange(process, RUDE[name]())
        before = process.memory_bytes()
        received = rude_exchange(process, RUDE[name]())
        assert not received or received.startswith(b"HTTP/1.1 4"), received[:200]
        assert process.memory_bytes() - before < LIMIT
        assert http.post("/v1/completions", json=body).json()["choices"] == known


def test_names_that_nobody_knows_leave_nothing_behind(process):
    num_names = int(os.environ.get("TORCHAX_SERVE_NUM_NAMES", "600"))
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 4}
    sizes = []
    with httpx.Client(base_url=process.url, timeout=300) as http:
        assert http.post("/v1/completions", json=body).status_code == 200
        for index in range(num_names):
            kind = index % 4
            if kind == 0:
                http.get(f"/unknown/{index}")
            elif kind == 1:
                http.post("/v1/completions", json={**body, "model": f"m{index}"})
            elif kind == 2:
                http.request(f"M{index}", "/v1/models")
            else:
                http.get("/v1/models", headers={"Authorization": f"Bearer {index}", "X-Request-Id": str(index)})
            if index in (num_names // 3, num_names - 1):
                sizes.append((process.memory_bytes(), http.get("/metrics").text.count("\n")))
    (memory, num_lines), (last_memory, last_num_lines) = sizes
    assert last_num_lines == num_lines
    assert last_memory - memory < LIMIT
