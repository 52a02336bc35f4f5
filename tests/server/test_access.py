"""Keys, hosts, methods and paths: what is answered to whom."""

import os
import socket

import httpx
import openai
import pytest

from model_adapters.errors import InvalidArgumentError
from torchax_serve.server.app import PUBLIC, ROUTES
from torchax_serve.server.auth import ApiKeys
from torchax_serve.server.page import FILES

KEY, OTHER = "first-key-0123456789", "second-key-0123456789"


@pytest.fixture(scope="module")
def locked(start_server):
    return start_server(api_keys=(("alice", KEY), ("bob", OTHER)))


def test_every_route_needs_a_key_except_health(locked):
    with httpx.Client(base_url=locked.url) as http:
        for _, path, _ in ROUTES:
            path = path.replace("{model:path}", "tiny").replace("{response_id}", "resp_1")
            for method, headers in (
                ("GET", {}),
                ("POST", {"Authorization": "Bearer wrong-key"}),
                ("POST", {"X-API-Key": "nope"}),
                ("DELETE", {"Authorization": "Basic Og=="}),
                ("HEAD", {}),
                ("OPTIONS", {}),
            ):
                status = http.request(method, path, headers=headers).status_code
                assert (status == 401) == (path not in PUBLIC | set(FILES)), (method, path)


def test_metrics_may_be_read_without_a_key_where_that_is_chosen(start_server):
    serving = start_server(api_keys=(("alice", KEY),), metrics_without_key=True)
    with httpx.Client(base_url=serving.url) as http:
        assert http.get("/metrics").status_code == 200
        assert http.get("/metrics", headers={"Authorization": "Bearer wrong-key"}).status_code == 200
        for target in ("/metrics/", "/v1/models", "/version", "/metrics/../v1/models"):
            assert http.get(target).status_code in (401, 404), target
        assert http.get("/v1/models").status_code == 401


@pytest.mark.parametrize(
    "target",
    ["//v1/models", "/v1/models/", "/./v1/models", "/livez/../v1/models", "/%76%31/models", "/v1/models%00",
     "/V1/MODELS", "/v1/models;x", "http://127.0.0.1/v1/models", "/livez%2f..%2fv1%2fmodels", "*"],
)  # fmt: skip
def test_odd_paths_are_never_answered_without_a_key(locked, target):
    with socket.create_connection(locked.address, timeout=5) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        answer = connection.recv(65536)
    assert int(answer.split()[1]) in (400, 401, 404)


def test_keys_in_either_header(locked):
    with httpx.Client(base_url=locked.url) as http:
        for headers in ({"Authorization": f"Bearer {KEY}"}, {"X-API-Key": OTHER}, {"Authorization": f"bearer {OTHER}"}):
            assert http.get("/v1/models", headers=headers).status_code == 200
        both = {"Authorization": f"Bearer {KEY}", "X-API-Key": OTHER}
        assert http.get("/v1/models", headers=both).status_code == 401
        twice = [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {OTHER}")]
        assert http.get("/v1/models", headers=twice).status_code == 400
        refused = http.get("/v1/models")
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong-key", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert [each.id for each in client.with_options(api_key=KEY).models.list()] == ["tiny"]


def test_two_keys_share_no_cached_prefix(locked):
    prompt = "The quick brown fox jumps over the lazy dog, again and again and again. " * 4

    def cached(key):
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0) as client:
            answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
            return answer.usage.prompt_tokens_details.cached_tokens

    assert cached(KEY) == 0
    assert cached(KEY) > 0
    assert cached(OTHER) == 0


def test_a_file_of_keys_is_read_again(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# comment\nalice:{KEY}\n")
    keys = ApiKeys(file=file)

    def name(key):
        return keys.key_of([(b"authorization", f"Bearer {key}".encode())]).name

    assert name(KEY) == "alice"
    file.write_text(f"bob:{OTHER}\n")
    os.utime(file, ns=(1, 1))
    assert name(OTHER) == "bob"
    with pytest.raises(Exception, match="API key"):
        name(KEY)
    file.unlink()
    assert name(OTHER) == "bob"  # those of before stay
    with pytest.raises(InvalidArgumentError, match="at least 8"):
        ApiKeys([("short", "abc")])


def test_a_stream_goes_on_while_the_file_of_its_key_is_replaced(start_server, tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"alice:{KEY}\n")
    serving = start_server(api_key_file=file)
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 300, "ignore_eos": True, "stream": True}

    def status_of(key):
        return httpx.get(f"{serving.url}/v1/models", headers={"X-API-Key": key}).status_code

    with httpx.stream(
        "POST", f"{serving.url}/v1/completions", json=body, headers={"X-API-Key": KEY}, timeout=60
    ) as answer:
        pieces = answer.iter_text()
        text = next(pieces)
        assert (status_of(KEY), status_of(OTHER)) == (200, 401)
        replacement = tmp_path / "new"
        replacement.write_text(f"bob:{OTHER}\n")
        os.replace(replacement, file)
        assert (status_of(KEY), status_of(OTHER)) == (401, 200)
        text += "".join(pieces)
    assert text.endswith("data: [DONE]\n\n")


def test_unknown_paths_and_methods_are_errors_of_the_dialect(http):
    for method, path, status in (
        ("POST", "/", 405),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/realtime", 404),
        ("GET", "/v1/models/other", 404),
    ):
        response = http.request(method, path)
        assert response.status_code == status, path
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert http.get("/v1/completions").headers["allow"] == "POST"


def test_interfaces_that_are_not_supported_are_refused_by_name(http):
    message = "the realtime interface is not supported; send audio to /v1/audio/transcriptions"
    error = http.post("/v1/realtime", json={"model": "tiny"}).json()["error"]
    assert (error["message"], error["code"]) == (f"/v1/realtime: {message}", "unknown_url")
    error = http.post("/v1/audio/speech", json={"model": "tiny", "input": "Hi"}).json()["error"]
    assert "expected a model that speaks, such as VITS, got tiny, whose tasks are" in error["message"]


def test_bodies_that_are_no_json_objects(http):
    for content in (b"", b"[]", b"{", b'{"a": 1, "a": 2}', b"\xef\xbb\xbf{}", b"\xff\xfe", b"[" * 100_000, b"{} x",
                    b'{"model": NaN}', b'{"model": "a\x00"}', b'{"seed": 1' + b"0" * 400 + b"}"):  # fmt: skip
        response = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, content[:20]
    form = http.post("/v1/completions", content=b"{}", headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert form.status_code == 415


def test_request_ids_are_taken_or_made(http):
    assert http.get("/livez", headers={"X-Request-Id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
    for bad in ("a b", "x" * 129, "ä".encode("latin-1")):
        made = http.get("/livez", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert made.startswith("req-")
    assert http.get("/nowhere").headers["x-request-id"].startswith("req-")


def test_cors_is_off_unless_said(server, start_server):
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with httpx.Client(base_url=server.url) as http:
        assert "access-control-allow-origin" not in http.options("/v1/completions", headers=preflight).headers
    allowing = start_server(cors_origins=("https://a.example",), api_keys=(("alice", KEY),))
    with httpx.Client(base_url=allowing.url) as http:
        response = http.options("/v1/completions", headers=preflight)
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        assert "access-control-allow-credentials" not in response.headers
        foreign = http.options("/v1/completions", headers={**preflight, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in foreign.headers
