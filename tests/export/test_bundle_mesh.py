"""A bundle of a model on two devices runs on two devices, without PyTorch, with the tokens of eager transformers."""

import json

from exported import NUM_TOKENS, PROMPTS, eager_tokens, output_of, run

from model_adapters.loading.model_source import EMBEDDED

TWO = "--xla_force_host_platform_device_count=2"
EXPORT = """
from torchax_serve import EngineOptions, serve
options = EngineOptions(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32, max_num_steps=4)
with serve(sys.argv[1], dtype="float32", mesh={"model": 2}, engine=options) as model:
    print(model.export(sys.argv[2], reference=False))
"""
SERVE = """
import json
from torchax_serve import SamplingParams, serve
with serve(sys.argv[1]) as model:
    params = SamplingParams(max_new_tokens=int(sys.argv[3]), ignore_eos=True)
    found = [each.token_ids for each in model.generate_batch(json.loads(sys.argv[2]), params)]
    shards = {len(array.sharding.device_set) for array in model._weights.values()}
print(json.dumps([found, sorted(shards)]))
"""


def test_two_devices(tmp_path):
    bundle = tmp_path / "bundle"
    exported = run(EXPORT, EMBEDDED, bundle, refused=None, XLA_FLAGS=TWO)
    assert exported.returncode == 0, exported.stderr
    arguments = bundle, json.dumps(PROMPTS), NUM_TOKENS
    found, shards = json.loads(output_of(SERVE, *arguments, XLA_FLAGS=TWO))
    assert found == eager_tokens(EMBEDDED)
    assert shards == [2]
    fewer = run(SERVE, *arguments)
    assert fewer.returncode and "expected 2 devices, for which the bundle's programs were exported" in fewer.stderr
