"""Requests on their way to a replica: limits, prefixes, answers of an application, metrics of several; without Ray."""

import asyncio
import json
import re

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from torchax_serve.cli import deploy as command
from torchax_serve.distributed.ray.http_requests import (
    check_head,
    joined_metrics,
    made_request,
    messages_of,
    prefix_of,
    prefix_text,
    read_request,
)
from torchax_serve.distributed.ray.options import DeployOptions
from torchax_serve.server.app import _of_router
from torchax_serve.server.errors import ApiError
from torchax_serve.server.options import ConnectionLimits, ServerOptions

LIMITS = ConnectionLimits(max_body_bytes=100, max_url_bytes=50, max_header_bytes=400, max_headers=5)
OPTIONS = ServerOptions(connection=LIMITS)


def scope(path="/v1/chat/completions", *headers, query=b"", root_path=""):
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (("host", "a"), *headers)]
    common = {"type": "http", "method": "POST", "path": path, "query_string": query, "root_path": root_path}
    return {**common, "headers": raw}


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        (scope("/" + "x" * 50), 414, "a URL of at most 50 bytes"),
        (scope("/v1", query=b"x" * 48), 414, "a URL of at most 50 bytes"),
        (scope("/", *[(f"x-{i}", "a") for i in range(5)]), 431, "at most 5 headers"),
        (scope("/", ("x", "y" * 400)), 431, "headers of at most 400 bytes"),
        (scope("/", ("Authorization", "a"), ("authorization", "b")), 400, "one header authorization, got 2"),
        (scope("/", ("content-length", "3"), ("transfer-encoding", "chunked")), 400, "got both"),
        (scope("/", ("content-length", "-1")), 400, "a Content-Length in digits"),
        (scope("/", ("content-length", "²")), 400, "a Content-Length in digits"),
        (scope("/", ("content-length", "101")), 413, "a body of at most 100 bytes"),
    ],
)
def test_heads_that_the_server_would_refuse(given, status, said):
    with pytest.raises(ApiError, match=said) as caught:
        check_head(given, LIMITS)
    assert caught.value.status == status


def receiver(*messages):
    left = list(messages)

    async def receive():
        return left.pop(0)

    return receive


def part(body, more_body=False):
    return {"type": "http.request", "body": body, "more_body": more_body}


def test_a_request_is_read_below_the_route_of_the_application():
    given = scope("/chat/v1/models", root_path="/chat", query=b"a=b")
    request = asyncio.run(read_request(given, receiver(part(b'{"prompt":', True), part(b'"Hi"}')), OPTIONS))
    assert (request["scope"]["path"], request["scope"]["root_path"]) == ("/v1/models", "")
    assert request["scope"]["query_string"] == b"a=b" and request["prefix"] == "Hi"
    assert json.loads(request["body"]) == {"prompt": "Hi"}
    assert made_request(scope("/chat", root_path="/chat"), b"")["scope"]["path"] == "/"
    assert made_request(scope("/chats", root_path="/chat"), b"")["scope"]["path"] == "/chats"
    with pytest.raises(ApiError, match="at most 100 bytes") as caught:
        asyncio.run(read_request(scope(), receiver(part(b"x" * 60, True), part(b"x" * 60)), OPTIONS))
    assert caught.value.status == 413
    with pytest.raises(ClientDisconnect):
        asyncio.run(read_request(scope(), receiver(part(b"x", True), {"type": "http.disconnect"}), OPTIONS))


def text_of(*headers, **body):
    return prefix_text([(name.encode(), value.encode()) for name, value in headers], json.dumps(body).encode())


def test_prefixes_are_of_model_tools_and_prompt_and_of_one_key():
    turn = [{"role": "user", "content": "Hi"}]
    first = text_of(model="a", messages=turn, temperature=1)
    later = text_of(temperature=0, messages=[*turn, {"role": "assistant", "content": "Yes"}], model="a")
    assert later.startswith(first.removesuffix("]"))
    assert text_of(model="b", messages=turn) != first
    assert text_of(model="a", messages=turn, tools=[{"name": "f"}]).split("\n")[1:2] == ['[{"name": "f"}]']
    assert text_of(prompt=[1, 2]) == "[1, 2]" and text_of(input="Hi", instructions="Be kind") == "Be kind\nHi"
    keyed = text_of(("Authorization", "Bearer secret"), prompt="Hi")
    assert keyed.endswith("\nHi") and "secret" not in keyed
    assert keyed != text_of(("Authorization", "Bearer other"), prompt="Hi")
    assert text_of(model="a") is None and prefix_text([], b"[" * 100_000) is None and prefix_text([], b"\xff") is None
    assert asyncio.run(prefix_of([], b"")) is None
    assert asyncio.run(prefix_of([], json.dumps({"prompt": "x" * 300_000}).encode())) == "x" * 300_000


def test_an_application_answers_message_by_message_and_ends_with_its_client():
    ended = []

    async def app(scope, receive, send):
        assert (await receive())["body"] == b"asked"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/short":
            await send({"type": "http.response.body", "body": b"done"})
            return
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        ended.append(scope["path"])

    async def use():
        short = [each async for each in messages_of(app, made_request(scope("/short"), b"asked"))]
        assert [each.get("body") for each in short] == [None, b"done"]
        messages = messages_of(app, made_request(scope("/long"), b"asked"))
        assert [(await anext(messages)).get("body") for _ in range(2)] == [None, b"first"]
        await messages.aclose()
        assert ended == ["/long"]

        async def fails(scope, receive, send):
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await anext(messages_of(fails, made_request(scope("/"), b"")))

    asyncio.run(use())


def test_the_methods_of_a_url_have_one_order():
    for given in ("HEAD, GET", "GET, HEAD"):  # of a set
        error = _of_router(HTTPException(405, headers={"Allow": given}), "/v1/models")
        assert error.headers["Allow"] == "GET, HEAD" and "the method GET, HEAD, got" in error.message


def test_metrics_of_replicas_are_one_text():
    texts = {}
    for replica, number in (("a", 1), ("b", 2)):
        registry = CollectorRegistry()
        Counter("asked", "Requests", ["route"], registry=registry).labels('/v1/"x"').inc(number)
        Histogram("took", "Seconds", buckets=(1, 2), registry=registry).observe(number)
        texts[replica] = generate_latest(registry).decode()
    joined = joined_metrics(texts).decode()
    assert re.findall(r'^asked_total\{replica="(.)",route="/v1/\\"x\\""\} (\S+)', joined, re.M) == [
        ("a", "1.0"),
        ("b", "2.0"),
    ]
    assert re.findall(r'^took_bucket\{le="1.0",replica="(.)"\} (\S+)', joined, re.M) == [("a", "1.0"), ("b", "0.0")]
    assert joined.count("# TYPE asked_total counter") == joined.count("# TYPE took histogram") == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"tls_certificate": "a", "tls_key": "b"},
            "tls_certificate: expected its default for replicas, got another; conn",
        ),
        ({"connection": ConnectionLimits(max_connections=3)}, "max_connections: expected its default"),
        ({"profile_dir": "a"}, "profile_dir: expected its default for replicas, got another; it would be of one"),
        ({"drain_timeout_s": 3.0}, "drain_timeout_s: .*; drain_s has the time"),
        ({"max_stored_responses": 3}, "max_stored_responses: expected 0 for several replicas, got 3"),
    ],
)
def test_options_of_the_server_that_replicas_cannot_honour(given, said):
    with pytest.raises(UnsupportedArgumentError, match=said):
        DeployOptions(max_replicas=2, server=ServerOptions(**given))


def test_options_on_rays_command_line():
    options = DeployOptions.of_text({"model": "a", "max_replicas": "2", "api_key_file": "k", "keep_alive_s": "3"})
    assert (options.model, options.server.keep_alive_s, str(options.server.api_key_file)) == ("a", 3.0, "k")
    assert not options.server.is_loopback
    with pytest.raises(
        InvalidArgumentError, match=r"expected arguments out of model, .*keep_alive_s.*, got keep_alive"
    ):
        DeployOptions.of_text({"keep_alive": "3"})


def test_the_command_gives_replicas_the_options_of_a_server(monkeypatch):
    made = []
    monkeypatch.setattr(
        "torchax_serve.distributed.ray.options.DeployOptions", lambda **given: made.append(given) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        command.deploy(
            replicas="1:3", served_model_name=["tiny"], api_key=["me:a-long-key"], max_body_mib=2, max_num_seqs=7,
            page_size=32, adapter=["sql=folder"], max_loras=2, request_timeout=9.0,
        )  # fmt: skip
    (given,) = made
    assert (given["min_replicas"], given["max_replicas"], given["max_num_seqs"]) == (1, 3, 7)
    assert given["engine"] == {"page_size": 32}
    assert (given["load"]["adapters"], given["load"]["max_loras"]) == ({"sql": "folder"}, 2)
    server = given["server"]
    assert (server.served_model_names, server.api_keys) == (("tiny",), (("me", "a-long-key"),))
    assert (server.connection.max_body_bytes, server.request_timeout_s) == (2 << 20, 9.0)
