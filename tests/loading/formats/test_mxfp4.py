"""gpt-oss in MXFP4, against transformers' own dequantization."""

import pytest
import torch
import transformers as tf
from quantized_folders import check_generates, check_weights, dense_twin, tensors_of, write
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from model_adapters.errors import CheckpointError
from model_adapters.loading import load_model

SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def tiny_gpt_oss():
    torch.manual_seed(0)
    config = tf.GptOssConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = tf.GptOssForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.to(torch.bfloat16).eval()


def mxfp4_folder(folder, model):
    generator, expected, tensors = torch.Generator().manual_seed(0), {}, tensors_of(model)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 126, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    return write(folder, model, tensors, SETTINGS), expected


def test_every_number_is_that_of_transformers_dequantization(tmp_path):
    model = tiny_gpt_oss()
    folder, expected = mxfp4_folder(tmp_path / "model", model)
    loaded = check_weights(folder, expected)
    assert not loaded.report.unused_tensors and not loaded.report.missing_tensors


def test_it_generates_the_tokens_of_its_dequantized_twin(tmp_path):
    model = tiny_gpt_oss()
    folder, expected = mxfp4_folder(tmp_path / "model", model)
    check_generates(folder, dense_twin(model, expected))


def test_a_scale_that_is_no_number(tmp_path):
    model = tiny_gpt_oss()
    folder, _ = mxfp4_folder(tmp_path / "model", model)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[f"{name}_scales"][0, 0, 0] = 255
    write(folder, model, tensors, SETTINGS)
    with pytest.raises(CheckpointError, match=f"^{name}: expected a finite scale, got NaN or infinity"):
        load_model(folder)
