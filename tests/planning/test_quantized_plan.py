"""Plans of quantized weights and pages: bytes counted by hand, and what a configuration states."""

import dataclasses
import json

import pytest
import torch
import transformers
from test_plan import CONFIG, REQUEST, WEIGHTS_BYTES
from thorough import except_for

from model_adapters.errors import UnsupportedModelError
from model_adapters.loading.model_class import module_of
from torchax_serve.planning.abstract_model import empty_module
from torchax_serve.planning.plan import make_plan
from torchax_serve.planning.report import lines_of


@pytest.fixture
def module():
    return module_of(transformers.LlamaForCausalLM, CONFIG, torch.float32)


def config_file(folder, quantization):
    content = CONFIG.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    file = folder / "config.json"
    file.write_text(json.dumps(content | {"quantization_config": quantization}))
    return file


@pytest.mark.parametrize(("name", "dtype"), [("int8", "int8"), ("fp8", "float8_e4m3fn")])
def test_pages_in_8_bits_take_a_quarter_of_those_in_float32(module, name, dtype):
    dense, narrow = (
        make_plan(module, "toy", dataclasses.replace(REQUEST, kv_cache_dtype=each, prefill_lens=()))
        for each in ("auto", name)
    )
    assert (narrow.kv_cache_dtype, 4 * narrow.pages_bytes) == (dtype, dense.pages_bytes)
    scales = 2 * 2 * 2 * 4  # of keys and values, by layer and head
    assert narrow.programs[0].alias_bytes == narrow.pages_bytes + scales


def test_a_model_that_runs_per_sequence_is_planned_with_pages_in_int8():
    config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64)
    bloom = module_of(transformers.BloomForCausalLM, config, torch.float32)
    report = make_plan(bloom, "toy", dataclasses.replace(REQUEST, kv_cache_dtype="int8"))
    assert (report.executor, report.kv_cache_dtype) == ("per-sequence", "int8")
    assert report.programs[0].alias_bytes == report.pages_bytes + 2 * 2 * 4 * 4  # and scales of four heads


def test_quantized_weights_are_counted_with_their_scales(module):
    report = make_plan(module, "toy", dataclasses.replace(REQUEST, quantization="int8", prefill_lens=()))
    linear = 2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 64) + 64 * 32  # projections and the head
    assert report.weights_bytes == WEIGHTS_BYTES - 4 * linear + linear + 2 * linear // 32
    assert report.quantization == (
        "13 weights int8 (one scale a row, activations int8); 2 weights int8 (groups of 32, activations int8); "
        "8.50 bits a number"
    )
    assert report.weight_bits == round(8 * report.weights_bytes / (WEIGHTS_BYTES / 4), 3)
    assert report.programs[0].argument_bytes == pytest.approx(report.weights_bytes + report.pages_bytes, rel=0.05)
    assert report.bounds[0].bytes_read < report.weights_bytes + report.pages_bytes_wanted
    assert f"{report.weight_bits:.2f} bits a weight" in "\n".join(lines_of(report, from_cache=False))


STATED = {
    "fp8": ({"weight_block_size": [16, 16]}, "14 weights float8_e4m3fn (groups of 16)"),
    "gptq": ({"bits": 4, "group_size": 16, "sym": False}, "14 weights int4 (groups of 16)"),
    "awq": ({"bits": 4, "group_size": 16}, "14 weights int4 (groups of 16)"),
    "bitsandbytes": ({"load_in_4bit": True}, "14 weights int4 (one scale a row)"),
    "compressed-tensors": (
        {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}}},
        "14 weights int4 (groups of 16)",
    ),
}


@pytest.mark.parametrize("method", except_for(["fp8", "awq", "bitsandbytes"], STATED))
def test_a_quantized_checkpoint_is_planned_as_its_configuration_states(method, tmp_path):
    values, told = STATED[method]
    content = CONFIG.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(
        json.dumps(content | {"quantization_config": {"quant_method": method, **values}})
    )
    module, stated = empty_module(tmp_path / "config.json")
    report = make_plan(module, "toy", dataclasses.replace(REQUEST, quantization=stated, prefill_lens=()))
    assert told in report.quantization
    assert report.weight_bits < 16


def test_a_checkpoint_whose_weight_files_alone_say_how_is_refused(tmp_path):
    content = CONFIG.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": {"quant_method": "torchao"},
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    module, stated = empty_module(tmp_path / "config.json")
    with pytest.raises(UnsupportedModelError, match="torchao says how weights are quantized in its weight files alone"):
        make_plan(module, "toy", dataclasses.replace(REQUEST, quantization=stated))
