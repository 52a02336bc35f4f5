"""Folders that `quantize` writes: read by compressed-tensors with transformers, and by its own rule for the bits."""

import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError
from model_adapters.loading import RichProgress, load_model
from model_adapters.loading.save_quantized import save_quantized
from model_adapters.ops.quantized_weight import QuantizedWeight, dequantize
from model_adapters.quantization.rules import rules_for_files
from torchax_serve.cli.main import app

CONFIG = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(3, 27).reshape(2, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("plain")
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG, vocab_size=80), dtype=torch.bfloat16)
    model.save_pretrained(made)
    return made


RULES = {
    "int8": "int8",
    "int4": "int4",
    "w8a8": "w8a8",
    "fp8-w8a8": "fp8-w8a8",
    "groups": [
        {"module_path": ".*mlp.*", "weight_qtype": "int4", "tile_size": 32, "scale_dtype": "bfloat16"},
        {"module_path": ".*q_proj", "weight_qtype": "int8", "act_qtype": "int8", "scale_dtype": "bfloat16"},
    ],
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_transformers_computes_with_what_was_written(folder, tmp_path, rules):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed: pip install it")
    save_quantized(folder, tmp_path / "out", rules)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    dense = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        got = theirs(IDS).logits.float()
    ours = load_model(folder, quantization=rules_for_files(rules))
    state = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    quantized = {name: each for name, each in ours.weights.items() if isinstance(each, QuantizedWeight)}
    assert len(quantized) == (14 if isinstance(rules, str) else 8)
    for name, weight in quantized.items():
        state[name] = torch.from_numpy(np.array(dequantize(weight, "float32"))).bfloat16()
    dense.load_state_dict(state)
    with torch.no_grad():
        want = dense(IDS).logits.float()
    # Their side rounds activations as well, to 8 bits: of fp8 three lie behind the point.
    bound = {"int8": 0.006, "int4": 0.006, "fp8-w8a8": 0.05}.get(str(rules), 0.02)
    assert (got - want).norm() < bound * want.norm()


def test_four_bits_are_in_the_file_as_the_format_says(folder, tmp_path):
    save_quantized(folder, tmp_path / "out", "int4")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and config["format"] == "pack-quantized"
    assert config["ignore"] == ["lm_head"]
    path = "model.layers.1.mlp.down_proj"
    words, scale = tensors[f"{path}.weight_packed"].numpy().view(np.uint32), tensors[f"{path}.weight_scale"].float()
    assert tensors[f"{path}.weight_shape"].tolist() == [64, 256] and scale.shape == (64, 2)
    numbers = np.stack([words >> (4 * i) & 15 for i in range(8)], -1).reshape(64, 256).astype(np.float32) - 8
    plain = load_file(folder / "model.safetensors")[f"{path}.weight"].float().numpy()
    steps = np.repeat(scale.numpy(), 128, 1)
    assert (np.abs(numbers * steps - plain) <= 0.55 * steps).all()  # of bfloat16 scales


def test_a_tied_head_stays_dense(tmp_path):
    config = LlamaConfig(**CONFIG, vocab_size=80, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "in")
    said = save_quantized(tmp_path / "in", tmp_path / "out", "int8")
    assert said.startswith("14 weights int8 (one scale a row)")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.embed_tokens.weight" in written and "lm_head.weight" not in written  # once, as transformers has it
    weights = load_model(tmp_path / "out").weights
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]


def test_the_command_writes_and_refuses_in_one_line(folder, tmp_path):
    def run(*arguments):
        return CliRunner().invoke(app, ["quantize", str(folder), *map(str, arguments)])

    done = run(tmp_path / "out", "--quantization", "int8")
    assert done.exit_code == 0 and "14 weights int8" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()
    for arguments, said in (
        ((tmp_path / "out", "--quantization", "int8"), "OUT: expected a new or empty folder"),
        (
            (tmp_path / "out" / "model.safetensors" / "x", "--quantization", "int8"),
            "OUT: expected a folder that can be written, got",
        ),
        ((tmp_path / "b",), "expected --quantization with a preset"),
        ((tmp_path / "b", "--quantization", "none"), "expected a preset, a file or rules, got none"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_writing_shows_its_own_bar_and_none_of_transformers(folder, tmp_path, capfd):
    shown = io.StringIO()
    capfd.readouterr()
    save_quantized(folder, tmp_path / "out", "int8")
    save_quantized(folder, tmp_path / "again", "int8", progress=RichProgress(Console(file=shown, force_terminal=True)))
    assert capfd.readouterr() == ("", "")
    assert "loading" in shown.getvalue() and "writing" in shown.getvalue()


def test_what_the_format_cannot_hold_is_refused_by_name(folder, tmp_path):
    rules = {"weight_qtype": "int4", "weight_calibration_method": "minmax", "module_path": ".*q_proj"}
    with pytest.raises(
        UnsupportedArgumentError, match=r"^model.layers.0.self_attn.q_proj: expected a symmetric weight"
    ):
        save_quantized(folder, tmp_path / "out", rules)
    with pytest.raises(InvalidArgumentError, match="quantization: expected int8"):
        save_quantized(folder, tmp_path / "out", "int7")
