"""Models whose code calls ``scaled_dot_product_attention`` itself, packed, beside eager PyTorch."""

import pytest
import torch
from test_recurrent_layers import eager_tokens, tokens
from transformers import FalconConfig, FalconForCausalLM
from weights import draw_matrices

from model_adapters.ops import registry
from torchax_serve import EngineOptions, serve

NEW = 12
OPTIONS = EngineOptions(page_size=4, max_num_batched_tokens=8, max_model_len=64, max_num_seqs=4)
KINDS = {
    "one head of keys": {"multi_query": True, "new_decoder_architecture": False},
    "groups of heads": {"new_decoder_architecture": True, "num_kv_heads": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_eager_pytorch(kind):
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = FalconConfig(**sizes, **KINDS[kind], alibi=False, bias=False, bos_token_id=1, eos_token_id=None)
    model = FalconForCausalLM(config).eval()
    draw_matrices(model, std=0.3)
    prompts = [torch.randint(2, 48, (length,)).tolist() for length in (3, 9, 20)]
    expected = [eager_tokens(model, ids, NEW) for ids in prompts]
    with serve(model, engine=OPTIONS) as served, registry.record_calls() as calls:
        assert tokens(served, prompts, NEW) == expected
    assert {op for op, _ in calls} >= {"paged_attention", "decode_attention"}
