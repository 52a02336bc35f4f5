"""Adapters, and weights and pages in fewer bits, beside indexers, compressed entries and recurrent layers."""

import dataclasses

import numpy as np
import pytest
import test_recurrent_layers as recurrent
import test_sparse_indexers as sparse
import torch
from adapter_models import PeftModels, ranks
from cache_name import CACHE
from test_cache_in_8_bits import rounded
from thorough import except_for, thorough
from transformers.cache_utils import DynamicCache

from model_adapters.caches.packed_batch import pages_of
from model_adapters.ops.compressed_weight import unpacked
from torchax_serve import SamplingParams, serve

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
OPTIONS, NEW = sparse.OPTIONS, 8
LENGTHS = 33, 5, 20
TARGETS = {
    "deepseek_v32": ["q_b_proj", "kv_a_proj_with_mqa", "wq_b", "wk", "o_proj"],
    "deepseek_v4": ["q_b_proj", "kv_proj", "gate_proj", "weights_proj", "o_b_proj"],
    "qwen4_exp_text": ["index_qk_proj", "q_proj", "in_proj_qkv", "out_proj"],
    "glm_moe_dsa": ["q_b_proj", "kv_a_proj_with_mqa", "wq_b", "wk", "weights_proj", "o_proj"],
    "inkling2_text": ["linear", "weight_proj", "sink_proj"],
    "inkling2_loop_text": ["linear", "sink_proj", "forget_gate_proj", "message_gate_proj"],
    "qwen3_5_text": ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj", "down_proj"],
    "falcon_h1": ["in_proj", "q_proj", "down_proj"],
    "kimi_linear": ["q_proj", "f_a_proj", "b_proj", "g_b_proj", "kv_a_proj_with_mqa", "o_proj"],
    "mamba2": ["in_proj"],
    "nemotron_h": ["in_proj", "q_proj", "up_proj"],
    "lfm2": ["in_proj", "out_proj", "q_proj", "w2"],
    "minimax": ["qkv_proj", "out_proj", "q_proj"],
}
"""Layers with an adapter, by type: of indexers and compressors, of recurrences, and of attention.

peft refuses the projection behind a state space of Mamba 2 and Nemotron-H.
"""


def tiny(model_type):
    return (sparse if model_type in sparse.TYPES else recurrent).tiny(model_type)


def eager_tokens(model, ids):
    return recurrent.eager_tokens(model, ids, NEW)


def tokens(served, prompts, adapters=None):
    asked = [
        SamplingParams(max_new_tokens=NEW, temperature=0, ignore_eos=True, adapter=name)
        for name in adapters or [None] * len(prompts)
    ]
    return [list(answer.token_ids) for answer in served.generate_batch(prompts, asked)]


@pytest.mark.parametrize("model_type", except_for(["deepseek_v32", "qwen3_5_text"], TARGETS))
def test_adapters_of_requests(model_type, tmp_path):
    """Requests with each adapter and one without share steps, and prompts are cut into chunks."""
    configs = {key: {**config, "target_modules": TARGETS[model_type]} for key, config in ranks(2).items()}
    peft, prompts = PeftModels(tiny(model_type), tmp_path, configs), recurrent.prompts(*LENGTHS)
    names = [*peft.names, None]
    wanted = [peft.tokens(name, ids, NEW) for name, ids in zip(names, prompts, strict=True)]
    plain = [peft.tokens(None, ids, NEW) for ids in prompts]
    assert wanted[:2] != plain[:2]
    with serve(tiny(model_type), engine=OPTIONS, adapters=peft.folders()) as served:
        assert tokens(served, prompts, names) == wanted
        assert "not packed" not in served.engine.description
        assert tokens(served, prompts[:1] * 3, names) == [peft.tokens(name, prompts[0], NEW) for name in names]


@pytest.mark.parametrize("model_type", except_for(["deepseek_v32", "falcon_h1"], TARGETS))
def test_quantized_weights(model_type, tmp_path):
    """Tokens are those of the same weights made dense."""
    folder, prompts = tmp_path / "model", recurrent.prompts(*LENGTHS)
    eager = tiny(model_type)
    eager.save_pretrained(folder)
    with serve(folder, engine=OPTIONS, quantization={"weight_qtype": "int8"}) as served:
        found = tokens(served, prompts)
        assert "not packed" not in served.engine.description
        stored = {name: np.asarray(unpacked(weight)) for name, weight in served._runtimes[0].weights.items()}
    state = eager.state_dict()
    changed = [name for name, tensor in state.items() if not np.array_equal(stored[name], tensor)]
    assert len(changed) > 4
    eager.load_state_dict({name: torch.tensor(stored[name]) for name in state})
    assert found == [eager_tokens(eager, ids) for ids in prompts]


class RoundedCache(DynamicCache):
    """transformers' own cache over keys and values that numpy has rounded, by layer with pages."""

    def __init__(self, config, scales, dtype):
        super().__init__(config=config)
        self.scales, self.dtype, self.numbers = scales, dtype, {}

    def update(self, keys, values, layer_idx, *args, **kwargs):
        number = self.numbers.setdefault(layer_idx, len(self.numbers))
        pairs = zip((keys, values), self.scales[number], strict=True)
        return super().update(*(rounded(x.numpy(), by, self.dtype) for x, by in pairs), layer_idx, *args, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        ("qwen4_exp_text", "fp8"),
        thorough("qwen4_exp_text", "int8"),
        thorough("qwen3_5_text", "fp8"),
        thorough("falcon_h1", "fp8"),
        thorough("lfm2", "int8"),
        thorough("nemotron_h", "int8"),
        thorough("inkling2_text", "int8"),
    ],
)
def test_pages_in_8_bits(model_type, dtype):
    """Keys and values are rounded, index keys and states are as they are."""
    ids = recurrent.prompts(30)[0]
    with serve(tiny(model_type), engine=dataclasses.replace(OPTIONS, kv_cache_dtype=dtype)) as served:
        (found,) = tokens(served, [ids])
        assert "not packed" not in served.engine.description
        cache = served.engine._runner._cache
        scales, stored = cache._scales, str(pages_of(cache.pools[0]).dtype)
    eager = tiny(model_type)
    assert stored == {"int8": "int8", "fp8": "float8_e4m3fn"}[dtype]
    given = {CACHE: RoundedCache(eager.config, scales, stored)}
    row, options = torch.tensor([ids]), {"max_new_tokens": NEW, "do_sample": False}
    assert found == eager.generate(row, **given, **options)[0, len(ids) :].tolist()


def test_entries_of_compressed_tokens_in_8_bits():
    """They have no form in the packed step, which says so; each request by itself has them as its scales are."""
    with serve(tiny("deepseek_v4"), engine=dataclasses.replace(OPTIONS, kv_cache_dtype="int8")) as served:
        assert "entries of compressed tokens are not kept in 8 bits" in served.engine.description
        assert len(tokens(served, recurrent.prompts(9))[0]) == NEW
