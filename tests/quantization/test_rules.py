"""Rules of quantization: their forms, what they choose, and what is wrong with them in one line."""

import dataclasses
import json

import jax.numpy as jnp
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3MoeConfig

from model_adapters.errors import InvalidArgumentError
from model_adapters.quantization.rules import PRESETS, QuantizationRule, parse_rules
from model_adapters.quantization.selection import Selection

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}


def empty(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module")
def llama():
    return empty(LlamaConfig(**TINY))


@pytest.fixture(scope="module")
def moe():
    sizes = {**TINY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    return empty(Qwen3MoeConfig(**sizes, num_key_value_heads=2, decoder_sparse_step=1))


def chosen(module, rules):
    return {name: rule for name, (rule, _) in Selection.of(module, parse_rules(rules)).chosen.items()}


@dataclasses.dataclass
class LikeQwix:
    """The fields of `qwix.QuantizationRule`."""

    module_path: str = ".*"
    op_names: tuple = ()
    weight_qtype: object = None
    act_qtype: object = None
    tile_size: object = None
    act_static_scale: object = None
    weight_calibration_method: str = "absmax"
    act_calibration_method: object = None
    act_batch_axes: tuple = (0,)


TOML = """
[[rules]]
module_path = "lm_head"
weight_qtype = "int8"
[[rules]]
module_path = "model.layers.*proj"
weight_qtype = "int4"
tile_size = 16
"""
AS_DICTS = [
    {"module_path": "lm_head", "weight_qtype": "int8"},
    {"module_path": "model.layers.*proj", "weight_qtype": "int4", "tile_size": 16},
]
YAML = """
quantization:
  qwix:
    rules:
      - module_path: lm_head
        weight_qtype: int8
      - {module_path: model.layers.*proj, weight_qtype: int4, tile_size: 16}
"""


def forms(folder):
    (folder / "a.toml").write_text(TOML)
    (folder / "b.yaml").write_text(YAML)
    (folder / "c.json").write_text(json.dumps(AS_DICTS))
    objects = [
        LikeQwix(module_path="lm_head", weight_qtype=jnp.int8),
        LikeQwix(module_path="model.layers.*proj", weight_qtype="int4", tile_size=16),
    ]
    nested = {"quantization": {"qwix": {"rules": AS_DICTS}}}
    return [str(folder / "a.toml"), folder / "b.yaml", str(folder / "c.json"), AS_DICTS, nested, objects]


def test_all_forms_of_rules_mean_the_same(tmp_path):
    parsed = [parse_rules(form).rules for form in forms(tmp_path)]
    assert all(rules == parsed[0] for rules in parsed)
    assert [rule.weight_qtype for rule in parsed[0]] == ["int8", "int4"]


def test_none_leaves_all_weights_as_they_are():
    assert parse_rules(None) is None and parse_rules("none") is None


def test_the_first_rule_that_matches_counts(llama):
    rules = [{"module_path": ".*q_proj", "weight_qtype": "none"}, {"module_path": ".*layers.*", "weight_qtype": "int8"}]
    names = chosen(llama, rules)
    assert len(names) == 2 * 6
    assert not any("q_proj" in name or "lm_head" in name for name in names)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_choose_linear_layers_and_the_head(llama, preset):
    names = chosen(llama, preset)
    assert len(names) == 2 * 7 + 1 and "lm_head.weight" in names
    assert not any("norm" in name or "embed" in name for name in names)


def test_a_tied_table_is_chosen_with_the_head():
    names = chosen(empty(LlamaConfig(**TINY, tie_word_embeddings=True)), "int8")
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= names.keys()


def test_an_embedding_table_is_chosen_by_its_op_name_alone(llama):
    rule = {"module_path": "model.embed_tokens", "weight_qtype": "int8", "op_names": ["embedding"]}
    assert list(chosen(llama, rule)) == ["model.embed_tokens.weight"]


def test_experts_are_chosen_and_routers_are_not(moe):
    names = chosen(moe, "int8")
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"} <= names.keys()
    assert not any(name.endswith("gate.weight") for name in names)


def test_conv1d_is_chosen_as_in_out():
    module = empty(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=96))
    products = {name: product for name, (_, product) in Selection.of(module, parse_rules("int8")).chosen.items()}
    fused = products["transformer.h.0.attn.c_attn.weight"]
    assert fused.transposed and fused.num_columns == 32
    assert "transformer.wte.weight" in products


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("int3", r"expected int8, int4, .* got 'int3'; did you mean int"),
        ("rules.txt", "expected int8, .*or a .toml, .yaml or .json file of rules, got 'rules.txt'"),
        ("absent.toml", r"expected a file of rules, got absent.toml \(No such file"),
        ([], "expected at least one rule, got none"),
        ([{}], r"rule 0 \(.*\): expected weight_qtype \(int8, int4, float8_e4m3fn, nf4, or none"),
        ([{"weight_qtype": "int3"}], "weight_qtype: expected int8, int4, float8_e4m3fn, nf4, none, got int3"),
        ([{"weight_qtyp": "int8"}], "unknown key weight_qtyp; did you mean weight_qtype"),
        ([{"weight_qtype": "int8", "module_path": "("}], r"module_path: expected a regular expression, got '\('"),
        ([{"weight_qtype": "int8", "tile_size": 0}], "tile_size: expected a number of columns"),
        ([{"weight_qtype": "int8", "tile_size": 1.5}], "tile_size: expected a number of columns"),
        ([{"weight_qtype": "int8", "weight_calibration_method": "rms"}], "weight_calibration_method: expected absmax"),
        ([{"weight_qtype": "int8", "weight_calibration_method": "fixed,1,2"}], "weight_calibration_method: expected"),
        ([{"weight_qtype": "fp8", "weight_calibration_method": "minmax"}], "expected absmax, rms or fixed for float8"),
        ([{"weight_qtype": "int8", "act_qtype": "fp8"}], "expected a product of one kind of numbers, got int8 times"),
        ([{"weight_qtype": "int8", "op_names": ["conv"]}], "op_names: expected names out of dot_general"),
        ([{"weight_qtype": "int8", "act_static_scale": True}], "act_static_scale: expected False"),
        (3, "expected a preset, a file, or rules as dicts or objects like qwix.QuantizationRule, got int"),
        ([{"weight_qtype": "a"}, {"weight_qtype": "b"}], r"rule 0 .* got a; rule 1 .* got b"),
    ],
)
def test_wrong_rules_are_one_line(given, said):
    with pytest.raises(InvalidArgumentError, match=f"^quantization: .*{said}") as caught:
        parse_rules(given)
    assert "\n" not in str(caught.value)


def test_a_file_that_does_not_parse_says_where(tmp_path):
    for name, text in (("a.toml", "rules = ["), ("b.yaml", "a: ["), ("c.json", "{"), ("d.json", "{}")):
        (tmp_path / name).write_text(text)
        with pytest.raises(InvalidArgumentError, match=r"^quantization: expected a (file|list) of rules") as caught:
            parse_rules(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"module_path": "model.layer.0.*"}, "matches no module of LlamaForCausalLM; near it are model.layers"),
        ({"module_path": ".*norm"}, r"matches only modules that are no linear layers \(model.layers.0.input"),
        (
            {"tile_size": 24},
            "layers.0.self_attn.q_proj: expected a tile_size that divides its 32 columns, got 24",
        ),
        ({"tile_size": 0.3}, "expected a tile_size that divides its 32 columns, got 0.3"),
    ],
)
def test_rules_that_do_not_fit_a_model_are_errors_that_name_modules(llama, rule, said):
    with pytest.raises(InvalidArgumentError, match=f"^quantization: .*{said}"):
        chosen(llama, [{"weight_qtype": "int8", **rule}])


def test_a_rule_behind_one_that_matches_everything_is_an_error(llama):
    rules = [{"weight_qtype": "int8"}, {"module_path": "lm_head", "weight_qtype": "int4"}]
    with pytest.raises(InvalidArgumentError, match=r"rule 1: .* nothing that an earlier rule has not matched"):
        chosen(llama, rules)


def test_a_rule_says_in_words_what_it_does():
    rule = QuantizationRule(weight_qtype="int4", tile_size=32, act_qtype="int8")
    assert str(rule) == "int4, groups of 32, activations int8"
    assert str(QuantizationRule()) == "dense"
