"""A bundle of a real model in a process without PyTorch, with the tokens of eager transformers."""

import json
import os
import subprocess
import sys

import texts

from torchax_serve import EngineOptions

NUM_TOKENS = 16
ENGINE = EngineOptions(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64)
RUN = """
import json, sys
class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "torchax"):
            raise AssertionError(f"{name} is imported")
sys.meta_path.insert(0, Refusal())
from torchax_serve import SamplingParams, serve
with serve(sys.argv[1]) as model:
    params = SamplingParams(max_new_tokens=int(sys.argv[3]), temperature=0)
    print(json.dumps([each.token_ids for each in model.generate_batch(json.loads(sys.argv[2]), params)]))
"""


def test_tokens_of_a_bundle(smollm2, served, tmp_path, found):
    prompts = [prompt for prompt in texts.prompts(smollm2.tokenizer) if len(prompt) < 400][:8]
    bundle = served.export(tmp_path / "bundle", engine=ENGINE, reference=False)
    command = [sys.executable, "-c", RUN, bundle, json.dumps(prompts), str(NUM_TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [smollm2.new_tokens(prompt, NUM_TOKENS) for prompt in prompts]
    found("smollm2", "greedy tokens of 8 prompts by a bundle, without PyTorch", "equal")
