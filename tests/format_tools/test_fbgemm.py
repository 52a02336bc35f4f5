"""FBGEMM fp8: weights that FBGEMM quantizes by row on a CPU, against its own rule for what they mean.

Its function takes Triton's kernel on a GPU and torch's operators on a CPU; Triton has to be installed all the same.
FBGEMM's products need a GPU: ``pip install --no-deps --target FOLDER fbgemm-gpu-genai triton``.
"""

import warnings

import pytest
import torch
import transformers as tf
from partial_imports import without_imports
from quantized_folders import check_generates, check_weights, dense_twin, replaced, tensors_of, tiny_llama, write

without_imports("fbgemm_gpu")  # which loads libraries of CUDA first of all

with warnings.catch_warnings():  # of Triton, about what FBGEMM passes to it
    warnings.simplefilter("ignore")
    from fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm import quantize_fp8_row

SETTINGS = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_has_the_numbers_times_the_scale_of_its_row(dtype, tmp_path):
    model, expected = tiny_llama(dtype), {}

    def make(module, weight):
        values, scale = quantize_fp8_row(weight)
        expected[f"{module}.weight"] = values.float() * scale[:, None]
        assert (expected[f"{module}.weight"] - weight.float()).abs().max() <= weight.float().abs().max() / 16
        bound = torch.tensor([1200.0])
        return {
            f"{module}.weight": values,
            f"{module}.weight_scale": scale[:, None],
            f"{module}.input_scale_ub": bound,
        }

    folder = write(tmp_path / "model", model, replaced(model, make), SETTINGS)
    loaded = check_weights(folder, expected)
    assert not loaded.report.unused_tensors
    check_generates(folder, dense_twin(model, expected))


def test_experts_of_llama_4_that_are_quantized_as_transformers_does(tmp_path):
    """`FbgemmFp8Quantize.convert` turns [E, in, out] around, quantizes rows, and turns the numbers back."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "intermediate_size_mlp": 64, "head_dim": 16}
    config = tf.Llama4TextConfig(
        **sizes, vocab_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, num_local_experts=3
    )
    torch.manual_seed(0)
    model, expected = tf.Llama4ForCausalLM(config).to(torch.bfloat16), {}
    tensors = tensors_of(model)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        turned = tensors.pop(name).transpose(1, 2)
        values, scale = quantize_fp8_row(turned.reshape(-1, turned.shape[-1]))
        values, scale = values.reshape(turned.shape), scale.reshape(*turned.shape[:2], 1)
        expected[name] = (values.float() * scale).transpose(1, 2)
        tensors[name] = values.transpose(1, 2)
        tensors[f"{name}_scale"] = scale.transpose(1, 2) if "gate_up" in name else scale
    loaded = check_weights(write(tmp_path / "model", model, tensors, SETTINGS), expected)
    assert len(expected) == 2 and not loaded.report.unused_tensors and not loaded.report.missing_tensors
