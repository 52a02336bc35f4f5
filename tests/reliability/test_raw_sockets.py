"""What no HTTP library sends: oversized, unfinished and ambiguous requests, over plain sockets."""

import json
import re
import socket
import time

import psutil
import pytest

from torchax_serve.server.options import ConnectionLimits

LIMITS = ConnectionLimits(
    max_body_bytes=100_000, header_timeout_s=0.6, body_timeout_s=0.8, write_timeout_s=1.0, keep_alive_timeout_s=1
)
BODY = json.dumps({"model": "tiny", "prompt": "Hi", "max_tokens": 1}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def guarded(start_server):
    return start_server(connection=LIMITS)


def exchange(server, *parts, pause_s=0.0, timeout_s=10.0):
    """Sends parts; returns all that comes back until the server closes, None for a reset without an answer."""
    with socket.create_connection(server.address, timeout=timeout_s) as connection:
        for part in parts:
            try:
                connection.sendall(part)
            except (BrokenPipeError, ConnectionResetError):
                break
            time.sleep(pause_s)
        return read_all(connection)


def read_all(connection):
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        return received or None
    return received


def status_of(answer):
    return int(re.match(rb"HTTP/1\.1 (\d{3})", answer)[1])


def is_well(server):
    request = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
    answer = exchange(server, request, timeout_s=300)  # programs are compiled at their first use
    return status_of(answer) == 200


def test_a_plain_request_is_answered(guarded):
    assert is_well(guarded)


@pytest.mark.parametrize(
    ("name", "request_bytes", "status"),
    [
        ("header of 30 MB", b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 30_000_000, 431),
        ("5,000 headers", b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: a\r\n" * 5000 + b"\r\n", 431),
        ("101 headers", b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: a\r\n" * 100 + b"\r\n", 431),
        ("URL of 1 MB", b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 414),
        ("both lengths", HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        ("two lengths", HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400),
        ("equal lengths twice", HEAD + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", 400),
        ("negative length", HEAD + b"Content-Length: -5\r\n\r\n", 400),
        ("length with a sign", HEAD + b"Content-Length: +5\r\n\r\nhello", 400),
        ("length of letters", HEAD + b"Content-Length: five\r\n\r\n", 400),
        ("another coding", HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        ("obfuscated coding", HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
        ("bare line feeds", b"GET /livez HTTP/1.1\nHost: 127.0.0.1\n\n", 400),
        ("bare line feed in headers", b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\nX: y\r\n\r\n", 400),
        ("folded header", b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\r\n b\r\n\r\n", 400),
        ("space before colon", b"GET /livez HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n", 400),
        ("no host", b"GET /livez HTTP/1.1\r\n\r\n", 400),
        ("two hosts", b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil\r\n\r\n", 400),
        ("host with a path", b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1/evil\r\n\r\n", 400),
        ("host with a user", b"GET /livez HTTP/1.1\r\nHost: evil@127.0.0.1\r\n\r\n", 400),
        ("host with a query", b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1?evil\r\n\r\n", 400),
        ("host with a fragment", b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1#evil\r\n\r\n", 400),
        ("foreign host", b"GET /livez HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
        ("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 4, 400),
        ("length over the limit", HEAD + b"Content-Length: 100001\r\n\r\n", 413),
        ("body over the limit", HEAD + b"Content-Length: 40000000\r\n\r\n" + b"a" * 40_000_000, 413),
        ("bad chunk", HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
        ("negative chunk", HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_requests_beyond_the_limits_see_their_refusal(guarded, name, request_bytes, status):
    before = psutil.Process().memory_info().rss
    answer = exchange(guarded, request_bytes)
    assert answer is not None, "a reset in place of an answer"
    assert status_of(answer) == status, answer[:300]
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert b"connection: close" in answer.lower() or status == 403 or "host with" in name
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert is_well(guarded)


@pytest.mark.parametrize(
    ("path", "keys"),
    [("/v1/messages", {"type", "error", "request_id"}), ("/api/chat", {"error"}), ("/v1/completions", {"error"})],
)
def test_refusals_have_the_form_of_the_interface_that_was_asked(guarded, path, keys):
    head = b"POST %s?beta=true HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100001\r\n\r\n" % path.encode()
    answer = exchange(guarded, head)
    assert status_of(answer) == 413
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert set(body) == keys
    if path == "/v1/messages":
        assert body["error"]["type"] == "request_too_large" and body["request_id"].encode() in answer.partition(b"{")[0]
    else:
        assert isinstance(body["error"], str) == (path == "/api/chat")


def test_a_body_at_the_limit_is_read_and_one_byte_more_is_not(guarded):
    for size, status in ((100_000, 400), (100_001, 413)):  # spaces are no JSON
        for coding in ("length", "chunks"):
            body = b" " * size
            if coding == "length":
                head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % size
                answer = exchange(guarded, head + body)
            else:
                chunks = b"".join(b"3e8\r\n" + body[i : i + 1000] + b"\r\n" for i in range(0, 100_000, 1000))
                rest = size - 100_000
                chunks += b"%x\r\n%s\r\n" % (rest, b" " * rest) if rest else b""
                head = HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
                answer = exchange(guarded, head + chunks + b"0\r\n\r\n")
            assert status_of(answer) == status, (size, coding)


def test_compressed_bodies_are_refused(guarded):
    answer = exchange(
        guarded, HEAD + b"Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b"
    )
    assert status_of(answer) == 415


@pytest.mark.parametrize(
    ("name", "parts", "within_s"),
    [
        ("nothing", [b""], 2.0),
        ("unfinished headers", [b"GET /livez HTTP/1.1\r\nHost: 127"], 2.0),
        ("slow headers", [b"GET /livez HTTP/1.1\r\n"] + [b"X: y\r\n"] * 20, 4.0),
        ("slow body", [HEAD + b"Content-Length: 1000\r\n\r\n"] + [b" "] * 20, 4.0),
        ("body that never comes", [HEAD + b"Content-Length: 1000\r\n\r\n"], 3.0),
    ],
)
def test_slow_clients_are_closed_by_a_deadline(guarded, name, parts, within_s):
    began = time.monotonic()
    answer = exchange(guarded, *parts, pause_s=0.1)
    assert time.monotonic() - began < within_s + 0.1 * len(parts)
    assert not answer or status_of(answer) == 408
    assert is_well(guarded)


def test_an_idle_connection_is_closed(guarded):
    began = time.monotonic()
    assert status_of(exchange(guarded, b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")) == 200
    assert 0.5 < time.monotonic() - began < 4


def test_a_second_request_on_a_connection_has_its_own_limits(guarded):
    one = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with socket.create_connection(guarded.address, timeout=5) as connection:
        for _ in range(3):
            connection.sendall(one)
            received = connection.recv(65536)
            while b"}" not in received:
                received += connection.recv(65536)
            assert status_of(received) == 200
            time.sleep(0.3)
        connection.sendall(b"GET /livez HTTP/1.1\r\n")  # and no more
        assert status_of(read_all(connection)) == 408


def test_a_malformed_request_behind_others_ends_all_of_them_without_a_log_line(guarded, caplog):
    """The requests in front of it may be running, and may not write behind the refusal."""
    good = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    for number in range(8):
        answer = exchange(guarded, good * (1 + number % 4) + b"M7 / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert status_of(answer) in (200, 400)
    is_well(guarded)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_connections_of_one_address_are_bounded(start_server):
    few = start_server(connection=ConnectionLimits(max_connections_per_address=3))
    held = [socket.create_connection(few.address, timeout=5) for _ in range(3)]
    answer = exchange(few, b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert status_of(answer) == 429
    for connection in held:
        connection.close()
    time.sleep(0.1)
    assert status_of(exchange(few, b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")) == 200
