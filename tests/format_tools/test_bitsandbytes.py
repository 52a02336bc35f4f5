"""bitsandbytes: weights that it quantizes on a CPU, against its own dequantization."""

import tools  # noqa: F401  # isort: skip

import bitsandbytes as bnb
import numpy as np
import pytest
import torch
from bitsandbytes import functional
from quantized_folders import check_generates, check_weights, dense_twin, replaced, tiny_llama, write

from model_adapters.errors import CheckpointError
from model_adapters.loading import load_model


def folder_in_4_bits(folder, model, kind, *, nested=False, block=64, storage=torch.uint8):
    expected = {}

    def make(module, weight):
        codes, state = functional.quantize_4bit(
            weight.float(), blocksize=block, compress_statistics=nested, quant_type=kind, quant_storage=storage
        )
        expected[f"{module}.weight"] = functional.dequantize_4bit(codes, state).float()
        parts = {f"{module}.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        return {f"{module}.weight": codes, **parts}

    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_quant_storage": str(storage).removeprefix("torch."),
    }
    return write(folder, model, replaced(model, make), settings), expected


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_4_bits_have_every_number_of_the_tools_dequantization(kind, nested, tmp_path):
    model = tiny_llama()
    folder, expected = folder_in_4_bits(tmp_path / "model", model, kind, nested=nested)
    loaded = check_weights(folder, expected)
    assert not loaded.report.unused_tensors


def test_bytes_that_are_stored_as_floats(tmp_path):
    """As FSDP needs them (bnb_4bit_quant_storage); many of these floats are NaN, and copies must keep their bits."""
    model = tiny_llama()
    folder, expected = folder_in_4_bits(tmp_path / "model", model, "nf4", storage=torch.bfloat16)
    check_weights(folder, expected)


def test_blocks_that_go_on_over_the_end_of_a_row(tmp_path):
    """The tool's own kernel for CPUs takes other scales then (0.50.2), but its quantizer and its CUDA kernel do not."""
    model = tiny_llama()
    folder, wrong = folder_in_4_bits(tmp_path / "model", model, "nf4", block=128)
    loaded, name = load_model(folder, dtype="float32"), "model.layers.0.mlp.down_proj.weight"
    assert tuple(wrong[name].shape) == (128, 192)  # a block and a half
    original = model.state_dict()[name].float().numpy()
    step = 0.16 * abs(original).max()  # the widest gap of the table is 0.30 of the largest number
    assert abs(np.asarray(loaded.weights[name].unpacked()) - original).max() < step


def test_nf4_generates_the_tokens_of_its_dequantized_twin(tmp_path):
    model = tiny_llama()
    folder, expected = folder_in_4_bits(tmp_path / "model", model, "nf4", nested=True)
    check_generates(folder, dense_twin(model, expected))


def test_int8_has_every_number_of_the_tools_dequantization(tmp_path):
    model, expected = tiny_llama(), {}

    def make(module, weight):
        values, largest, _ = functional.int8_vectorwise_quant(weight.half())
        expected[f"{module}.weight"] = functional.int8_vectorwise_dequant(values, largest).float()
        return {f"{module}.weight": values, f"{module}.SCB": largest, f"{module}.weight_format": torch.tensor(0).byte()}

    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    loaded = load_model(write(tmp_path / "model", model, replaced(model, make), settings), dtype="float32")
    for name, tensor in expected.items():
        np.testing.assert_allclose(loaded.weights[name].unpacked(), tensor, rtol=2e-7)  # the tool multiplies by 0.00787
    assert not loaded.report.unused_tensors


def test_a_layer_that_the_tool_saved_as_a_module(tmp_path):
    model, expected = tiny_llama(), {}

    def make(module, weight):
        layer = bnb.nn.Linear4bit(weight.shape[1], weight.shape[0], bias=False, quant_type="nf4")
        layer.weight = bnb.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4").to("cpu")
        expected[f"{module}.weight"] = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(
            torch.bfloat16
        )
        return {f"{module}.{name}": tensor for name, tensor in layer.state_dict().items()}

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    check_weights(write(tmp_path / "model", model, replaced(model, make), settings), expected, dtype="bfloat16")


def test_a_weight_without_its_state(tmp_path):
    from safetensors.torch import load_file

    model = tiny_llama(num_hidden_layers=1)
    folder, _ = folder_in_4_bits(tmp_path / "model", model, "nf4")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors.pop(f"{name}.quant_state.bitsandbytes__nf4")
    write(folder, model, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(CheckpointError, match=f"^{name}: expected its quant_state in the files, got none"):
        load_model(folder)
