"""Lengths are padded on the right only where that changes nothing: results are those of PyTorch."""

import copy

import pytest
import torch
from transformers import T5Gemma2EncoderConfig, T5Gemma2TextConfig
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

from model_adapters.program.padding_safety import right_padding_is_safe
from torchax_serve import to_jax


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    text = T5Gemma2TextConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        dropout_rate=0.0,
        layer_types=["sliding_attention", "full_attention"],
    )
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = T5Gemma2EncoderConfig(
        text_config=text.to_dict(), vision_config={**vision, "image_size": 28, "patch_size": 14}
    )
    eager = T5Gemma2Encoder(config).eval()
    return eager, to_jax(copy.deepcopy(eager))


@pytest.mark.parametrize("length", [2, 5])
def test_an_encoder_in_the_file_of_a_decoder(pair, length):
    eager, model = pair
    assert not right_padding_is_safe(eager)
    ids = torch.arange(4, 4 + length)[None]
    with torch.no_grad():
        wanted = eager(input_ids=ids).last_hidden_state
    torch.testing.assert_close(model(input_ids=ids).last_hidden_state, wanted, atol=1e-4, rtol=1e-4)
