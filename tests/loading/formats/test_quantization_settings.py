"""What configurations say of quantization: refusals by name, and where it may stand."""

import json
from pathlib import Path

import pytest

from model_adapters.errors import CheckpointError, UnsupportedModelError
from model_adapters.loading.formats.settings import matches, settings_in

FILE = Path("folder/config.json")


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("bitnet", "use the bfloat16 checkpoint of this model"),
        ("auto-round", "export it in the format gptq, awq or compressed-tensors"),
        ("quanto", "or one of torchao"),
        ("somebody's own", "use the unquantized checkpoint of this model"),
    ],
)
def test_a_method_that_is_not_read_is_named_with_what_to_use(method, remedy):
    with pytest.raises(UnsupportedModelError) as caught:
        settings_in({"quantization_config": {"quant_method": method}}, FILE)
    said = str(caught.value)
    assert said.startswith(f"{FILE} asks for quantized weights (quantization_config: {method})")
    assert said.endswith(remedy) and "expected one of awq, bitsandbytes, compressed-tensors" in said


@pytest.mark.parametrize("place", ["quantization_config", "compression_config"])
def test_it_may_stand_in_a_configuration_inside(place):
    inside = {"text_config": {place: {"quant_method": "compressed-tensors"}}}
    assert settings_in(inside, FILE).method == "compressed-tensors"
    assert settings_in({"text_config": {"hidden_size": 8}}, FILE) is None


def test_old_configurations_of_bitsandbytes_name_no_method():
    assert settings_in({"quantization_config": {"load_in_4bit": True}}, FILE).method == "bitsandbytes"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"quantization_config": "gptq"}, "expected quantization_config to be an object, got 'gptq'"),
        (
            {"quantization_config": {"quant_method": "awq"}, "text_config": {"quantization_config": {"bits": 4}}},
            "states two quantizations that differ",
        ),
    ],
)
def test_settings_that_contradict(content, said):
    json.dumps(content)
    with pytest.raises(CheckpointError, match=said):
        settings_in(content, FILE)


@pytest.mark.parametrize(
    ("pattern", "module", "found"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("model.visual", "model.visual.blocks.0", True),
        ("head", "lm_head", False),
        (r"re:.*\.experts\..*", "model.layers.0.mlp.experts.1.up_proj", True),
        ("re:experts", "model.experts", False),
    ],
)
def test_which_modules_a_name_or_pattern_means(pattern, module, found):
    assert matches(pattern, module) is found
