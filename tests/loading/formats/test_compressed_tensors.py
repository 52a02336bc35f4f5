"""compressed-tensors: checkpoints that its own compressors write, against its own decompression."""

import json

import pytest
import torch
from quantized_folders import check_generates, check_weights, dense_twin, replaced, tiny_llama, write

from model_adapters.errors import CheckpointError, UnsupportedModelError
from model_adapters.loading import load_model

pytest.importorskip("compressed_tensors", reason="the format's own tool is part of the extra dev")

from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

TOKENS_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
TOKENS_FP8 = {**TOKENS_INT8, "type": "float"}
CASES = {
    "w8a8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, TOKENS_INT8),
    "w8a8-asymmetric": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
        None,
    ),
    "w8a8-tensor": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}, None),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, TOKENS_FP8),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, None),
    "fp8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]},
        None,
    ),
    "w4a16": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, None),
    "w4a16-asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        None,
    ),
    "w4a16-channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}, None),
    "w8a16": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 64}, None),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        None,
    ),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, None),
    "mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        None,
    ),
}


def by_group(weight, args):
    """The weight in the groups that share a scale, and the shape of their scales."""
    rows, columns = weight.shape
    if args.strategy == "tensor":
        return weight.reshape(1, -1), (1,)
    if args.strategy == "channel":
        return weight, (rows, 1)
    if args.strategy == "block":
        height, width = args.block_structure
        blocks = weight.reshape(rows // height, height, columns // width, width).permute(0, 2, 1, 3)
        return blocks.reshape(-1, height * width), (rows // height, columns // width)
    size = args.group_size
    return weight.reshape(-1, size), (rows, columns // size)


def compress(weight, scheme, kind):
    """The state of one layer as the tool writes it, and what the tool decompresses it to."""
    groups, shape = by_group(weight, scheme.weights)
    least, most = groups.amin(1), groups.amax(1)
    state = {"weight": weight}
    if kind == "nvfp4-pack-quantized":
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(least, most, scheme.weights, global_scale=state.get("weight_global_scale"))
    state |= {"weight_scale": scale.reshape(shape), "weight_zero_point": zero.reshape(shape)}
    compressor = BaseCompressor.get_value_from_registry(kind)
    written = compressor.compress(state, scheme)
    return written, compressor.decompress(dict(written), scheme)["weight"]


def make_folder(folder, model, case):
    kind, weights, inputs = CASES[case]
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=QuantizationArgs(**inputs) if inputs else None
    )
    expected = {}

    def make(module, weight):
        written, expected[f"{module}.weight"] = compress(weight.clone(), scheme, kind)
        return {f"{module}.{name}": tensor for name, tensor in written.items()}

    settings = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }
    return write(folder, model, replaced(model, make), settings), expected


@pytest.mark.parametrize("case", CASES)
def test_every_number_is_that_of_the_tools_decompression(case, tmp_path):
    model = tiny_llama()
    folder, expected = make_folder(tmp_path / "model", model, case)
    act = {"w8a8": "int8", "fp8-channel": "float8_e4m3fn"}.get(case, "none")
    loaded = check_weights(folder, expected, act_dtype=act, dtype="bfloat16")
    assert not loaded.report.unused_tensors


def test_a_packed_model_generates_the_tokens_of_its_dequantized_twin(tmp_path):
    model = tiny_llama(torch.float32)
    folder, expected = make_folder(tmp_path / "model", model, "w4a16-asymmetric")
    check_generates(folder, dense_twin(model, expected))


def settings_of(**changes):
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "marlin-24"}, r"format 'marlin-24' \(expected one of int-quantized"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format 'sparse-24-bitmask'"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (
            {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 3}}}},
            r"num_bits 3 \(expected 4 or 8\)",
        ),
    ],
)
def test_settings_that_are_not_read_are_refused_by_name(changes, said, tmp_path):
    model = tiny_llama(num_hidden_layers=1)
    folder, _ = make_folder(tmp_path / "model", model, "w4a16")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"quantization_config": settings_of(**changes)}))
    with pytest.raises(UnsupportedModelError, match=f"has weights in compressed-tensors with {said}.*is not read"):
        load_model(folder)


def test_groups_that_the_scales_do_not_have(tmp_path):
    model = tiny_llama(num_hidden_layers=1)
    folder, _ = make_folder(tmp_path / "model", model, "w4a16")
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"expected 3 scales in a row of 192 columns in groups of 64, got 6"):
        load_model(folder)


def test_scales_of_the_cache_are_left_out_with_one_line(tmp_path, caplog):
    from safetensors.torch import load_file

    model = tiny_llama(num_hidden_layers=1)
    folder, expected = make_folder(tmp_path / "model", model, "w8a16")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{part}_scale": torch.ones(1) for part in "kv"}
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    write(folder, model, tensors, settings)
    loaded = check_weights(folder, expected, dtype="bfloat16")
    said = [record.getMessage() for record in caplog.records if record.name == "torchax_serve"]
    assert said == [f"{folder / 'config.json'}: its scales of a quantized KV cache are not used"]
    assert not loaded.report.unused_tensors
