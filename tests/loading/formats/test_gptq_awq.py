"""GPTQ and AWQ, packed here by plain torch as their libraries lay them out.

The layouts are those of AutoGPTQ (``auto_gptq/nn_modules/qlinear/qlinear_cuda.py``: ``pack``) and AutoAWQ
(``awq/modules/linear/gemm.py``: ``from_linear``), whose kernels need a GPU.
"""

import json
import re

import jax
import numpy as np
import pytest
import torch
from quantized_folders import check_generates, check_weights, dense_twin, pack_words, replaced, tiny_llama, write
from safetensors.torch import load_file

from model_adapters.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from model_adapters.loading import load_model

GROUP = 32


def quantize(weight, bits, group_of, symmetric=False):
    """Integers [out, in], scales and zero points [out, groups] in float32, and the numbers they mean."""
    groups = int(group_of.max()) + 1
    weight = weight.float()
    scale, zero = torch.empty(weight.shape[0], groups), torch.empty(weight.shape[0], groups)
    for group in range(groups):
        columns = weight[:, group_of == group]
        least, most = columns.amin(1), columns.amax(1)
        if symmetric:
            most = torch.maximum(most.abs(), least.abs())
            least = -most
        scale[:, group] = ((most - least).clamp_min(1e-5) / (2**bits - 1)).half().float()
        middle = torch.full_like(most, 2 ** (bits - 1))
        # A zero point of 0 cannot be stored less one.
        zero[:, group] = middle if symmetric else torch.round(-least / scale[:, group]).clamp(1, 2**bits - 1)
    spread = scale[:, group_of], zero[:, group_of]
    numbers = torch.round(weight / spread[0] + spread[1]).clamp(0, 2**bits - 1)
    return numbers, scale, zero, (numbers - spread[1]) * spread[0]


def gptq_folder(folder, model, *, bits=4, version="gptq", act_order=False, symmetric=False, **settings):
    expected = {}

    def make(module, weight):
        num_columns = weight.shape[1]
        group_of = torch.arange(num_columns) // GROUP
        if act_order:
            group_of = group_of[torch.randperm(num_columns, generator=torch.Generator().manual_seed(num_columns))]
        numbers, scale, zero, expected[f"{module}.weight"] = quantize(weight, bits, group_of, symmetric)
        stored_zero = zero - int(version == "gptq")
        return {
            f"{module}.qweight": pack_words(numbers.T, bits, 0),
            f"{module}.qzeros": pack_words(stored_zero.T, bits, 1),
            f"{module}.scales": scale.T.half(),
            f"{module}.g_idx": group_of.int(),
        }

    said = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": GROUP,
        "desc_act": act_order,
        "checkpoint_format": version,
    }
    return write(folder, model, replaced(model, make), {**said, **settings}), expected


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_has_every_number_of_its_integers(bits, version, act_order, tmp_path):
    model = tiny_llama(torch.float16)
    folder, expected = gptq_folder(tmp_path / "model", model, bits=bits, version=version, act_order=act_order)
    loaded = check_weights(folder, expected)
    weight = loaded.weights["model.layers.0.mlp.up_proj.weight"]
    assert (weight.columns is not None) == act_order and not loaded.report.unused_tensors
    assert weight.scheme.bits == (8 if bits == 8 else 4)


def test_gptq_with_zero_points_in_the_middle_needs_no_offset(tmp_path):
    model = tiny_llama(torch.float16, num_hidden_layers=1)
    folder, expected = gptq_folder(tmp_path / "model", model, symmetric=True)
    loaded = check_weights(folder, expected)
    assert loaded.weights["model.layers.0.mlp.up_proj.weight"].offset is None


def test_gptq_with_settings_of_their_own_for_some_modules(tmp_path):
    model = tiny_llama(torch.float16, num_hidden_layers=1)
    eight, wide = gptq_folder(tmp_path / "eight", model, bits=8)
    four, narrow = gptq_folder(tmp_path / "four", model)
    tensors = load_file(four / "model.safetensors")
    other = load_file(eight / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    tensors |= {key: other[key] for key in other if key.startswith(name)}
    said = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "dynamic": {r".*down_proj": {"bits": 8}}}
    write(tmp_path / "model", model, tensors, said)
    check_weights(tmp_path / "model", {**narrow, f"{name}.weight": wide[f"{name}.weight"]})


def test_gptq_in_act_order_generates_the_tokens_of_its_dequantized_twin(tmp_path):
    model = tiny_llama(torch.float16)
    folder, expected = gptq_folder(tmp_path / "model", model, act_order=True)
    check_generates(folder, dense_twin(model, expected))


def awq_folder(folder, model, **settings):
    expected = {}
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def in_order(numbers):
        return numbers.reshape(numbers.shape[0], -1, 8)[..., order].reshape(numbers.shape)

    def make(module, weight):
        numbers, scale, zero, expected[f"{module}.weight"] = quantize(weight, 4, torch.arange(weight.shape[1]) // GROUP)
        return {
            f"{module}.qweight": pack_words(in_order(numbers.T.contiguous()), 4, 1),
            f"{module}.qzeros": pack_words(in_order(zero.T.contiguous()), 4, 1),
            f"{module}.scales": scale.T.half(),
        }

    said = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return write(folder, model, replaced(model, make), {**said, **settings}), expected


def test_awq_has_every_number_of_its_integers(tmp_path):
    model = tiny_llama(torch.float16)
    folder, expected = awq_folder(tmp_path / "model", model)
    loaded = check_weights(folder, expected)
    assert not loaded.report.unused_tensors


def test_awq_in_float16_runs_in_bfloat16_where_that_is_asked_for(tmp_path):
    folder, expected = awq_folder(tmp_path / "model", tiny_llama(torch.float16))
    assert load_model(folder).dtype == "float16"
    check_weights(folder, expected, dtype="bfloat16")


def test_awq_generates_the_tokens_of_its_dequantized_twin(tmp_path):
    model = tiny_llama(torch.float16)
    folder, expected = awq_folder(tmp_path / "model", model)
    check_generates(folder, dense_twin(model, expected))


@pytest.mark.parametrize(
    ("make", "changes", "said"),
    [
        (
            awq_folder,
            {"version": "gemv"},
            r"awq with version 'gemv' \(expected gemm\).*use a checkpoint of the version gemm",
        ),
        (awq_folder, {"bits": 8}, r"awq with bits 8 \(expected 4\)"),
        (gptq_folder, {"bits": 3}, r"gptq with bits 3 \(expected 2, 4 or 8\).*use a checkpoint in 4 bits"),
    ],
)
def test_layouts_that_are_not_read_are_refused_by_name(make, changes, said, tmp_path):
    folder, _ = make(tmp_path / "model", tiny_llama(torch.float16, num_hidden_layers=1))
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedModelError, match=said):
        load_model(folder)


NAME = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: {f"{NAME}.scales": t[f"{NAME}.scales"][:1]},
            r"expected scales \[4, 128\], got \[1, 128\]: bits or group",
        ),
        (lambda t: {f"{NAME}.qzeros": t[f"{NAME}.qzeros"][:, :4]}, r"expected qzeros \[4, 16\], got \[4, 4\]"),
        (
            lambda t: {f"{NAME}.g_idx": t[f"{NAME}.g_idx"] + 9},
            "expected g_idx to give each group 32 columns, got others",
        ),
        (lambda t: {f"{NAME}.scales": t[f"{NAME}.scales"] * torch.nan}, "expected a finite scale, got NaN or infinity"),
        (lambda t: {f"{NAME}.weight": torch.ones(128, 128)}, "is in the files both quantized and dense"),
    ],
)
def test_tensors_that_do_not_fit_are_one_line_that_names_the_weight(change, said, tmp_path):
    model = tiny_llama(torch.float16, num_hidden_layers=1)
    folder, _ = gptq_folder(tmp_path / "model", model)
    tensors = load_file(folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    write(folder, model, {**tensors, **change(tensors)}, settings)
    with pytest.raises(
        (CheckpointError, InvalidArgumentError), match=f"^{NAME}.weight:? .*{said}|^{NAME}.weight {said}"
    ):
        load_model(folder)


def test_a_quantized_checkpoint_is_made_dense_or_rounded_again_if_that_is_asked_for(tmp_path):
    folder, expected = awq_folder(tmp_path / "model", tiny_llama(torch.float16, num_hidden_layers=1))
    dense = load_model(folder, dtype="float32", quantization="none")
    for name, tensor in expected.items():
        assert isinstance(dense.weights[name], jax.Array)
        np.testing.assert_array_equal(dense.weights[name], tensor)
    with pytest.raises(InvalidArgumentError, match=r"is quantized already \(awq\), and another grid .*requantize=True"):
        load_model(folder, quantization="int8")
    again = load_model(folder, quantization="int8", requantize=True)
    assert re.search(r"quantized again, which were awq in 4 bits: numbers off by 0\.\d+ %", again.report.quantization)
    assert again.weights["model.layers.0.mlp.up_proj.weight"].scheme.bits == 8
    model = tiny_llama(num_hidden_layers=1)
    plain = write(tmp_path / "plain", model, model.state_dict(), None)
    with pytest.raises(InvalidArgumentError, match="requantize: expected quantization rules and quantized weights"):
        load_model(plain, quantization="int8", requantize=True)
