"""Two replicas of the embedded model on a Ray cluster of this machine."""

import http.client
import json
import os
import signal
import time
import urllib.error
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

import torchax_serve
from torchax_serve.distributed.ray.options import DeployOptions

with warnings.catch_warnings():  # of Ray, about its own dependencies
    warnings.simplefilter("ignore")
    from ray import serve as ray_serve

    from torchax_serve.distributed.ray.application import application_of

# Ray's own: of its dependencies' releases, and of sockets it leaves open.
pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS = DeployOptions(
    min_replicas=2, max_replicas=2, max_num_seqs=4, max_model_len=128, num_cpus=0.5, health_check_period_s=1, drain_s=60
)
QUESTIONS = [f"What is {number} plus {number + 2}?" for number in range(6)]
NUM_REQUESTS = 24
PORT = 8127


@pytest.fixture(scope="module")
def handle(cluster):
    return ray_serve.run(application_of(OPTIONS), name="tiny", route_prefix="/")


@pytest.fixture(scope="module")
def wanted():
    with torchax_serve.serve() as model:
        return {question: model.chat(question, torchax_serve.SamplingParams(do_sample=False)) for question in QUESTIONS}


def body_of(question, **options):
    return {"messages": [{"role": "user", "content": question}], "do_sample": False, **options}


def ask(body):
    """Status and text of an answer; a text that breaks off comes with status 0."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/", json.dumps(body).encode(), headers)
    text = b""
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            while piece := answer.read1():
                text += piece
            return answer.status, text.decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except (OSError, http.client.HTTPException):
        return 0, text.decode()


def replica_of(question):
    """The process of the replica that a question would go to."""
    replicas = ray_serve.get_deployment_handle("Replica", "tiny")
    return replicas.process_id.remote(body_of(question)).result(timeout_s=120)


def replicas_running():
    states = ray_serve.status().applications["tiny"].deployments["Replica"].replica_states
    return {getattr(state, "value", state): number for state, number in states.items() if number}


def test_answers_equal_those_of_an_unreplicated_model(handle, wanted):
    for question in QUESTIONS[:2]:
        assert ask(body_of(question)) == (200, wanted[question])
    pieces = list(handle.options(stream=True).stream.remote(body_of(QUESTIONS[2])))
    assert len(pieces) > 1
    assert "".join(pieces) == wanted[QUESTIONS[2]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": [], "temprature": 1}, "got temprature"),
        ({"max_new_tokens": 3}, "expected one of prompt and messages"),
        ({"prompt": "a", "max_new_tokens": -3}, "max_new_tokens"),
        ({"prompt": "word " * 500}, "tokens"),
        ([1], "expected a JSON object, got an array"),
    ],
)
def test_bad_requests_are_told_so(handle, body, said):
    status, text = ask(body)
    assert status == 400
    error = json.loads(text)["error"]
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/", None, {}, 405),
        ("POST", "/v1/nothing", b"{}", {"Content-Type": "application/json"}, 404),
        ("POST", "/", b"{}", {"Content-Type": "text/plain"}, 415),
        ("POST", "/", b"x" * (5 << 20), {"Content-Type": "application/json"}, 413),
        ("POST", "/", b"[" * 200_000, {"Content-Type": "application/json"}, 400),
    ],
)
def test_other_paths_methods_and_bodies(handle, method, path, body, headers, status):
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    assert answer.status == status
    assert json.loads(answer.read())["error"]["type"] == "invalid_request_error"
    connection.close()


def test_requests_with_one_prefix_go_to_one_replica(handle):
    beginnings = [f"{letter * 200}, and then?" for letter in "abcdefgh"]
    owners = [replica_of(text) for text in beginnings]
    assert [replica_of(text + " more") for text in beginnings] == owners
    assert len(set(owners)) == 2


def test_requests_of_a_lost_replica_are_retried(handle, wanted):
    victim = replica_of(QUESTIONS[0])
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        asked = [QUESTIONS[number % len(QUESTIONS)] for number in range(NUM_REQUESTS)]
        futures = [pool.submit(ask, body_of(question)) for question in asked]
        while not any(future.done() for future in futures):
            time.sleep(0.01)
        os.kill(victim, signal.SIGKILL)
        under_way = sum(not future.done() for future in futures)
        answers = [future.result() for future in futures]
    assert under_way >= NUM_REQUESTS // 4, "the load was over before the replica was killed"
    broken = 0
    for question, (status, text) in zip(asked, answers, strict=True):
        if status == 0 and text:
            broken += 1  # it had begun to stream
            assert wanted[question].startswith(text)
        else:
            assert (status, text) == (200, wanted[question])
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
    for question, answer in answers:
        assert answer == (200, wanted[question])
    assert not before & {replica_of(letter * 200) for letter in "ijklmnop"}
