"""What runs in each process of a deployment serves a bundle as it serves a model."""

import asyncio
import warnings

import pytest

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.model_source import EMBEDDED
from torchax_serve import EngineOptions, SamplingParams, serve
from torchax_serve.distributed.ray.options import DeployOptions

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
    request = {"messages": QUESTION, "max_new_tokens": 8, "temperature": 0}
    return "".join([piece async for piece in replica.stream(request)])


def test_a_replica_answers_from_a_bundle(bundle):
    folder, expected = bundle
    replica = Replica(DeployOptions(model=str(folder)))
    replica.check_health()
    assert asyncio.run(answer(replica)) == expected
    replica._model.close()


def test_sizes_other_than_the_bundles_are_refused(bundle):
    with pytest.raises(InvalidArgumentError, match="max_num_seqs: expected 2, as the bundle was exported with, got 9"):
        Replica(DeployOptions(model=str(bundle[0]), max_num_seqs=9))
