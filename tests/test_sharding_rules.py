"""Rule tables, transformers' plans and shapes as rules: against transformers' models, and by properties of layouts."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import sharding_rules
from model_adapters.bridge import views
from model_adapters.loading.model_class import module_of
from model_adapters.sharding.model_sharding import head_counts
from model_adapters.sharding.rule_selection import rules_for
from parity_sweep.tiny.images import image_model
from sharding_rules import HeadCounts, Rule, RuleTable, ShardingRuleError, place
from sharding_rules.hf_tp_plans import WORDS, rules_from_tp_plan
from sharding_rules.layout import ZERO, Parts, fused_dim, layout_heads, padded_units, parts_dim, take
from sharding_rules.shape_inference import infer_rules

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, **HEADS, attention_bias=True, mlp_bias=True),
    "mistral": transformers.MistralConfig(**SIZES, **HEADS),
    "qwen2": transformers.Qwen2Config(**SIZES, num_attention_heads=4, num_key_value_heads=4),
    "qwen3": transformers.Qwen3Config(**SIZES, **HEADS),
    "gemma": transformers.GemmaConfig(**SIZES, **HEADS),
    "gemma2": transformers.Gemma2Config(**SIZES, **HEADS),
    "gemma3_text": transformers.Gemma3TextConfig(**SIZES, **HEADS),
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2),
    "mixtral": transformers.MixtralConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, num_experts=4),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=4,
        **EXPERTS,
        shared_expert_intermediate_size=64,
        num_experts=4,
    ),
    "gpt_oss": transformers.GptOssConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": transformers.DeepseekV3Config(
        **SIZES,
        **EXPERTS,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "phi3": transformers.Phi3Config(
        **SIZES, num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2
    ),
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES, num_attention_heads=4),
    "opt": transformers.OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=2, vocab_size=64, num_attention_heads=4, word_embed_proj_dim=32
    ),
    "mamba": transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4),
}
# Types without a table, with a plan of their own or none.
OTHERS = {
    "olmo2": transformers.Olmo2Config(**SIZES, num_attention_heads=4, num_key_value_heads=4),
    "bloom": transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64),
}


def empty(config):
    model_class = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    return module_of(model_class, config, torch.float32)


def shapes_of(model):
    return {name: tuple(tensor.shape) for name, tensor in views.named_tensors(model).items()}


def placed_of(config, mesh_shape):
    module = empty(config)
    return place(rules_for(module, shapes_of(module)), shapes_of(module), mesh_shape, head_counts(config))


@pytest.mark.parametrize("model_type", sharding_rules.TABLES)
def test_every_table_fits_its_models(model_type):
    placed = placed_of(CONFIGS[model_type], {"data": 2, "model": 4})
    module = empty(CONFIGS[model_type])
    assert placed.keys() == shapes_of(module).keys()
    assert {each.rule.source for each in placed.values()} == {"table"}
    for name, parameter in module.named_parameters():
        assert len(placed[name].spec) == parameter.ndim
        assert placed[name].laid_out_shape == tuple(parameter.shape)  # everything divides by 4 here
        assert "data" not in placed[name].spec


@pytest.mark.parametrize("config", [*CONFIGS.values(), *OTHERS.values()], ids=lambda config: config.model_type)
def test_a_device_has_its_share_of_the_weights_and_little_more(config):
    placed = placed_of(config, {"model": 4})
    parameters = dict(empty(config).named_parameters())
    whole = sum(placed[name].bytes_per_device({}, 4) for name in parameters)
    share = sum(placed[name].bytes_per_device({"model": 4}, 4) for name in parameters)
    small = sum(parameter.numel() * 4 for name, parameter in parameters.items() if parameter.ndim == 1)
    # Tables of positions, routers, what makes latents for all heads, biases behind a sum.
    left_whole = ("wpe", "positions", "gate.weight", "router", "q_a_proj", "kv_a_proj", "down_proj_bias")
    small += sum(p.numel() * 4 for name, p in parameters.items() if any(part in name for part in left_whole))
    assert share <= whole / 4 + small


WITH_PLANS = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mixtral", "qwen3_moe", "phi3"]


@pytest.mark.parametrize("model_type", WITH_PLANS)
def test_the_tables_cut_where_the_plans_of_transformers_cut(model_type):
    config = CONFIGS[model_type]
    module = empty(config)
    shapes = shapes_of(module)
    ours = place(rules_for(module, shapes), shapes, {"model": 4}, head_counts(config))
    plan = rules_from_tp_plan(config.base_model_tp_plan, {}, model_type, shapes)
    theirs = place(infer_rules(shapes, 32, model_type, plan), shapes, {"model": 4}, head_counts(config))
    named = [name for name, each in theirs.items() if each.rule.source == "plan of the model"]
    assert len(named) >= 8
    assert {name: ours[name].spec for name in named} == {name: theirs[name].spec for name in named}


def test_the_plan_of_a_language_model_is_none_of_the_encoder_beside_it():
    """Whose layers have the same names, and other heads: repeated heads of keys would be other layers."""
    module = image_model("gemma3")
    config, shapes = module.config.get_text_config(), shapes_of(module)
    assert (config.num_key_value_heads, module.config.vision_config.num_attention_heads) == (2, 4)
    placed = place(rules_for(module, shapes), shapes, {"model": 4}, head_counts(config))
    of_encoder = {name for name in shapes if "vision_tower" in name}
    assert {name for name in of_encoder if placed[name].rule.source == "plan of the model"} == set()
    assert all(placed[name].laid_out_shape == shapes[name] for name in of_encoder)
    of_text = "model.language_model.layers.0.self_attn.k_proj.weight"
    assert placed[of_text].laid_out_shape[0] == 2 * shapes[of_text][0]


def test_every_word_of_the_installed_transformers_is_known():
    words = set()
    for name in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES:
        config_class = transformers.CONFIG_MAPPING[name]
        for attribute in ("base_model_tp_plan", "base_model_ep_plan"):
            words |= set((getattr(config_class, attribute, None) or {}).values())
    assert {"colwise", "rowwise", "packed_colwise"} <= words <= set(WORDS)


def test_a_word_that_nobody_knows_is_an_error_that_lists_those_that_are():
    with pytest.raises(ShardingRuleError, match=r"has the words 'sideways', expected .*colwise"):
        rules_from_tp_plan({"layers.*.mlp": "sideways"}, {}, "toy", {})


def test_a_plan_becomes_rules_for_weights_biases_and_stacked_experts():
    shapes = {"m.l.0.up.weight": (8, 4), "m.l.0.up.bias": (8,), "m.l.0.experts.down_proj": (2, 4, 8)}
    plan = {
        "l.*.up": "colwise",
        "l.*.experts.down_proj": "rowwise",
        "l.*.experts": "moe_tp_experts",
        "l.*.gone": "rowwise",
    }
    rules = rules_from_tp_plan(plan, {"l.*.experts.down_proj": "grouped_gemm"}, "toy", shapes)
    placed = place(RuleTable("toy", rules), shapes, {"model": 2, "expert": 2})
    assert {name: each.spec for name, each in placed.items()} == {
        "m.l.0.up.weight": P("model", None),
        "m.l.0.up.bias": P("model"),
        "m.l.0.experts.down_proj": P("expert", None, "model"),
    }


@pytest.mark.parametrize("word", ["colwise", "packed_colwise"])
def test_gate_and_up_of_experts_are_cut_each(word):
    """Also where a plan calls them "colwise", as Inkling's does: a device has the same rows of both."""
    shapes = {"m.l.0.experts.gate_up_proj": (2, 16, 4)}
    rules = rules_from_tp_plan({"l.*.experts.gate_up_proj": word}, {}, "toy", shapes)
    placed = place(RuleTable("toy", rules), shapes, {"model": 2})["m.l.0.experts.gate_up_proj"]
    assert placed.laid_out_shape == (2, 16, 4)
    first, second = np.split(take(np.arange(16), 0, placed.dims[1]), 2)
    assert first.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert second.tolist() == [4, 5, 6, 7, 12, 13, 14, 15]


def test_shapes_alone_cut_what_goes_up_by_rows_and_what_comes_down_by_columns():
    shapes = {
        "a.0.up": (64, 16),
        "a.0.back": (16, 64),
        "a.0.norm": (16,),
        "a.1.out_proj.weight": (16, 16),
        "c": (32, 1, 4),
    }
    placed = place(infer_rules(shapes, 16, "toy"), shapes, {"model": 4})
    assert {name: each.spec for name, each in placed.items()} == {
        "a.0.up": P("model", None),
        "a.0.back": P(None, "model"),
        "a.0.norm": P(None),
        "a.1.out_proj.weight": P(None, "model"),
        "c": P(None, None, None),  # too small to be worth it
    }
    assert {each.rule.source for each in placed.values()} == {"shape"}


def test_one_device_divides_nothing():
    placed = placed_of(CONFIGS["llama"], {"data": 8})
    assert {axis for each in placed.values() for axis in each.spec} == {None}
    assert all(each.is_unchanged for each in placed.values())


def test_first_match_wins_and_the_whole_name_counts():
    table = RuleTable("toy", (Rule("a", ("mlp", None)), Rule("a|ab", (None, "mlp"))))
    placed = place(table, {"a": (4, 4), "ab": (4, 4)}, {"model": 2})
    assert {name: each.spec for name, each in placed.items()} == {"a": P("model", None), "ab": P(None, "model")}


def test_uneven_sizes_are_padded_where_zeros_are_exact_and_refused_where_they_were_refused():
    table = RuleTable("toy", (Rule("a", ("vocab",)),))
    (placed,) = place(table, {"a": (5,)}, {"model": 2}).values()
    assert (placed.spec, placed.laid_out_shape) == (P("model"), (6,))
    strict = RuleTable("toy", (Rule("a", ("vocab",)),), pads=frozenset())
    assert place(strict, {"a": (5,)}, {"model": 2})["a"].spec == P(None)
    with pytest.raises(ShardingRuleError, match="5 vocab over 2 devices: zeros would be added, which was refused"):
        place(table, {"a": (5,)}, {"model": 2}, refuse_uneven=True)


def test_everything_wrong_is_listed_together():
    table = RuleTable(
        "toy",
        (
            Rule("twice", ("vocab", "mlp")),
            Rule("flat", ("vocab", "embed")),
            Rule("typo", ("mlp",)),
            Rule("absent", ("mlp",), optional=True),
            Rule("strange", ("colour",)),
        ),
    )
    shapes = {"twice": (4, 4), "flat": (4,), "left": (2, 3), "strange": (2,)}
    with pytest.raises(ShardingRuleError) as error:
        place(table, shapes, {"model": 2, "pipe": 2, "data": 0})
    assert [re.sub(r"one of vocab.*", "one of ...", line) for line in str(error.value).splitlines()] == [
        "the sharding rules of toy do not fit, 7 problems:",
        "  mesh axis 'pipe': expected one of data, model, expert",
        "  mesh axis 'data': expected at least 1 device, got 0",
        "  logical axis 'colour': expected one of ...",
        "  twice (4, 4): 2 dimensions on mesh axis 'model', expected at most one",
        "  flat (4,): rule 'flat' has 2 axes",
        "  left (2, 3): no rule matches; add one",
        "  rule 'typo' matches nothing; mend or remove it",
    ]


def test_a_wrong_map_is_refused():
    with pytest.raises(ShardingRuleError, match="logical axis 'mlp' on mesh axis 'pipe'"):
        place(RuleTable("toy", (Rule("a", ("mlp",)),)), {"a": (2,)}, {"model": 2}, logical_axes={"mlp": "pipe"})


@given(kv_heads=st.integers(1, 12), group=st.integers(1, 12), shards=st.integers(1, 16))
def test_each_device_has_the_keys_that_its_queries_read(kv_heads, group, shards):
    heads = kv_heads * group
    queries, keys = layout_heads(heads, kv_heads, shards)
    assert len(queries.units) % shards == len(keys.units) % shards == 0
    assert sorted(unit for unit in queries.units if unit != ZERO) == list(range(heads))  # each query head once
    assert {unit for unit in keys.units if unit != ZERO} == set(range(kv_heads))
    new_group = len(queries.units) // len(keys.units)
    for position, query in enumerate(queries.units):
        if query != ZERO:
            assert keys.units[position // new_group] == query // group
    if kv_heads % shards == 0:
        assert queries.is_identity
        assert keys.is_identity


@given(
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 4),
    shards=st.integers(1, 8),
    width=st.integers(1, 3),
    data=st.data(),
)
def test_a_device_of_a_fused_product_has_its_heads_of_all_three(kv_heads, group, shards, width, data):
    heads = kv_heads * group
    layouts = [*layout_heads(heads, kv_heads, shards)]
    sizes = [heads * width, kv_heads * width, kv_heads * width]
    dim = fused_dim([layouts[0], layouts[1], layouts[1]], sizes, shards, "model")
    array = np.arange(1, sum(sizes) + 1)
    fused = take(array, 0, dim).reshape(shards, -1)
    parts = np.split(array, np.cumsum(sizes)[:-1])
    for part, layout, begin in zip(parts, [*layouts, layouts[1]], np.cumsum([0, *dim.sections[:-1]]), strict=True):
        wanted = [0 if i == ZERO else part[i] for i in layout.elements(width)]
        share = len(wanted) // shards
        got = fused[:, begin // shards : begin // shards + share].reshape(-1)
        assert got.tolist() == wanted
    start = data.draw(st.integers(0, dim.size))
    stop = data.draw(st.integers(start, dim.size))
    assert take(array, 0, dim, start, stop).tolist() == fused.reshape(-1)[start:stop].tolist()


@given(shards=st.integers(1, 4), heads=st.integers(1, 3), width=st.integers(1, 3), copied=st.integers(1, 5))
def test_a_device_has_its_heads_of_each_part_and_all_of_a_copied_one(shards, heads, width, copied):
    sizes = (shards * heads * width, copied, shards * heads)
    dim = parts_dim(Parts(sizes, (shards * heads, 0, shards * heads)), shards, "model")
    array = np.arange(sum(sizes))
    gate, of_all, steps = np.split(array, np.cumsum(sizes)[:-1])
    for device, own in enumerate(take(array, 0, dim).reshape(shards, -1)):
        wanted = [gate.reshape(shards, -1)[device], of_all, steps.reshape(shards, -1)[device]]
        assert own.tolist() == np.concatenate(wanted).tolist()
    assert (dim.size_before, dim.copied, sum(dim.sections)) == (sum(sizes), (1,), dim.size)
    assert parts_dim(Parts((4,), (shards + 1,)), shards, "model") is None or shards == 1


@given(number=st.integers(1, 1000), shards=st.integers(1, 64))
def test_padding_is_the_least_there_can_be_and_stands_behind(number, shards):
    layout = padded_units(number, shards)
    assert len(layout.units) % shards == 0
    assert layout.units[:number] == tuple(range(number))
    assert 0 <= len(layout.units) - number < shards


def test_heads_are_divided_only_where_their_number_is_known():
    table = RuleTable("toy", (Rule("q", ("heads", None)),))
    assert place(table, {"q": (32, 4)}, {"model": 2})["q"].spec == P(None, None)
    assert place(table, {"q": (32, 4)}, {"model": 2}, HeadCounts(4, 2))["q"].spec == P("model", None)


def test_the_packages_leaves_do_not_know_each_other_nor_the_bridge():
    code = (
        "import sys, sharding_rules, sharding_rules.hf_tp_plans, sharding_rules.shape_inference, pytree_registry\n"
        "known = {name.split('.')[0] for name in sys.modules}\n"
        "assert not known & {'model_adapters', 'torchax_serve', 'torchax', 'transformers'}, known\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_tensors_of_one_name_and_several_shapes_have_rules_of_their_own():
    shapes = {f"a.{n}.weight": shape for n, shape in enumerate([(64, 16), (16,), (64, 16)])}
    placed = place(infer_rules(shapes, 16, "toy"), shapes, {"model": 4})
    assert [each.spec for each in placed.values()] == [P("model", None), P(None), P("model", None)]


def test_a_model_with_towers_does_not_take_the_table_of_its_text_model():
    config = transformers.Gemma3Config(
        text_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "vocab_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 8,
        },
    )
    with torch.device("meta"):
        module = transformers.Gemma3ForConditionalGeneration(config)
    placed = place(rules_for(module, shapes_of(module)), shapes_of(module), {"model": 2}, HeadCounts(4, 2))
    by_source = {each.rule.source for each in placed.values()}
    assert by_source == {"plan of the model", "shape"}
    query = next(name for name in placed if name.endswith("language_model.layers.0.self_attn.q_proj.weight"))
    assert placed[query].spec == P("model", None)
