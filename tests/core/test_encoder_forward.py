"""Forwards in which a token sees what stands behind it: nothing may be padded there."""

import copy

import pytest
import torch
import transformers

from torchax_serve import to_jax

CONFIGS = {
    "bert": {"is_decoder": False},  # a causal language model by name, run as an encoder
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4},  # causal by a mask of its own
}
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("model_type", CONFIGS)
def test_logits_at_a_length_between_rungs(model_type):
    known = transformers.AutoConfig.for_model(model_type).to_dict().keys() | CONFIGS[model_type].keys()
    options = {name: value for name, value in COMMON.items() if name in known} | CONFIGS[model_type]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **options)
    eager = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(3, 64, (2, 11))
    with torch.no_grad():
        expected = eager(input_ids=ids).logits
    found = to_jax(copy.deepcopy(eager))(input_ids=ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
