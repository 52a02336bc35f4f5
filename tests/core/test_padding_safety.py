"""Lengths are padded on the right only where that changes nothing: results are those of PyTorch."""

import copy

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CsmConfig,
    CsmForConditionalGeneration,
    GPT2Config,
    GPT2DoubleHeadsModel,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    T5Gemma2EncoderConfig,
    T5Gemma2TextConfig,
)
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

from model_adapters.program.padding_safety import may_have_further_logits, right_padding_is_safe
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


def double_heads():
    return GPT2DoubleHeadsModel(GPT2Config(**GPT2, pad_token_id=0))


def mixture():
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, output_router_logits=True))


GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}


@pytest.mark.parametrize(("make", "field"), [(double_heads, "mc_logits"), (mixture, "router_logits")])
def test_a_second_head_sees_no_padding(make, field):
    """One reads the last token, one returns a row for each token."""
    torch.manual_seed(0)
    eager = make().eval()
    model, ids = to_jax(copy.deepcopy(eager)), torch.arange(3, 17).reshape(2, 7)
    with torch.no_grad():
        wanted = eager(input_ids=ids)
    found = model(input_ids=ids)
    torch.testing.assert_close(found.logits, wanted.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[field], wanted[field], atol=1e-4, rtol=1e-4)


def test_which_forwards_may_have_further_logits():
    assert not may_have_further_logits(GPT2LMHeadModel(GPT2Config(**GPT2)))
    assert may_have_further_logits(double_heads())


def csm():
    """Returns the logits of its depth decoder with labels alone."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    depth = {**sizes, "num_key_value_heads": 2, "backbone_hidden_size": 16, "head_dim": 8}
    config = CsmConfig(**sizes, num_key_value_heads=2, head_dim=8, text_vocab_size=64, depth_decoder_config=depth)
    return CsmForConditionalGeneration(config)


@pytest.mark.parametrize("make", [csm, double_heads])
def test_lengths_share_programs_where_no_further_logits_come(make):
    torch.manual_seed(0)
    eager = make().eval()
    model, batch = to_jax(copy.deepcopy(eager)), 1
    shape = (eager.config.num_codebooks,) if make is csm else ()
    for length in (5, 6, 7):
        ids = torch.randint(3, 60, (batch, length, *shape))
        with torch.no_grad():
            wanted = eager(input_ids=ids)
        torch.testing.assert_close(model(input_ids=ids).logits, wanted.logits, atol=1e-4, rtol=1e-4)
    assert model._jax_runtime.steps.num_traces["forward"] == (1 if make is csm else 3)


def t5():
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, attn_implementation="eager"))


def bart():
    sizes = {"vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 24}
    heads = {"decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return BartForConditionalGeneration(BartConfig(**sizes, **heads, attn_implementation="eager"))


@pytest.mark.parametrize("make", [t5, bart])
def test_attentions_of_an_encoder_decoder(make):
    torch.manual_seed(0)
    eager = make().eval()
    model = to_jax(copy.deepcopy(eager))
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    given = {"inputs": torch.arange(3, 17).reshape(2, 7), "output_attentions": True, "output_hidden_states": True}
    wanted, found = (each.generate(**given, **options) for each in (eager, model))
    assert torch.equal(found.sequences, wanted.sequences)
    for name in ("encoder_attentions", "encoder_hidden_states"):
        torch.testing.assert_close(found[name], wanted[name], atol=1e-4, rtol=1e-4)
    for name in ("decoder_attentions", "cross_attentions", "decoder_hidden_states"):
        torch.testing.assert_close(found[name], wanted[name], atol=1e-4, rtol=1e-4)
