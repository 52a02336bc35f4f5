"""Bundles of models with recurrent layers, and with indexers: the tokens of eager PyTorch, without PyTorch."""

import json
import sys
from pathlib import Path

import pytest
from exported import output_of
from thorough import except_for

from torchax_serve import EngineOptions, InvalidArgumentError, serve

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import test_recurrent_layers as recurrent
import test_sparse_indexers as sparse

ENGINE = EngineOptions(max_model_len=64, max_num_seqs=2, page_size=8, max_num_batched_tokens=16, max_num_steps=2)
LENGTHS = 33, 5, 20
HIT_TOKENS = {
    "falcon_h1": [24, 24],
    "mamba": [24, 24],
    "mamba2": [24, 24],
    "qwen3_5_text": [24, 24],
    "kimi_linear": [24, 24],
    "lfm2": [24, 24],
    "nemotron_h": [24, 24],
    "inkling2_text": [0, 24],
    "inkling2_loop_text": [24, 24],
    "qwen4_exp_text": [24, 24],
    "deepseek_v32": [32, 32],
    "glm_moe_dsa": [32, 32],
    "deepseek_v4": [0, 32],
}
"""Tokens of the first prompt that are found when it comes again and again: up to its last page but one, or its last.

A short window has few pages, which the other prompts have taken before the first one comes back.
"""

# Prompts at once, then the first one again, whose beginning is found; prints tokens and how many were not computed.
SCRIPT = """
import json, sys
from torchax_serve import SamplingParams, serve
prompts = json.loads(sys.argv[2])
params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
with serve(sys.argv[1]) as model:
    tokens = [answer.token_ids for answer in model.generate_batch(prompts, params)]
    found = [model.stats().scheduler.num_hit_tokens]
    for _ in range(2):
        tokens += [answer.token_ids for answer in model.generate_batch(prompts[:1], params)]
        found.append(model.stats().scheduler.num_hit_tokens)
    print(json.dumps([tokens, found]))
"""


@pytest.fixture(params=except_for(["falcon_h1"], HIT_TOKENS))
def model_type(request):
    return request.param


def test_tokens_are_those_of_eager_pytorch(model_type, tmp_path):
    module = sparse if model_type in sparse.TYPES else recurrent
    ids, eager = module.prompts(*LENGTHS), module.tiny(model_type)
    expected = [module.eager_tokens(eager, each) for each in ids]
    with serve(module.tiny(model_type), engine=ENGINE, pack_weights=False) as model:
        model.export(tmp_path / "bundle", reference=False)
    found, num_hits = json.loads(output_of(SCRIPT, tmp_path / "bundle", json.dumps(ids)))
    assert found == [*expected, expected[0], expected[0]]
    first, again = HIT_TOKENS[model_type]
    assert num_hits == [0, first, first + again]
    if again == 24:  # snapshots are part of a bundle
        without = EngineOptions(enable_prefix_caching=False)
        with pytest.raises(InvalidArgumentError, match="enable_prefix_caching: expected True, as the bundle was exp"):
            serve(tmp_path / "bundle", engine=without)
