"""Quantized folders whose tensors or settings are not what the format says: one line each, and never other numbers."""

import json
from pathlib import Path

import numpy as np
import pytest
import test_compressed_tensors
import test_fp8
import test_gptq_awq
import torch
from quantized_folders import check_weights, tiny_llama
from safetensors.torch import load_file, save_file

from model_adapters.errors import CheckpointError, TorchaxServeError, UnsupportedModelError
from model_adapters.loading import load_model
from model_adapters.loading.formats import bitsandbytes
from model_adapters.loading.formats.settings import QuantizationSettings
from model_adapters.loading.formats.weight_groups import WeightGroup
from model_adapters.ops.quantized_weight import NF4

NAME = "model.layers.0.self_attn.q_proj"
MODEL = {"num_hidden_layers": 1}
WRITERS = {
    "gptq": lambda folder: test_gptq_awq.gptq_folder(folder, tiny_llama(torch.float16, **MODEL)),
    "awq": lambda folder: test_gptq_awq.awq_folder(folder, tiny_llama(torch.float16, **MODEL)),
    "fp8": lambda folder: test_fp8.block_folder(folder, tiny_llama(**MODEL)),
    **{
        case: lambda folder, case=case: test_compressed_tensors.make_folder(folder, tiny_llama(**MODEL), case)
        for case in ("w4a16", "w4a16-asymmetric", "w8a8", "w8a8-asymmetric", "fp8-channel", "nvfp4")
    },
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Writes a folder of a kind once; its tensors, its configuration and the numbers that they mean."""
    made = {}

    def of(kind):
        if kind not in made:
            folder, expected = WRITERS[kind](tmp_path_factory.mktemp(kind))
            config = json.loads((folder / "config.json").read_text())
            made[kind] = load_file(folder / "model.safetensors"), config, expected
        tensors, config, expected = made[kind]
        return dict(tensors), json.loads(json.dumps(config)), expected

    return of


def write(folder, tensors, config):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


TENSORS = [
    ("gptq", "qweight", lambda t: t.float(), r"expected qweight in int32 with 2 axes, got float32\[16, 128\]"),
    ("gptq", "qweight", lambda t: t.flatten(), r"expected qweight in int32 with 2 axes, got int32\[2048\]"),
    ("gptq", "qweight", lambda t: t[:-1], r"expected g_idx \[120\], got \[128\]"),
    ("gptq", "scales", lambda t: t.int(), r"expected scales in float32 or bfloat16 or float16 with 2 axes, got int32"),
    ("awq", "qweight", lambda t: t.long(), r"expected qweight in int32 with 2 axes, got int64\[128, 16\]"),
    ("w4a16", "weight_packed", lambda t: t.float(), "expected packed in int32 with 2 axes, got float32"),
    ("w4a16", "weight_packed", lambda t: t[:, :-1], r"expected packed \[128, 16\], got \[128, 15\]"),
    (
        "w4a16",
        "weight_shape",
        lambda t: t[:1],
        r"its tensors \(packed int32\[128, 16\], .*shape int64\[1\]\) do not make",
    ),
    ("w4a16", "weight_scale", lambda t: None, "expected weight_scale with the weight in the files, got none"),
    (
        "w8a8",
        "weight_scale",
        lambda t: t.int(),
        r"expected scale in float32 or bfloat16 or float16 .* got int32\[128, 1",
    ),
    ("w8a8", "weight_scale", lambda t: t[:5], r"expected a scale for each of 128 rows, got \[5, 1\]"),
    ("w8a8", "weight_scale", lambda t: t[0, 0], r"expected a scale for each of 128 rows, got \[\]"),
    ("w4a16-asymmetric", "weight_zero_point", lambda t: t[:0], r"expected zero_point \[16, 4\], got \[0, 4\]"),
    (
        "w8a8-asymmetric",
        "weight_zero_point",
        lambda t: t[:0],
        r"expected weight_zero_point in int8\[128, 1\], got int8",
    ),
    (
        "w4a16-asymmetric",
        "weight_zero_point",
        lambda t: t.bool(),
        r"expected weight_zero_point in int8.*, got bool\[16, 4\]",
    ),
    ("fp8-channel", "weight_scale", lambda t: t[:5], r"expected a scale for each of 128 rows, got \[5, 1\]$"),
    ("nvfp4", "weight_global_scale", lambda t: None, "expected one weight_global_scale, got none"),
    ("nvfp4", "weight_global_scale", lambda t: t.int(), "expected global_scale in float32 or .*, got int32"),
    ("nvfp4", "weight_packed", lambda t: t.int(), r"expected packed in uint8 with 2 axes, got int32\[128, 64\]"),
    ("fp8", "weight", lambda t: t.flatten(), r"expected a matrix, got \[16384\]"),
    ("fp8", "weight_scale_inv", lambda t: t.int(), r"expected scale in float32 or .* got int32\[1, 1\]"),
]


@pytest.mark.parametrize(("kind", "part", "change", "said"), TENSORS)
def test_a_part_of_another_dtype_or_shape_is_one_line_that_names_the_weight(
    kind, part, change, said, written, tmp_path
):
    tensors, config, _ = written(kind)
    changed = change(tensors.pop(f"{NAME}.{part}"))
    if changed is not None:
        tensors[f"{NAME}.{part}"] = changed
    with pytest.raises(CheckpointError, match=f"^{NAME}.weight: {said}") as caught:
        load_model(write(tmp_path, tensors, config))
    assert "\n" not in str(caught.value)


def group_with(**changes):
    def change(settings):
        settings["config_groups"]["group_0"]["weights"] |= changes

    return change


def of_group(**changes):
    return lambda settings: settings["config_groups"]["group_0"].update(changes)


def two_groups(settings):
    group = settings["config_groups"]["group_0"]
    settings["config_groups"] = {"a": group | {"targets": ["Conv1d"]}, "b": group | {"targets": ["re:.*mlp.*"]}}


def all_of(**changes):
    return lambda settings: settings.update(changes)


SETTINGS = [
    ("gptq", all_of(checkpoint_format="marlin"), r"checkpoint_format 'marlin' \(expected gptq or gptq_v2\)"),
    ("gptq", all_of(dynamic={"(": {"bits": 8}}), r"expected a regular expression in quantization_config, got '\('"),
    ("gptq", all_of(dynamic=[8]), r"expected dynamic of quantization_config to be an object, got \[8\]"),
    ("gptq", all_of(dynamic={".*": 8}), "expected dynamic to map patterns to settings, got 8"),
    (
        "awq",
        all_of(modules_to_not_convert="lm_head"),
        "expected modules_to_not_convert to be a list of modules, got 'lm_",
    ),
    ("w4a16", all_of(ignore=["re:("]), r"expected a regular expression in quantization_config, got '\('"),
    ("w4a16", all_of(config_groups={"a": 1}), "a of config_groups: expected an object, got 1"),
    (
        "w4a16",
        of_group(targets="Linear"),
        "group_0 of config_groups: expected targets as a list of modules, got 'Linear'",
    ),
    ("w4a16", of_group(weights=[4]), r"group_0 of config_groups: expected weights as an object, got \[4\]"),
    ("w4a16", group_with(type="complex"), "expected weights of type int or float, got 'complex'"),
    (
        "w4a16",
        group_with(symmetric=False),
        "symmetric is false, so expected weight_zero_point with .*proj.weight",
    ),
    ("w8a8", group_with(num_bits="8"), "expected num_bits as a whole number, got '8'"),
    ("w4a16", group_with(strategy="diagonal"), "expected a strategy among tensor, channel, .*got 'diagonal'"),
    ("w4a16", group_with(group_size=0), "expected group_size to be -1 or at least 1, got 0"),
    (
        "w4a16",
        two_groups,
        f"expected a group of config_groups for {NAME.replace('q_proj', 'k_proj')}, got none among 2",
    ),
    ("fp8", all_of(weight_block_size=[0, 128]), r"expected weight_block_size as rows and columns, got \[0, 128\]"),
]


@pytest.mark.parametrize(("kind", "change", "said"), SETTINGS)
def test_settings_that_make_no_sense_are_one_line_that_names_the_file(kind, change, said, written, tmp_path):
    tensors, config, _ = written(kind)
    change(config["quantization_config"])
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said) as caught:
        load_model(write(tmp_path, tensors, config))
    assert isinstance(caught.value, TorchaxServeError) and "\n" not in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


STATE = {"quant_type": "nf4", "blocksize": 64, "shape": [8, 64], "nested_blocksize": 256, "nested_offset": 0.1}


@pytest.mark.parametrize(
    ("part", "tensor", "said"),
    [
        ("table", torch.tensor(NF4[:8]), r"expected table \[16\], got \[8\]"),
        ("table", torch.tensor(NF4)[None], r"expected table in float32 or .* with 1 axes, got float32\[1, 16\]"),
        ("absmax", torch.ones(7), r"expected absmax \[8\], got \[7\]"),
        ("absmax", torch.ones(8, dtype=torch.int32), r"expected absmax in float32 or .*, got int32\[8\]"),
        ("nested_absmax", torch.ones(1), r"expected absmax in uint8 with 1 axes, got float32\[8\]"),
    ],
)
def test_a_part_of_bitsandbytes_4_bits_of_another_dtype_or_shape(part, tensor, said):
    state = torch.tensor(list(json.dumps(STATE).encode()), dtype=torch.uint8)
    weight = torch.zeros(256, 1, dtype=torch.uint8)
    tensors = {"weight": weight, "absmax": torch.ones(8), "table": torch.tensor(NF4), "nf4": state}
    settings = QuantizationSettings("bitsandbytes", {}, Path("config.json"))
    assert bitsandbytes.read(WeightGroup("w", {}), tensors, settings).scale.shape == (8, 1)
    with pytest.raises(CheckpointError, match=f"^w: {said}"):
        bitsandbytes.read(WeightGroup("w", {}), tensors | {part: tensor}, settings)


def test_integers_without_a_scale_are_no_dense_weight(written, tmp_path):
    tensors, config, _ = written("w8a8")
    del tensors[f"{NAME}.weight_scale"]
    with pytest.raises(
        CheckpointError, match=rf"^{NAME}.weight is in torch.int8 without a scale: get the weights again"
    ):
        load_model(write(tmp_path, tensors, config))
    others = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale")}
    del config["quantization_config"]
    with pytest.raises(CheckpointError, match=r"is part of a quantized weight, and .* has no quantization_config"):
        load_model(write(tmp_path, others, config))


def test_settings_that_are_no_object_are_one_line_of_this_project(written, tmp_path):
    tensors, config, _ = written("gptq")
    with pytest.raises(CheckpointError, match=r"expected quantization_config to be an object, got 'gptq'$"):
        load_model(write(tmp_path, tensors, config | {"quantization_config": "gptq"}))


@pytest.mark.parametrize("scale", [0.0, float("nan")])
def test_a_scale_of_activations_that_divides_nothing(scale, written, tmp_path):
    tensors, config, _ = written("w8a8")
    tensors[f"{NAME}.input_scale"] = torch.tensor([scale])
    inputs = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
    of_group(input_activations=inputs)(config["quantization_config"])
    with pytest.raises(CheckpointError, match=f"^{NAME}.weight: expected a positive input_scale, got {scale}"):
        load_model(write(tmp_path, tensors, config))


@pytest.mark.parametrize(
    ("kind", "part"),
    [("gptq", "scales"), ("w4a16", "weight_scale"), ("w8a8", "weight_scale"), ("fp8", "weight_scale_inv")],
)
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scales_that_are_zero_or_negative_mean_what_the_formats_tools_make_of_them(
    kind, part, scale, written, tmp_path
):
    """A product with the scale: a group of zeros, or one with its signs changed."""
    tensors, config, expected = written(kind)
    name = f"{NAME}.{part}"
    tensors[name] = tensors[name].clone()
    before = tensors[name][0, 0].item()
    tensors[name][0, 0] = scale
    now = tensors[name][0, 0].item()
    rows, columns = {"fp8": (128, 128), "w8a8": (1, 128)}.get(kind, (1, 32))
    numbers = expected[f"{NAME}.weight"].double().numpy().copy()
    numbers[:rows, :columns] *= now / before
    loaded = load_model(write(tmp_path, tensors, config), dtype="float32")
    got = np.asarray(loaded.weights[f"{NAME}.weight"].unpacked(), np.float64)
    np.testing.assert_allclose(got, numbers, rtol=2**-7, atol=0)
    if kind in ("gptq", "fp8"):
        others = {name: numbers for name, numbers in expected.items() if not name.startswith(NAME)}
        check_weights(tmp_path, others, quantized=7)
