"""`serve(adapter=...)`: weights are those of peft's `merge_and_unload`; what cannot be merged is refused by name."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from training_models import tiny_folder
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from model_adapters.errors import CheckpointError, InvalidArgumentError, UnsupportedModelError
from torchax_serve import serve

# peft reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def adapter(base, folder, **config):
    """An adapter with random matrices; returns peft's merged model."""
    torch.manual_seed(1)
    options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "lora_dropout": 0.1}
    wrapped = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **{**options, **config}))
    wrapped.save_pretrained(folder)
    return wrapped.merge_and_unload()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def made(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    patterns = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 3, "q_proj": 24}}
    merged = adapter(model, tmp_path, target_modules=["q_proj", "v_proj"], use_rslora=True, **patterns)
    return tmp_path, merged


def check_same(served, merged):
    wanted = merged.state_dict()
    got = served.state_dict()
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-6)


def test_weights_are_those_of_peft(folder, made):
    with serve(folder, adapter=made[0]) as served:
        check_same(served, made[1])


def test_transposed_weights_of_gpt2(tmp_path):
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=64)).eval()
    base.save_pretrained(tmp_path / "base")
    merged = adapter(base, tmp_path / "adapter", target_modules=["c_attn"], fan_in_fan_out=True)
    with serve(tmp_path / "base", adapter=tmp_path / "adapter") as served:
        check_same(served, merged)


def test_a_square_weight_is_not_transposed_by_a_wrong_setting(folder, made):
    """peft corrects fan_in_fan_out by the class of the layer."""
    file = made[0] / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "fan_in_fan_out": True}))
    with serve(folder, adapter=made[0]) as served:
        check_same(served, made[1])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"use_dora": True}, UnsupportedModelError, "adapter: use_dora=True is not supported here; merge it with peft"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedModelError, r"adapter: modules_to_save=\['lm_head'\]"),
        ({"bias": "all"}, UnsupportedModelError, "adapter: bias='all'"),
        ({"alpha_pattern": {"q_proj": "3"}}, InvalidArgumentError, "numbers lora_alpha and alpha_pattern .*'3'"),
        ({"alpha_pattern": ["q_proj"]}, InvalidArgumentError, r"alpha_pattern by names of modules .*\['q_proj'\]"),
        ({"rank_pattern": {"q_(": 2}}, InvalidArgumentError, r"regular expressions in rank_pattern .*, got 'q_\('"),
        ({"peft_type": "PREFIX_TUNING"}, UnsupportedModelError, "expected peft_type LORA, got PREFIX_TUNING"),
    ],
)
def test_other_kinds_are_refused_by_name(folder, made, changes, error, message):
    file = made[0] / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(error, match=message):
        serve(folder, adapter=made[0])


def test_adapters_of_other_models_and_damaged_files(folder, made, tmp_path):
    larger = tiny_folder(tmp_path / "larger", hidden_size=64)
    with pytest.raises(InvalidArgumentError, match=r"q_proj.weight: expected matrices .* of shape \(64, 64\)"):
        serve(larger, adapter=made[0])
    shallow = tiny_folder(tmp_path / "shallow", num_hidden_layers=1)
    with pytest.raises(InvalidArgumentError, match=r"expected an adapter of .*, got one with model\.layers\.1"):
        serve(shallow, adapter=made[0])
    with pytest.raises(UnsupportedModelError, match="expected a dense weight to add an adapter to"):
        serve(folder, adapter=made[0], quantization="int8")
    with pytest.raises(InvalidArgumentError, match=r"adapter: expected a folder with adapter_config\.json"):
        serve(folder, adapter=tmp_path / "nowhere")
    (made[0] / "adapter_model.safetensors").write_bytes(b"x" * 64)
    with pytest.raises(CheckpointError, match="got none that is readable"):
        serve(folder, adapter=made[0])
