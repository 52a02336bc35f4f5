"""Replicas that come with the load and go with it, and one that no longer answers, on a Ray cluster of this machine."""

import json
import os
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from model_adapters.errors import UnsupportedArgumentError
from torchax_serve.distributed.ray.options import DeployOptions
from torchax_serve.server.options import ServerOptions

with warnings.catch_warnings():  # of Ray, about its own dependencies
    warnings.simplefilter("ignore")
    from ray import serve as ray_serve

    from torchax_serve.distributed.ray.application import application_of

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS = DeployOptions(
    min_replicas=1,
    max_replicas=2,
    max_num_seqs=2,
    max_model_len=128,
    num_cpus=0.5,
    upscale_delay_s=1,
    downscale_delay_s=3,
    health_check_period_s=1,
    health_check_timeout_s=5,
    drain_s=60,
    server=ServerOptions(served_model_names=("tiny",)),
)
MOST_S = 300
PORT = 8128


@pytest.fixture(scope="module")
def handle(cluster):
    return ray_serve.run(application_of(OPTIONS), name="scaled", route_prefix="/")


def ask(handle, number):
    body = {"model": "tiny", "prompt": f"Question {number}: what is", "temperature": 0, "max_tokens": 32}
    answer = b"".join(handle.options(stream=True).post.remote("/v1/completions", body))
    return json.loads(answer)["choices"][0]["text"]


def num_running():
    states = ray_serve.status().applications["scaled"].deployments["Replica"].replica_states
    return {getattr(state, "value", state): number for state, number in states.items()}.get("RUNNING", 0)


def wait_for(condition):
    until = time.monotonic() + MOST_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)


def test_replicas_come_with_the_load_and_go_with_it(handle):
    assert num_running() == 1
    answers, is_over = [], False

    def client(number):
        while not is_over:
            answers.append((number, ask(handle, number)))

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(client, number) for number in range(8)]
        try:
            wait_for(lambda: num_running() == 2)
        finally:
            is_over = True
        for future in futures:
            future.result()
    assert {number for number, _ in answers} == set(range(8))
    by_number = {number: {text for each, text in answers if each == number} for number in range(8)}
    assert all(len(texts) == 1 for texts in by_number.values())  # whichever replica answered
    wait_for(lambda: num_running() == 1)
    assert ask(handle, 3) in by_number[3]


def test_a_replica_that_does_not_answer_is_replaced(handle):
    replicas = ray_serve.get_deployment_handle("Replica", "scaled")
    process = replicas.process_id.remote({"prefix": "who"}).result(timeout_s=120)
    os.kill(process, signal.SIGSTOP)
    try:
        wait_for(lambda: not is_alive(process))
    finally:
        if is_alive(process):
            os.kill(process, signal.SIGKILL)
    wait_for(lambda: num_running() == 1)
    assert ask(handle, 5)


def is_alive(process):
    try:
        with open(f"/proc/{process}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_replica_that_would_span_nodes_is_refused(handle):
    with pytest.raises(UnsupportedArgumentError, match="a node with 1 CPU and 64 GPU for a replica, got nodes"):
        application_of(DeployOptions(accelerator="GPU", tensor_parallel=64))
