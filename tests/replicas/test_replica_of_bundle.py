"""What runs in each process of a deployment serves a bundle as it serves a model."""

import asyncio
import json
import warnings

import pytest

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import EngineOptions, SamplingParams, serve
from torchax_serve.distributed.ray.http_requests import made_request
from torchax_serve.distributed.ray.options import DeployOptions
from torchax_serve.server.options import ServerOptions

with warnings.catch_warnings():  # of Ray, about its own dependencies
    warnings.simplefilter("ignore")
    from torchax_serve.distributed.ray.application import Replica

ENGINE = EngineOptions(max_model_len=64, max_num_seqs=2, max_num_steps=4)
QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    out = tmp_path_factory.mktemp("bundle") / "embedded"
    with serve(EMBEDDED, dtype="float32", engine=ENGINE, pack_weights=False) as model:
        model.export(out, reference=False)
        return out, model.chat(QUESTION, SamplingParams(max_new_tokens=8, temperature=0))


async def answer(replica):
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": headers}
    messages = [each async for each in replica.respond(made_request(scope, json.dumps(body).encode()))]
    assert messages[0]["status"] == 200, messages
    return json.loads(b"".join(each.get("body", b"") for each in messages[1:]))["choices"][0]["message"]["content"]


def test_a_replica_answers_from_a_bundle(bundle):
    folder, expected = bundle
    replica = Replica(DeployOptions(model=str(folder), server=ServerOptions(served_model_names=("tiny",))))
    replica.check_health()
    assert asyncio.run(answer(replica)) == expected
    replica._model.close()


def test_sizes_other_than_the_bundles_are_refused(bundle):
    with pytest.raises(InvalidArgumentError, match="max_num_seqs: expected 2, as the bundle was exported with, got 9"):
        Replica(DeployOptions(model=str(bundle[0]), max_num_seqs=9))
