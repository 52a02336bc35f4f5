"""Rule tables against transformers' models, and a sharded forward pass against one device and eager torch."""

import re
import subprocess
import sys

import pytest
import transformers
from jax.sharding import PartitionSpec as P

import sharding_rules
from model_adapters import bridge
from sharding_rules import Rule, RuleTable, ShardingRuleError, specs_for, table_for

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, **HEADS, attention_bias=True, mlp_bias=True),
    "mistral": transformers.MistralConfig(**SIZES, **HEADS),
    "qwen2": transformers.Qwen2Config(**SIZES, num_attention_heads=4, num_key_value_heads=4),
    "qwen3": transformers.Qwen3Config(**SIZES, **HEADS),
    "gemma": transformers.GemmaConfig(**SIZES, **HEADS),
    "gemma2": transformers.Gemma2Config(**SIZES, **HEADS),
    "gemma3_text": transformers.Gemma3TextConfig(**SIZES, **HEADS),
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2),
}


def shapes_of(model):
    return {name: tuple(tensor.shape) for name, tensor in bridge.tensors_of(model).items()}


@pytest.mark.parametrize("model_type", sharding_rules.TABLES)
def test_every_table_fits_its_models(model_type):
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[model_type])
    specs = specs_for(table_for(model_type), shapes_of(model), {"data": 2, "model": 4})
    assert specs.keys() == shapes_of(model).keys()
    for name, parameter in model.named_parameters():
        assert len(specs[name]) == parameter.ndim
        assert "data" not in specs[name]
    without_head = transformers.AutoModel.from_config(CONFIGS[model_type])
    assert specs_for(table_for(model_type), shapes_of(without_head), {"model": 4})


@pytest.mark.parametrize("model_type", [name for name in CONFIGS if name != "gpt2"])
def test_the_plan_is_that_of_transformers(model_type):
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[model_type])
    specs = specs_for(table_for(model_type), shapes_of(model), {"model": 4})
    wanted = {"colwise": P("model", None), "rowwise": P(None, "model"), "replicated_with_grad_allreduce": P(None)}
    for pattern, style in model.config.base_model_tp_plan.items():
        names = [name for name in specs if re.fullmatch(f"model.{pattern.replace('*', '[0-9]+')}.weight", name)]
        assert names
        assert {specs[name] for name in names} == {wanted[style]}


def test_one_device_divides_nothing():
    specs = specs_for(table_for("llama"), shapes_of(transformers.LlamaForCausalLM(CONFIGS["llama"])), {"data": 8})
    assert {axis for spec in specs.values() for axis in spec} == {None}


def test_first_match_wins_and_the_whole_name_counts():
    table = RuleTable("toy", (Rule("a", ("mlp", None)), Rule("a|ab", (None, "mlp"))))
    assert specs_for(table, {"a": (4, 4), "ab": (4, 4)}, {"model": 2}) == {
        "a": P("model", None),
        "ab": P(None, "model"),
    }


def test_uneven_sizes_are_whole_only_where_the_table_says_so():
    table = RuleTable("toy", (Rule("a", ("vocab",)),), whole_if_uneven=frozenset({"vocab"}))
    assert specs_for(table, {"a": (5,)}, {"model": 2}) == {"a": P(None)}
    assert specs_for(table, {"a": (6,)}, {"model": 2}) == {"a": P("model")}


def test_everything_wrong_is_listed_together():
    table = RuleTable(
        "toy",
        (
            Rule("twice", ("heads", "mlp")),
            Rule("flat", ("heads", "embed")),
            Rule("odd", ("mlp",)),
            Rule("typo", ("mlp",)),
            Rule("absent", ("mlp",), optional=True),
            Rule("strange", ("colour",)),
        ),
    )
    shapes = {"twice": (4, 4), "flat": (4,), "odd": (5,), "left": (2, 3), "strange": (2,)}
    with pytest.raises(ShardingRuleError) as error:
        specs_for(table, shapes, {"model": 2, "pipe": 2, "data": 0})
    assert str(error.value).splitlines() == [
        "the sharding rules of toy do not fit, 8 problems:",
        "  mesh axis 'pipe': expected one of data, model, expert",
        "  mesh axis 'data': expected at least 1 device, got 0",
        "  logical axis 'colour': expected one of batch, vocab, embed, heads, kv_heads, fused_qkv, mlp, experts",
        "  twice (4, 4): 2 dimensions on mesh axis 'model', expected at most one",
        "  flat (4,): rule 'flat' has 2 axes",
        "  odd (5,): dimension 0 is not divisible by the 2 devices of mesh axis 'model'",
        "  left (2, 3): no rule matches; add one",
        "  rule 'typo' matches nothing; mend or remove it",
    ]


def test_a_type_without_rules_and_a_wrong_map_are_refused():
    with pytest.raises(ShardingRuleError, match=r"\(llama, mistral, .*\), got 'bert'"):
        table_for("bert")
    with pytest.raises(ShardingRuleError, match="logical axis 'mlp' on mesh axis 'pipe'"):
        specs_for(RuleTable("toy", (Rule("a", ("mlp",)),)), {"a": (2,)}, {"model": 2}, {"mlp": "pipe"})


SHARDED = """
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np, torch, transformers
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from model_adapters import bridge
from sharding_rules import specs_for, table_for

def check(config, meshes):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(1, 60, (2, 7)))
    with torch.no_grad():
        eager = model(ids).logits.numpy()
    weights, function = bridge.extract_jax(model)
    forward = lambda weights, ids: function(weights, (), {"input_ids": ids, "use_cache": False}).logits
    single = jax.jit(forward)(weights, ids.numpy())
    for shape in meshes:
        mesh = Mesh(np.array(jax.devices()).reshape(*shape.values()), tuple(shape))
        shapes = {name: array.shape for name, array in weights.items()}
        specs = specs_for(table_for(config.model_type), shapes, shape)
        shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        placed = jax.device_put(weights, shardings)
        inputs = NamedSharding(mesh, P("data", None))
        logits = jax.jit(forward, in_shardings=(shardings, inputs))(placed, jax.device_put(ids.numpy(), inputs))
        np.testing.assert_allclose(logits, single, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(logits, eager, rtol=2e-5, atol=2e-6)
        mlp = next(array for name, array in placed.items() if "gate_proj" in name or name.endswith("c_fc.weight"))
        parts = {part.data.size for part in mlp.addressable_shards}
        assert parts == {mlp.size // shape["model"]}, parts
        print("same logits", config.model_type, shape)

assert len(jax.devices()) == 4
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64)
llama = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)
check(llama, [{"data": 1, "model": 4}, {"data": 2, "model": 2}])
gpt2 = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=63, bos_token_id=1, eos_token_id=2)
check(gpt2, [{"data": 2, "model": 2}])
"""


def test_models_over_four_devices_give_the_logits_of_one_and_of_eager_torch():
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same logits") == 3


def test_the_packages_leaves_do_not_know_each_other_nor_the_bridge():
    code = (
        "import sys, sharding_rules, pytree_registry\n"
        "known = {name.split('.')[0] for name in sys.modules}\n"
        "assert not known & {'model_adapters', 'torchax_serve', 'torchax', 'transformers'}, known\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
