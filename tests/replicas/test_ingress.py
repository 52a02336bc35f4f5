"""What the ingress does with replicas that are full, lost or slow: without a cluster."""

import asyncio
import json
import warnings

import pytest

from torchax_serve.distributed.ray.options import DeployOptions

with warnings.catch_warnings():  # of Ray, about its own dependencies
    warnings.simplefilter("ignore")
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import BackPressureError

    from torchax_serve.distributed.ray.application import MOST_TRIES, Ingress

START = {"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"a")]}
BODY = {"type": "http.response.body", "body": b"Hi", "more_body": True}
END = {"type": "http.response.body", "body": b"", "more_body": False}


class Messages:
    """A replica's answer."""

    def __init__(self, messages):
        self.messages, self.is_cancelled = iter(messages), False

    def __aiter__(self):
        return self

    async def __anext__(self):
        message = next(self.messages, None)
        if message is None:
            raise StopAsyncIteration
        if isinstance(message, Exception):
            raise message
        return message

    def cancel(self):
        self.is_cancelled = True


class Replicas:
    """A handle whose replicas answer one after the other as they are told to."""

    def __init__(self, *answers):
        self.answers, self.given = list(answers), []
        self.respond = self

    def options(self, **given):
        assert given == {"stream": True}
        return self

    def remote(self, request):
        self.given.append(Messages(self.answers.pop(0)))
        return self.given[-1]


def relayed(replicas, path="/v1/chat/completions"):
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [(b"host", b"a")]}
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(Ingress(replicas, DeployOptions()).relay(scope, receive, send))
    return sent


def test_an_answer_goes_on_without_the_id_that_the_proxy_adds():
    assert relayed(Replicas([START, BODY, END])) == [{**START, "headers": []}, BODY, END]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_full_replicas_are_told_as_by_a_full_queue(path):
    start, body = relayed(Replicas([BackPressureError(3, 3)]), path)
    assert start["status"] == 429 and dict(start["headers"])[b"retry-after"] == b"1"
    error = json.loads(body["body"])["error"]
    assert "expected room in the queue of requests" in (error if path == "/api/chat" else error["message"])


def test_a_request_goes_to_another_replica_until_its_answer_has_begun():
    replicas = Replicas([RayActorError()], [RayActorError()], [START, BODY, END])
    assert relayed(replicas)[1:] == [BODY, END]
    assert len(replicas.given) == 3 and all(each.is_cancelled for each in replicas.given)
    with pytest.raises(RayActorError):
        relayed(Replicas([START, BODY, RayActorError()], [START, BODY, END]))


def test_a_request_that_all_replicas_lose_is_told_so():
    replicas = Replicas(*[[RayActorError()]] * (MOST_TRIES + 1))
    start, body = relayed(replicas)
    assert (start["status"], len(replicas.given)) == (503, MOST_TRIES)
    assert "failed on all replicas" in json.loads(body["body"])["error"]["message"]
