"""Clients that leave, and clients that do not read: their pages come back, and others notice nothing."""

import contextlib
import json
import os
import random
import socket
import threading
import time

import pytest

from torchax_serve.engine.engine import MAX_IN_FLIGHT
from torchax_serve.server.options import ConnectionLimits

LONG = {"ignore_eos": True, "max_tokens": 400}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me a story."}]}
PLAIN = {"model": "tiny", "prompt": "Once upon a time"}
ROUTES = [
    *(("/v1/chat/completions", {**CHAT, **LONG, "stream": stream}) for stream in (False, True)),
    *(("/v1/completions", {**PLAIN, **LONG, "stream": stream}) for stream in (False, True)),
    ("/v1/chat/completions/render", CHAT),
    ("/v1/embeddings", {"model": "tiny", "input": ["Once upon a time"] * 20, "pooling": "mean"}),
    ("/tokenize", {"prompt": "Once upon a time. " * 500}),
    ("/detokenize", {"tokens": [5] * 2000}),
]


def send(server, path, body):
    connection = socket.create_connection(server.address, timeout=60)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_frees_its_pages(server, model, path, body, stream, n):
    """Counted in steps of the engine, which waits until the server has noticed: seconds depend on the machine."""
    engine, has_left = model.engine, threading.Event()
    with send(server, path, {**body, **LONG, "stream": stream, "n": n, "temperature": 1}) as connection:
        wait_until(lambda: engine.stats().scheduler.num_running)
        if stream:
            assert connection.recv(1000)
        engine._run_on_engine_thread(lambda: has_left.wait(60))
    wait_until(lambda: not server.context.num_in_flight)
    num_steps = engine.stats().num_steps
    has_left.set()
    assert server.pages_are_back(model, within_s=60)
    assert engine.stats().num_steps - num_steps <= (MAX_IN_FLIGHT + 1) * engine._scheduler.config.max_num_steps < 100


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_computed_for_a_client_that_leaves_is_found_again(server, model, http, stream):
    """The pages that its prompt and its tokens have filled; salts tell what is asked here from all else."""
    body = {**PLAIN, **LONG, "temperature": 0}
    fields = {"prompt": model.tokenizer.encode(f"Two clients met, stream {stream}."), "max_tokens": 120}
    known = http.post("/v1/completions", json={**body, **fields, "cache_salt": "known", "return_token_ids": True})
    token_ids = known.json()["choices"][0]["token_ids"]
    salted = {**body, "prompt": fields["prompt"], "cache_salt": f"left {stream}"}
    least = len(fields["prompt"]) + 64
    page_size = model.engine._scheduler.config.page_size

    def num_pages():  # of the layers that see all of the prompt
        return max(group.num_used for group in model.engine.stats().scheduler.pages)

    with send(server, "/v1/completions", {**salted, "stream": stream}):
        wait_until(lambda: num_pages() * page_size > least + 2 * page_size)  # pages are taken a step ahead
    assert server.pages_are_back(model, within_s=5)
    again = {**salted, "prompt": fields["prompt"] + token_ids[:64], "max_tokens": 1}
    usage = http.post("/v1/completions", json=again).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= least - page_size


def test_clients_cut_at_random_leave_a_server_that_is_well(server, model, http):
    rng = random.Random(5)
    known = http.post("/v1/completions", json={**PLAIN, "max_tokens": 8}).json()["choices"]
    for _ in range(int(os.environ.get("TORCHAX_SERVE_NUM_CUTS", "60"))):
        connection = send(server, *rng.choice(ROUTES))
        time.sleep(rng.random() * 0.05)
        if rng.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
        connection.close()
    assert server.pages_are_back(model, within_s=5)
    assert http.post("/v1/completions", json={**PLAIN, "max_tokens": 8}).json()["choices"] == known
    wait_until(lambda: not server.context.num_in_flight)  # the last one is counted down behind its last byte


def test_a_half_closed_connection_is_closed(server, model):
    for stream in (False, True):
        with send(server, "/v1/completions", {**PLAIN, **LONG, "stream": stream}) as connection:
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
        assert server.pages_are_back(model, within_s=5)


def wait_until(is_so, within_s=60):
    until = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_clients_that_do_not_read_are_dropped(start_server, model):
    impatient = start_server(connection=ConnectionLimits(write_timeout_s=1.0))
    for listener in impatient.server._listener._sockets:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of its connections; or 2.5 MB fit into each
    counts = impatient.server._listener._counts
    with contextlib.ExitStack() as stalled:
        connections = []
        for number in range(1, 5):
            connection = stalled.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect(impatient.address)
            body = json.dumps({**PLAIN, "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 4})
            head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            connections.append(connection)
            wait_until(lambda number=number: counts.total == number)
        wait_until(lambda: counts.total == 0)  # nobody has closed a connection: the deadline does
        assert impatient.pages_are_back(model, within_s=60)
        for connection in connections:
            with pytest.raises(ConnectionResetError):
                while piece := connection.recv(65536):
                    assert b"[DONE]" not in piece
                raise ConnectionResetError  # the end came in time, with an answer that is not complete


def test_silence_is_filled_with_comments(start_server, model):
    patient = start_server(keep_alive_s=0.05)
    model.engine._run_on_engine_thread(lambda: time.sleep(0.6))
    with send(patient, "/v1/completions", {**PLAIN, "max_tokens": 4, "stream": True}) as connection:
        received = b""
        while b"data: [DONE]" not in received:
            piece = connection.recv(65536)
            assert piece
            received += piece
    before, _, after = received.partition(b"data: {")
    assert before.count(b": keep-alive\n\n") >= 5
    assert after


def test_a_full_queue_is_429_with_a_time_to_retry(start_server, model):
    few = start_server()
    held = []
    answers = []
    for _ in range(90):  # 8 run, 64 wait
        held.append(send(few, "/v1/completions", {**PLAIN, **LONG}))
    for connection in held:
        connection.settimeout(0.01)
    until = time.monotonic() + 20
    while not any(b" 429 " in answer for answer in answers) and time.monotonic() < until:
        for connection in held:
            try:
                answers.append(connection.recv(4096))
            except TimeoutError:
                continue
    refused = next(answer for answer in answers if b" 429 " in answer)
    assert b"retry-after: 1" in refused and b"rate_limit_exceeded" in refused
    for connection in held:
        connection.close()
    assert few.pages_are_back(model, within_s=5)
