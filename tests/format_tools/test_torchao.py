"""torchao: weights that it quantizes on a CPU and lays out for safetensors, against its own dequantization."""

import tools  # noqa: F401  # isort: skip

import pytest
import torch
import transformers as tf
from quantized_folders import check_weights, projections, tiny_llama
from torchao import quantization as ao

from model_adapters.errors import UnsupportedModelError
from model_adapters.loading import load_model

CONFIGS = {
    "int8": lambda: ao.Int8WeightOnlyConfig(),
    "float8": lambda: ao.Float8WeightOnlyConfig(),
    "int4-group": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32)),
    "int8-group": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=ao.PerGroup(64)),
    "int4-row": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerAxis(0)),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_every_number_is_that_of_the_tools_dequantization(case, tmp_path):
    plain = tiny_llama()
    plain.save_pretrained(tmp_path / "plain")
    quantized = tf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=tf.TorchAoConfig(CONFIGS[case]()), dtype=torch.bfloat16
    )
    quantized.save_pretrained(tmp_path / "model")
    weights = dict(quantized.named_parameters())
    expected = {name: weights[name].dequantize() for name in projections(plain)}
    loaded = check_weights(tmp_path / "model", expected, dtype="bfloat16")
    assert not loaded.report.unused_tensors


@pytest.mark.parametrize("kind", ["Int4Tensor", "Int4TilePackedTo4dTensor"])
def test_a_class_of_a_kernel_for_gpus_is_refused_by_name(kind, tmp_path):
    import json

    from safetensors.torch import save_file

    plain = tiny_llama(num_hidden_layers=1)
    plain.save_pretrained(tmp_path)
    described = {"_type": kind, "_data": {}, "_tensor_data_names": ["qdata"]}
    metadata = {"format": "pt", "model.layers.0.self_attn.q_proj.weight": json.dumps(described)}
    tensors = {name: tensor.contiguous() for name, tensor in plain.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"quantization_config": {"quant_method": "torchao"}}))
    with pytest.raises(UnsupportedModelError, match=f"torchao with tensors of class {kind} .* quantize it with IntxW"):
        load_model(tmp_path)
