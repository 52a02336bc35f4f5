"""A bundle of a model on two devices runs on two devices, without PyTorch, with the tokens of eager transformers."""

import json

import pytest
from exported import NUM_TOKENS, PROMPTS, eager_tokens, output_of, run

from model_adapters.loading.model_source import EMBEDDED

TWO = {"JAX_NUM_CPU_DEVICES": "2"}
COMMAND = "from torchax_serve.cli.main import main; main()"
OPTIONS = (
    "--mesh model=2 --dtype float32 --max-model-len 128 --max-num-seqs 4 --max-num-batched-tokens 32 --max-num-steps 4"
)
SERVE = """
import json
from torchax_serve import SamplingParams, serve
with serve(sys.argv[1]) as model:
    params = SamplingParams(max_new_tokens=int(sys.argv[3]), ignore_eos=True)
    found = [each.token_ids for each in model.generate_batch(json.loads(sys.argv[2]), params)]
    shards = {len(array.sharding.device_set) for array in model.device_weights.values()}
print(json.dumps([found, sorted(shards)]))
"""


REPLICAS = """
import json
from torchax_serve import SamplingParams, serve
with serve(sys.argv[1], mesh={"data": 2}) as model:
    params = SamplingParams(max_new_tokens=int(sys.argv[3]), ignore_eos=True)
    found = [each.token_ids for each in model.generate_batch(json.loads(sys.argv[2]), params)]
    steps = [engine.stats().num_steps for engine in model.engine.engines]
print(json.dumps([found, steps]))
"""


@pytest.mark.thorough
def test_two_replicas_of_a_bundle_of_one_device(bundle, expected):
    arguments = bundle, json.dumps(PROMPTS), NUM_TOKENS
    found, steps = json.loads(output_of(REPLICAS, *arguments, **TWO))
    assert found == expected
    assert len(steps) == 2 and min(steps) > 0, "one replica had all requests"
    fewer = run(REPLICAS, *arguments)
    assert fewer.returncode and "expected 2 devices, for which the bundle's programs were exported in 2" in fewer.stderr


def test_two_devices(tmp_path):
    bundle = tmp_path / "bundle"
    arguments = "export", EMBEDDED, bundle, *OPTIONS.split(), "--no-reference"
    exported = run(COMMAND, *arguments, refused=None, **TWO)
    assert exported.returncode == 0, exported.stderr
    refreshed = output_of(COMMAND, "bundle", "refresh", bundle, **TWO)
    assert f"{bundle / '2'}: " in refreshed
    arguments = bundle, json.dumps(PROMPTS), NUM_TOKENS
    found, shards = json.loads(output_of(SERVE, *arguments, **TWO))
    assert found == eager_tokens(EMBEDDED)
    assert shards == [2]
    fewer = run(SERVE, *arguments)
    assert fewer.returncode and "expected 2 devices, for which the bundle's programs were exported" in fewer.stderr
