"""What the ingress takes and refuses, without Ray."""

import asyncio
import json

import pytest

from model_adapters.errors import (
    ChatTemplateError,
    InvalidArgumentError,
    OutOfMemoryError,
    QueueFullError,
    TorchaxServeError,
    UnsupportedModelError,
)
from torchax_serve.distributed.ray.http_requests import (
    BadHttpRequest,
    answer_to,
    check_head,
    params_of,
    parse_request,
    read_body,
    within,
)

MAX_BYTES = 10_000
JSON = {"content-type": "application/json"}


def scope(path="/", method="POST", root_path="", headers=JSON):
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http", "path": path, "method": method, "root_path": root_path, "headers": raw}


def refused(run, *args, **kwargs):
    with pytest.raises(BadHttpRequest) as caught:
        run(*args, **kwargs)
    return caught.value


@pytest.mark.parametrize(
    "given",
    [
        scope(),
        scope("/model", root_path="/model"),
        scope("/model/", root_path="/model"),
        scope("/", root_path="/model"),
        scope(headers={"Content-Type": "Application/JSON; charset=UTF-8", "content-length": "10000"}),
        scope(headers={**JSON, "content-encoding": "identity"}),
    ],
)
def test_accepted_headers(given):
    check_head(given, MAX_BYTES)


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        (scope("/v1/chat/completions"), 404, "expected the path /, got '/v1/chat/completions'"),
        (scope("/modelx", root_path="/model"), 404, "expected the path /model, got '/modelx'"),
        (scope("/" + "x" * 10_000), 404, "expected the path /, got '/xxx"),
        (scope(method="GET"), 405, "expected POST, got 'GET'"),
        (scope(method="DELETE"), 405, "expected POST, got 'DELETE'"),
        (scope(headers={}), 415, "expected the header Content-Type: application/json, got 'none'"),
        (scope(headers={"content-type": "application/x-www-form-urlencoded"}), 415, "got 'application/x-www-form"),
        (scope(headers={"content-type": "application/json; charset=utf-16"}), 415, "charset=utf-16"),
        (scope(headers={**JSON, "content-encoding": "gzip"}), 415, "got Content-Encoding: gzip"),
        (scope(headers={**JSON, "content-length": "10001"}), 413, "expected a body of at most 10000 bytes, got more"),
        (scope(headers={**JSON, "content-length": "9" * 5000}), 413, "expected a body of at most 10000 bytes"),
        (scope(headers={**JSON, "content-length": "-1"}), 400, "expected a Content-Length in digits, got '-1'"),
        (scope(headers={**JSON, "content-length": "²"}), 400, "expected a Content-Length in digits"),
    ],
)
def test_refused_headers(given, status, said):
    error = refused(check_head, given, MAX_BYTES)
    assert error.status == status
    assert said in error.message
    assert len(error.message) < 400
    assert error.headers.get("Allow") == ("POST" if status == 405 else None)
    content = error.content()["error"]
    assert set(content) == {"message", "type", "param", "code"}
    assert content["type"] == "invalid_request_error"


async def parts_of(*parts, wait_s=0.0):
    for part in parts:
        await asyncio.sleep(wait_s)
        yield part


def test_a_body_is_read_to_its_end_or_its_limit_or_its_time():
    assert asyncio.run(read_body(parts_of(b"ab", b"", b"c"), 3)) == b"abc"
    seen = []

    async def endless():
        while True:
            seen.append(1)
            yield b"x" * 1000

    assert refused(asyncio.run, read_body(endless(), 3500)).status == 413
    assert len(seen) == 4
    error = refused(asyncio.run, read_body(parts_of(b"a", b"b", wait_s=30), 10, timeout_s=0.05))
    assert (error.status, error.code) == (408, "timeout")


def body_of(**fields):
    return json.dumps({"prompt": "Hi", **fields}).encode()


@pytest.mark.parametrize(
    "body",
    [
        body_of(),
        body_of(max_new_tokens=3, temperature=0.5, seed=2**64 - 1, stop=["a", "b"], top_k=None),
        body_of(logit_bias={"3": 5, "17": -100.0}),
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "do_sample": false}',
    ],
)
def test_accepted_requests(body):
    assert parse_request(body, MAX_BYTES) == json.loads(body)


def test_token_ids_that_are_keys_of_json_are_numbers_again():
    request = parse_request(body_of(logit_bias={"3": 5}, stop=["a"]), MAX_BYTES)
    params = params_of(request)
    assert params.logit_bias == {3: 5}
    assert params.stop_strings == ("a",)


BAD_REQUESTS = [
    (b"", "expected JSON, got something else at line 1", None),
    (b"{", "expected JSON, got something else", None),
    (b"[1]", "expected a JSON object, got an array", None),
    (b'"text"', "expected a JSON object, got a text", None),
    (b"null", "expected a JSON object, got null", None),
    (b"\xff\xfe", "expected JSON in UTF-8", None),
    (b"[" * 5000, "levels", None),
    (b'{"prompt": ' + b"[" * 4000 + b"]" * 4000 + b"}", "levels", None),
    (b'{"prompt": "a", "prompt": "b"}', "expected each key once, got 'prompt' twice", None),
    (b"{}", "expected one of prompt and messages, got both or neither", None),
    (body_of(messages=[{}]), "expected one of prompt and messages, got both or neither", None),
    (body_of(temprature=1), "got temprature", None),
    (b'{"messages": [], "temprature": 1}', "got temprature", None),
    (body_of(**{"x" * 5000: 1}), "expected fields out of", None),
    (b'{"prompt": 7}', "prompt: expected a text or token ids, got a number", "prompt"),
    (b'{"prompt": null}', "prompt: expected a text or token ids, got null", "prompt"),
    (b'{"prompt": [[1]]}', "prompt: expected a text or token ids, got an array", "prompt"),
    (body_of(documents=[{"text": "a"}]), "documents: expected none of it", "documents"),
    (body_of(max_tokens=-1), "max_new_tokens: expected a whole number", "max_new_tokens"),
    (body_of(n=2), "n: expected none of it", "n"),
    (b'{"messages": []}', "messages: expected a non-empty array of objects", "messages"),
    (b'{"messages": "Hi"}', "messages: expected a non-empty array of objects", "messages"),
    (b'{"messages": ["Hi"]}', "messages: expected a non-empty array of objects", "messages"),
    (b'{"prompt": "\\ud800"}', "expected text, got half of a surrogate pair", "prompt"),
    (b'{"messages": [{"\\udfff": 1}]}', "expected text, got half of a surrogate pair", "messages"),
    (b'{"prompt": "a", "temperature": NaN}', "expected numbers of JSON, got NaN", None),
    (b'{"prompt": "a", "temperature": 1e400}', "expected numbers of at most 1.8e308", None),
    (b'{"prompt": "a", "max_new_tokens": 1' + b"0" * 5000 + b"}", "4300 digits", None),
    (body_of(max_new_tokens=2**70), "max_new_tokens: expected whole numbers of at most 64 bits", "max_new_tokens"),
    (b'{"messages": [{"a": -1' + b"0" * 30 + b"}]}", "messages: expected whole numbers of at most 64 bits", "messages"),
    (body_of(max_new_tokens=True), "max_new_tokens: expected a whole number", "max_new_tokens"),
    (body_of(max_new_tokens=1.5), "max_new_tokens: expected a whole number", "max_new_tokens"),
    (body_of(max_new_tokens="3"), "max_new_tokens: expected a whole number", "max_new_tokens"),
    (body_of(max_new_tokens=-3), "max_new_tokens: expected a whole number", "max_new_tokens"),
    (body_of(temperature=[1]), "temperature: expected a number", "temperature"),
    (body_of(temperature={"a": 1}), "temperature: expected a number", "temperature"),
    (body_of(do_sample=1), "do_sample: expected true or false, got a number", "do_sample"),
    (body_of(do_sample="yes"), "do_sample: expected true or false, got a text", "do_sample"),
    (body_of(stop={"a": 1}), "stop: expected a non-empty string", "stop"),
    (body_of(seed=-(2**63) - 1), "seed: expected a whole number", "seed"),
    (body_of(logit_bias={"x": 1}), "logit_bias: expected {token id: bias", "logit_bias"),
    (body_of(logit_bias=[1]), "logit_bias: expected {token id: bias", "logit_bias"),
    (body_of(bad_words_ids=[1]), "bad_words_ids: expected a non-empty list", "bad_words_ids"),
    (body_of(sequence_bias=[[[1], "x"]]), "sequence_bias: expected a non-empty", "sequence_bias"),
    (body_of(suppress_tokens=[True]), "suppress_tokens: expected a list of token ids", "suppress_tokens"),
    (body_of(cache_salt=1), "cache_salt: expected a string", "cache_salt"),
]


@pytest.mark.parametrize(("body", "said", "param"), BAD_REQUESTS)
def test_refused_requests(body, said, param):
    error = refused(parse_request, body, MAX_BYTES * 10)
    assert error.status == 400
    assert said in error.message
    assert error.param == param
    assert "\n" not in error.message
    assert len(json.dumps(error.content())) < 3000


def test_stalled_answer_is_cancelled():
    ended = []

    async def pieces():
        try:
            yield "one"
            await asyncio.sleep(30)
            yield "two"
        finally:
            ended.append(True)

    async def read():
        found = []
        try:
            async for piece in within(pieces(), 0.05):
                found.append(piece)
        except BadHttpRequest as error:
            return found, error.status, error.content()["error"]["type"]

    assert asyncio.run(read()) == (["one"], 504, "server_error")
    assert ended == [True]


def test_answer_in_time_is_complete():
    async def read():
        return [piece async for piece in within(parts_of("a", "b", "c"), 5)]

    assert asyncio.run(read()) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (QueueFullError("expected at most 8 waiting"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (InvalidArgumentError("top_p: expected at most 1"), 400, "invalid_request_error", None),
        (ChatTemplateError("no chat template"), 400, "invalid_request_error", None),
        (UnsupportedModelError("an encoder"), 400, "invalid_request_error", None),
        (TorchaxServeError("request 3: its step failed"), 503, "server_error", "unavailable"),
        (OutOfMemoryError("the cache takes 3 GB"), 503, "server_error", "unavailable"),
    ],
)
def test_http_status_of_replica_errors(error, status, kind, code):
    answer = answer_to(error)
    told = answer.content()["error"]
    assert (answer.status, told["type"], told["code"], told["message"]) == (status, kind, code, str(error))
    assert ("Retry-After" in answer.headers) == (status == 429)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tools", "tools: expected none of it, for replicas do not have it; an answer is a text alone; torchax-serve"),
        ("model", "model: expected none of it, for replicas do not have it; a deployment has one model"),
        ("max_length", "got max_length; "),
    ],
)
def test_fields_of_other_servers_are_refused_by_name(name, said):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], name: 1}).encode()
    error = refused(parse_request, body, MAX_BYTES)
    assert error.status == 400
    assert said in error.message
    assert error.param == (name if name != "max_length" else None)
