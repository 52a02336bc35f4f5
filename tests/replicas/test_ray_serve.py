"""Two replicas of the embedded model on a Ray cluster of this machine, compared with a server without Ray."""

import contextlib
import http.client
import json
import os
import re
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import openai
import pytest
from running_server import RunningServer

from model_adapters.errors import InvalidArgumentError
from torchax_serve import EngineOptions, serve
from torchax_serve.distributed.ray.options import DeployOptions
from torchax_serve.server.options import ConnectionLimits, ServerOptions

with warnings.catch_warnings():  # of Ray, about its own dependencies
    warnings.simplefilter("ignore")
    from ray import serve as ray_serve

    from torchax_serve.distributed.ray.application import application_of

# Ray's own: of its dependencies' releases, and of sockets it leaves open.
pytestmark = pytest.mark.filterwarnings("ignore")

KEY = "a-key-of-tests"
SERVER = {
    "served_model_names": ("tiny",),
    "api_keys": (("tests", KEY),),
    "metrics_compat": "vllm",
    "connection": ConnectionLimits(max_body_bytes=1 << 20),
}
OPTIONS = DeployOptions(
    min_replicas=2,
    max_replicas=2,
    max_num_seqs=4,
    max_model_len=128,
    num_cpus=0.5,
    health_check_period_s=1,
    drain_s=60,
    server=ServerOptions(**SERVER),
)
QUESTIONS = [f"What is {number} plus {number + 2}?" for number in range(6)]
NUM_REQUESTS = 24
PORT = 8127
URL = f"http://127.0.0.1:{PORT}"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def handle(cluster):
    return ray_serve.run(application_of(OPTIONS), name="tiny", route_prefix="/")


@pytest.fixture(scope="module")
def one():
    """A server without Ray."""
    with serve(engine=EngineOptions(max_num_seqs=4, max_model_len=128, max_num_waiting=256)) as model:
        running = RunningServer(model, **SERVER)
        yield running
        running.stop()


@pytest.fixture(scope="module")
def wanted(one):
    return {question: json.loads(ask(body_of(question), one.url)[1]) for question in QUESTIONS}


def body_of(question, **options):
    messages = [{"role": "user", "content": question}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 24, **options}


def ask(body, url=URL):
    """Status and text of an answer; a text that breaks off comes with status 0."""
    text = ""
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=HEADERS, timeout=300) as answer:
            for piece in answer.iter_text():
                text += piece
            return answer.status_code, text
    except httpx.HTTPError:
        return 0, text


def text_of(status, text):
    """The text of an answer, streamed or not; None for an error."""
    if status not in (0, 200):
        return None
    if not text.startswith("data:"):
        return json.loads(text)["choices"][0]["message"]["content"]
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: {")]
    pieces = []
    for event in events:
        with contextlib.suppress(ValueError):  # one that broke off
            pieces += [each["delta"].get("content") or "" for each in json.loads(event).get("choices", ())]
    return "".join(pieces)


def replica_of(prefix):
    """The process of the replica that a prefix would go to."""
    replicas = ray_serve.get_deployment_handle("Replica", "tiny")
    return replicas.process_id.remote({"prefix": prefix}).result(timeout_s=120)


def replicas_running():
    states = ray_serve.status().applications["tiny"].deployments["Replica"].replica_states
    return {getattr(state, "value", state): number for state, number in states.items() if number}


def get(path, url=URL, **headers):
    return httpx.get(f"{url}{path}", headers={**HEADERS, **headers}, timeout=60)


def without_ids(content):
    """An answer without what differs each time: ids and times."""
    text = re.sub(
        r'"(id|request_id|created|created_at|system_fingerprint|[a-z_]*duration|[a-z]*_at)": *("[^"]*"|[0-9.]+)',
        "",
        content,
    )
    return re.sub(r"(req|chatcmpl|cmpl|msg|resp|embd|rerank|call)[-_][0-9a-f]+", "", text)


def test_answers_equal_those_of_a_server_without_ray(handle, wanted):
    for question in QUESTIONS[:2]:
        status, text = ask(body_of(question))
        assert status == 200 and json.loads(text)["choices"] == wanted[question]["choices"]
        assert json.loads(text)["usage"]["completion_tokens"] == wanted[question]["usage"]["completion_tokens"]
        status, text = ask(body_of(question, stream=True))
        assert text.count("data: ") > 3 and text.endswith("data: [DONE]\n\n")
        assert text_of(status, text) == wanted[question]["choices"][0]["message"]["content"]


def test_clients_of_others(handle, wanted):
    question = QUESTIONS[2]
    expected = wanted[question]["choices"][0]["message"]["content"]
    with openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY) as client:
        assert [each.id for each in client.models.list()] == ["tiny"]
        chunks = client.chat.completions.create(**body_of(question), stream=True)
        assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == expected
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="another-key").models.list()
    with anthropic.Anthropic(base_url=URL, api_key=KEY) as client:
        asked = {name: value for name, value in body_of(question).items() if name != "temperature"}
        answer = client.messages.create(**asked, extra_body={"temperature": 0})
        assert answer.content[0].text == expected


REQUESTS = [
    ("POST", "/v1/completions", {"model": "tiny", "prompt": ["Hi", "Once upon"], "max_tokens": 4, "temperature": 0}),
    ("POST", "/v1/completions", {"model": "tiny", "prompt": "Hi", "max_tokens": 2, "logprobs": 3, "temperature": 0}),
    ("POST", "/v1/chat/completions", {**body_of("Hi"), "temprature": 1}),
    ("POST", "/v1/chat/completions", {**body_of("word " * 500)}),
    ("POST", "/v1/chat/completions", {**body_of("Hi"), "model": "another"}),
    ("POST", "/v1/chat/completions", {**body_of("Hi"), "response_format": {"type": "json_object"}, "max_tokens": 8}),
    ("POST", "/v1/chat/completions", [1]),
    ("POST", "/v1/chat/completions", b"[" * 100_000),
    ("POST", "/v1/chat/completions", b"x" * (2 << 20)),
    ("POST", "/v1/messages", {"model": "tiny", "messages": []}),
    ("POST", "/v1/messages", b"x" * (2 << 20)),
    ("POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}),
    ("POST", "/v1/responses", {"model": "tiny", "input": "Hi", "max_output_tokens": 4, "temperature": 0}),
    ("POST", "/v1/embeddings", {"model": "tiny", "input": "Hi"}),
    ("POST", "/tokenize", {"model": "tiny", "prompt": "Hi"}),
    ("POST", "/api/chat", {"model": "tiny", "stream": False, "options": {"num_predict": 0.5}}),
    ("POST", "/v1/files", b"x"),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
    ("POST", "/v1/nothing", {}),
    ("PUT", "/v1/models", {}),
    ("GET", "/v1/models/tiny", None),
    ("GET", "/v2/models/tiny", None),
    ("GET", "/livez", None),
    ("GET", "/readyz", None),
    ("GET", "/page.js", None),
    ("GET", "/" + "x" * 9000, None),
]


@pytest.mark.parametrize(
    ("method", "path", "body"), REQUESTS, ids=[f"{m} {p[:30]} {i}" for i, (m, p, _) in enumerate(REQUESTS)]
)
def test_routes_limits_and_errors_are_those_of_a_server_without_ray(handle, one, method, path, body):
    sent = {} if body is None else {"content": body} if isinstance(body, bytes) else {"json": body}
    answers = []
    for url in (one.url, URL):
        headers = {**HEADERS, "Content-Type": "application/json"}
        answers.append(httpx.request(method, f"{url}{path}", headers=headers, timeout=120, **sent))
    expected, got = answers
    assert got.status_code == expected.status_code
    assert without_ids(got.text) == without_ids(expected.text)
    assert len(got.headers.get_list("x-request-id")) == len(expected.headers.get_list("x-request-id")) == 1
    for name in ("content-type", "allow", "retry-after", "www-authenticate"):
        assert got.headers.get(name) == expected.headers.get(name)


def test_a_request_without_a_key_or_with_bad_headers(handle, one):
    for headers in (
        {},
        {"Authorization": "Bearer nobody"},
        {"Host": "evil.example"},
        {f"X-{i}": "y" for i in range(120)},
    ):
        expected, got = (httpx.get(f"{url}/v1/models", headers=headers, timeout=60) for url in (one.url, URL))
        assert (got.status_code, got.json()) == (expected.status_code, expected.json())
        assert got.status_code in (401, 403, 431)


def test_metrics_and_load_are_of_all_replicas(handle):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: ask(body_of(f"{number} is a number", max_tokens=8)), range(8)))
    assert [status for status, _ in answers] == [200] * 8
    answer = get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    counts = dict(re.findall(r'^torchax_serve_prompt_tokens_total\{replica="(\w+)"\} (\S+)', answer.text, re.M))
    assert len(counts) == 2 and all(float(each) > 0 for each in counts.values()), answer.text[:2000]
    assert answer.text.count("# TYPE torchax_serve_prompt_tokens_total ") == 1
    assert get("/load").json() == {"server_load": 0}
    assert get("/metrics", Authorization="Bearer nobody").status_code == 401


def test_a_client_that_goes_ends_its_request(handle):
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    long = body_of("Tell me a long story", max_tokens=100, ignore_eos=True, stream=True, n=4)
    headers = {"Content-Type": "application/json", **HEADERS}
    began = total("generation_tokens_total")
    for _ in range(3):
        connection.request("POST", "/v1/chat/completions", json.dumps(long), headers)
        answer = connection.getresponse()
        assert answer.read(40)
        connection.close()
    until = time.monotonic() + 30
    while get("/load").json()["server_load"] or total("num_requests_running"):
        assert time.monotonic() < until, "requests of clients that have gone still run"
        time.sleep(0.05)
    assert 0 < total("generation_tokens_total") - began < 3 * 4 * 100 * 0.8


def total(name):
    """The sum of a metric over all replicas."""
    found = re.findall(rf'^torchax_serve_{name}\{{replica="\w+"\}} (\S+)', get("/metrics").text, re.M)
    assert found
    return sum(map(float, found))


def test_a_handle_in_python(handle, wanted):
    stream = handle.options(stream=True).post
    headers = {"authorization": f"Bearer {KEY}"}
    pieces = list(stream.remote("/v1/chat/completions", body_of(QUESTIONS[3], stream=True), headers))
    assert len(pieces) > 1
    expected = wanted[QUESTIONS[3]]["choices"][0]["message"]["content"]
    assert text_of(200, b"".join(pieces).decode()) == expected
    with pytest.raises(InvalidArgumentError, match="temprature"):
        list(stream.remote("/v1/chat/completions", body_of("Hi", temprature=1), headers))


def test_requests_with_one_prefix_go_to_one_replica(handle):
    beginnings = [f"{letter * 200}, and then?" for letter in "abcdefgh"]
    owners = [replica_of(text) for text in beginnings]
    assert [replica_of(text + " more") for text in beginnings] == owners
    assert len(set(owners)) == 2


def test_requests_of_a_lost_replica_are_retried(handle, wanted):
    victim = replica_of("any")
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        asked = [QUESTIONS[number % len(QUESTIONS)] for number in range(NUM_REQUESTS)]
        futures = [pool.submit(ask, body_of(question, stream=bool(i % 2))) for i, question in enumerate(asked)]
        while not any(future.done() for future in futures):
            time.sleep(0.01)
        os.kill(victim, signal.SIGKILL)
        under_way = sum(not future.done() for future in futures)
        answers = [future.result() for future in futures]
    assert under_way >= NUM_REQUESTS // 4, "the load was over before the replica was killed"
    broken = 0
    for question, (status, text) in zip(asked, answers, strict=True):
        expected = wanted[question]["choices"][0]["message"]["content"]
        if status == 0 and text:
            broken += 1  # it had begun to stream
            assert expected.startswith(text_of(status, text))
        else:
            assert (status, text_of(status, text)) == (200, expected)
    assert broken <= 2 * OPTIONS.max_num_seqs
    print(f"{NUM_REQUESTS} requests, {under_way} under way, {broken} broken off, the others whole")
    until = time.monotonic() + 240
    while replicas_running() != {"RUNNING": 2}:
        assert time.monotonic() < until, replicas_running()
        time.sleep(0.5)
    assert victim not in {replica_of(question) for question in QUESTIONS}


def test_an_update_replaces_replicas_and_no_request_fails(handle, wanted):
    before = {replica_of(letter * 200) for letter in "ijklmnop"}
    updated = DeployOptions(**{**vars(OPTIONS), "max_num_seqs": 3})
    with ThreadPoolExecutor(4) as pool:
        update = pool.submit(ray_serve.run, application_of(updated), name="tiny", route_prefix="/")
        answers = []
        while not update.done():
            futures = [pool.submit(ask, body_of(question)) for question in QUESTIONS[:3]]
            answers += [(question, future.result()) for question, future in zip(QUESTIONS, futures, strict=False)]
        update.result()
    assert answers
    for question, (status, text) in answers:
        assert status == 200 and json.loads(text)["choices"] == wanted[question]["choices"]
    assert not before & {replica_of(letter * 200) for letter in "ijklmnop"}
