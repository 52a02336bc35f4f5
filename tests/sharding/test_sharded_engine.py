"""Models on several devices, in processes with eight CPU devices: the tokens of one device, exchange, memory."""

import ast
import re

import pytest
from thorough import except_for, thorough

# Every family with a table, a type with a plan of its own (olmo2), one with neither (bloom); sizes divide nowhere.
MESHES = [
    ("llama", "1x8,2x4"),
    thorough("llama", "1x2,1x4"),
    thorough("qwen2", "1x4"),
    thorough("qwen3", "1x4,2x2"),
    thorough("gemma3", "1x4"),
    thorough("gpt2", "1x2,1x8"),
    thorough("phi3", "1x8"),
    thorough("gpt_neox", "1x8"),
    thorough("opt", "1x4"),
    thorough("mixtral", "1x4,1x2x4,2x2x2"),
    thorough("gpt_oss", "1x2x2"),
    thorough("deepseek_v3", "1x2x2"),
    ("minimax", "1x2"),
    ("deepseek_v32", "1x2x2"),
    thorough("deepseek_v4", "1x8"),
    thorough("qwen4_exp_text", "1x8"),
    thorough("inkling2_text", "1x8"),
    thorough("inkling2_loop_text", "1x2"),
    thorough("glm_moe_dsa", "1x2x2"),
    thorough("qwen3_5_text", "1x8"),
    ("gated_delta", "1x4"),
    thorough("key_heads", "2x4"),
    thorough("kimi_linear", "1x2x2,1x4"),
    thorough("olmo_hybrid", "1x4"),
    thorough("mamba2", "1x4,1x8"),
    thorough("groups", "1x4"),
    thorough("nemotron_h", "1x2,1x4"),
    thorough("granitemoehybrid", "1x2,1x4"),
    thorough("hybrid", "1x4"),
    thorough("zamba2", "1x4"),
    thorough("shared_block", "1x4"),
    thorough("jamba", "1x4"),
    thorough("lfm2", "1x4,1x8"),
    thorough("gemma4_text", "1x2,1x4"),
    thorough("mamba", "1x4"),
    thorough("minimax", "1x4,1x8"),
    thorough("recurrent_gemma", "1x2,1x8"),
    thorough("zamba", "1x2"),
    thorough("zaya", "1x2"),
    thorough("olmo2", "1x4,1x8"),
    thorough("bloom", "1x4,1x8"),
]


@pytest.mark.parametrize(
    "kind",
    ["wav2vec2", "llama", "mixtral", *(thorough(each) for each in ("vit", "resnet", "segformer", "gpt2"))],
)
def test_heads_for_tasks_have_the_outputs_of_pytorch(on_eight, kind):
    assert on_eight("task_head", kind, [2, 8]) == ["2 8"]


def test_module_of_no_library(on_eight):
    assert on_eight("own_module", [{"model": 4}, {"data": 2, "model": 4}, {"data": 8}]) == ["1 2 1"]


@pytest.mark.parametrize(("family", "meshes"), MESHES)
def test_tokens_are_those_of_one_device(on_eight, family, meshes):
    lines = on_eight("tokens", family, meshes)
    assert [line.split()[3] for line in lines] == meshes.split(",")
    assert all(("not packed" in line) == (family == "bloom") for line in lines)


# The encoder of Gemma 3 here has four heads, and its language model two of keys, which a mesh of four repeats.
@pytest.mark.parametrize(("model_type", "meshes"), [("gemma3", "1x4"), thorough("qwen2_vl", "1x2,1x4")])
def test_prompts_with_images(on_eight, model_type, meshes):
    lines = on_eight("images", model_type, meshes)
    assert [line.split()[3] for line in lines] == meshes.split(",")


@pytest.mark.parametrize(
    ("family", "meshes"),
    [("llama", "1x8,2x2"), thorough("gated_delta", "1x4"), thorough("state_space", "1x4")],
)
def test_new_weights_are_laid_out_as_those_of_before(on_eight, family, meshes):
    lines = on_eight("new_weights", family, meshes)
    assert [line.split()[3] for line in lines] == meshes.split(",")


def test_pages_go_to_the_host_and_back_wherever_heads_are(on_eight):
    """Heads that the mesh divides, and heads that are replicated."""
    loaded = [int(line.split()[1]) for line in on_eight("offloaded", "llama", "1x2,1x8")]
    assert len(loaded) == 2 and min(loaded) >= 5


@pytest.mark.parametrize(
    ("family", "meshes"),
    [
        ("llama", "2x2"),
        thorough("llama", "1x2,1x8"),
        thorough("phi3", "1x4"),
        thorough("gpt2", "1x2"),
        thorough("gated_delta", "1x4"),
        thorough("state_space", "1x4"),
    ],
)
def test_adapters_lie_as_their_weights_and_give_the_same_tokens(on_eight, family, meshes):
    lines = on_eight("adapters", family, meshes)
    assert [line.split()[3] for line in lines] == meshes.split(",")


@pytest.mark.parametrize(
    ("family", "meshes", "rules"),
    [
        thorough("llama", "1x2,1x8,2x2", {"weight_qtype": "int8"}),
        ("llama", "1x4", {"weight_qtype": "int4", "tile_size": 2, "module_path": ".*(q_proj|up_proj|lm_head)"}),
        thorough("gpt2", "1x2", "w8a8"),
        thorough("qwen3_moe", "1x2,1x2x2", {"weight_qtype": "int8"}),
        thorough("qwen3_5_text", "1x8", {"weight_qtype": "int8"}),
        thorough("gated_delta", "1x4", {"weight_qtype": "int8"}),
        thorough("state_space", "1x4", {"weight_qtype": "int4", "tile_size": 8}),
        thorough("deepseek_v32", "1x2x2", {"weight_qtype": "int8"}),
    ],
)
def test_quantized_weights_lie_with_their_scales_and_give_the_same_tokens(on_eight, family, meshes, rules):
    lines = on_eight("quantized", family, meshes, rules)
    assert [line.split()[3] for line in lines] == meshes.split(",")
    assert all(int(line.split()[5]) > 0 for line in lines)


@pytest.mark.parametrize(
    ("method", "meshes"),
    [("ngram", "2x2"), thorough("ngram", "1x2,1x8"), thorough("draft_model", "1x2,1x8,2x2")],
)
def test_drafts_are_verified_on_meshes_and_replicas(on_eight, method, meshes):
    """Heads that the mesh divides, and heads that are replicated."""
    lines = on_eight("speculative", "qwen3", meshes, method)
    assert [line.split()[3] for line in lines] == meshes.split(",")
    assert all(int(line.split()[5]) > 0 for line in lines)


@pytest.mark.parametrize(
    ("kind", "meshes"),
    [
        ("eagle3", "1x8"),
        thorough("eagle3", "1x2,1x4,2x2"),
        thorough("gemma4", "1x2,1x4,1x8"),
        thorough("deepseek_v3", "1x2,1x2x2"),
        thorough("glm4_moe", "1x4,1x2x2"),
        thorough("glm_moe_dsa", "1x2"),
        thorough("qwen3_next", "1x2"),
        thorough("qwen3_5_text", "1x8"),
    ],
)
def test_draft_heads_lie_on_the_mesh_of_their_model(on_eight, kind, meshes):
    """The same drafts are accepted as on one device."""
    lines = on_eight("headed", kind, meshes)
    assert [line.split()[3] for line in lines] == meshes.split(",")


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "hybrid"])
def test_drafts_are_verified_with_the_adapter_of_their_row(on_eight, family):
    """The latter has states, in front of which pending tokens are computed with their adapter, too."""
    config = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 1}
    assert len(on_eight("adapters", family, "1x2", config)) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["mamba", "qwen3_5_text", "deepseek_v32"])
def test_drafts_are_verified_behind_states_and_indexers_on_a_mesh(on_eight, family):
    (line,) = on_eight("speculative", family, "1x2", "ngram")
    assert int(line.split()[5]) > 0 or family != "mamba"  # the others repeat little


@pytest.mark.parametrize(
    ("family", "meshes"),
    [
        ("llama", "1x2,1x8"),
        thorough("gated_delta", "1x4"),
        thorough("hybrid", "1x4"),
        thorough("kimi_linear", "1x2"),
        thorough("lfm2", "1x4"),
        thorough("nemotron_h", "1x4"),
    ],
)
def test_pages_in_int8_have_their_scales_where_their_heads_are(on_eight, family, meshes):
    """Heads that the mesh divides, and heads that are replicated; latents, and pages beside recurrent states."""
    lines = on_eight("tokens", family, meshes, "int8")
    assert all("in int8" in line for line in lines)
    assert len(lines) == len(meshes.split(","))


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "meshes"), [("gated_delta", "1x4"), ("hybrid", "1x4"), ("kimi_linear", "1x2")])
def test_bundles_with_recurrent_states_have_the_mesh_of_their_export(on_eight, family, meshes):
    """States are in their place, and those of prefixes are found."""
    lines = on_eight("bundled", family, meshes)
    assert [line.split()[3] for line in lines] == meshes.split(",")
    assert all(int(line.split()[5]) > 0 for line in lines)


@pytest.mark.thorough
def test_a_second_start_of_a_recurrent_model_on_a_mesh_compiles_little(on_eight):
    (line,) = on_eight("started_again", "gated_delta", "1x4")
    assert int(line.split()[5]) > 0


@pytest.mark.parametrize(("mesh", "where"), [("1x4", "P(None, None, 'model')"), thorough("1x8", "replicated")])
def test_an_encoders_keys_and_values_in_int8_lie_by_heads_with_their_scales(on_eight, mesh, where):
    """Heads that the mesh divides, and heads that are replicated."""
    assert on_eight("encoder_cache", mesh, "int8") == [f"{mesh}; float32 {where}; int8 {where}"]


def test_latents_stay_on_every_device(on_eight):
    """A pool without heads, which is replicated: steps neither take it to one device nor copy it back."""
    assert on_eight("pools", "deepseek_v3", "2") == ["2"]


def test_of_two_results_alike_the_donated_one_stays_on_the_mesh(on_eight):
    assert on_eight("donated", "2") == ["1 2"]


def test_states_of_recurrent_layers_lie_by_channels_and_stay_there(on_eight):
    convolution, recurrence = "P(None, None, 'model')", "P(None, 'model')"
    assert on_eight("states", "mamba", "4") == [f"{recurrence} {convolution} 0"]


@pytest.mark.parametrize(
    "family", except_for(["llama", "qwen3_moe"], ["llama", "gpt2", "phi3", "mixtral", "qwen3", "qwen3_moe"])
)
def test_a_decode_step_exchanges_no_more_than_it_must(on_eight, family):
    """Neither do norms over heads, which the last two have."""
    (line,) = on_eight("exchange", family, "4")
    # One sum after attention and one after the MLP in both layers, one of the embedding; the logits are gathered.
    assert ast.literal_eval(line) == {"all-reduce": 2 * 2 + 1, "all-gather": 1}


@pytest.mark.parametrize("family", ["gated_delta", "state_space"])
def test_recurrent_layers_exchange_no_more_than_others(on_eight, family):
    """A delta rule's layer has one sum. So has Mamba-2's, and one number a token for the norm over all heads."""
    (line,) = on_eight("exchange", family, "4")
    assert ast.literal_eval(line) == {"all-reduce": 2 * 2 + 1, "all-gather": 1}


@pytest.mark.thorough
def test_a_block_that_layers_share_exchanges_no_more_than_others(on_eight):
    """Nor do its adapters for each layer, beside queries, keys, values and the fused gate and up."""
    (line,) = on_eight("exchange", "shared_block", "4")
    # In three layers the sum of Mamba-2 and one number a token for its norm, in two of them one each after attention,
    # the MLP and the product behind them, and one of the embedding.
    assert ast.literal_eval(line) == {"all-reduce": 3 * 2 + 2 * 3 + 1, "all-gather": 1}


def test_experts_that_are_divided_divide_the_work(on_eight):
    (line,) = on_eight("work", "mixtral", "4")
    shared, whole = ast.literal_eval(line)
    assert set(shared) == {"decode", "prefill"}
    for name, (flops, num_bytes) in shared.items():
        # Experts are nearly all there is of these models; the rest is the same on every device.
        assert flops < whole[name][0] * (1 / 4 + 0.05)
        assert num_bytes < whole[name][1] * (1 / 4 + 0.05)


def test_a_long_prompt_is_divided_by_tokens_where_that_exchanges_less(on_eight):
    line, least = on_eight("long_prompt", "llama", "8")
    exchanged = ast.literal_eval(line)
    # Weights of a layer: q, k, v, o, heads repeated or filled up to eight; gate, up, down (72 x 32); rows of o, down.
    size, rows = (2 * 64 * 32 + 2 * 64 * 32) + 3 * 72 * 32, 2 * 32
    assert int(least) == -(-size // (2 * rows * 7 / 8))
    assert "all-to-all" not in exchanged["decode 4"]
    assert "all-to-all" not in exchanged["prefill 64"]
    # Tokens for heads of q, k and v, and heads for tokens behind attention, in both layers; then no sum in a layer.
    assert exchanged["prefill 256"]["all-to-all"] == 2 * 4
    assert exchanged["prefill 256"].get("all-reduce", 0) <= 2


def test_the_plan_says_what_the_same_steps_take_with_real_arguments(on_eight):
    *programs, weights = on_eight("memory", "llama", "8")
    assert len(programs) == 2
    for line in programs:
        planned_arguments, arguments, planned, took = map(int, line.split())
        assert planned_arguments == pytest.approx(arguments, rel=0.02)
        assert planned == pytest.approx(took, rel=0.02)
    planned, held = map(int, weights.split())
    assert planned == held


@pytest.mark.parametrize("degree", [1, 4])
def test_bounds_count_states_where_they_lie(on_eight, degree):
    """A decode step reads and writes those of all requests, on the device that has their channels; a prompt its own."""
    few, many = (list(map(int, line.split())) for line in on_eight("bounds", "mamba", str(degree)))
    of_request = 2 * 64 * (3 + 4) * 4 // degree  # two layers, channels, inputs of a convolution and a state
    assert many[0] - few[0] == 4 * 2 * of_request
    assert many[1] == few[1]


def test_a_checkpoint_goes_straight_to_its_devices(on_eight, tmp_path):
    peak, checkpoint, largest, per_device = map(int, on_eight("load", str(tmp_path))[-1].split())
    assert checkpoint > 200e6
    # The devices are host memory here; beside them a tensor that is being put together, and one that is on its way.
    assert peak <= 1.1 * checkpoint + 2 * largest
    assert per_device <= checkpoint * (1 / 8 + 0.02)
    assert largest < checkpoint / 8


def test_generate_runs_on_a_mesh(on_eight):
    assert on_eight("generate", "qwen3", "4") == ["same ids"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("tensor_parallel=9", r"tensor_parallel: expected at most the 8 devices there are, got 9; lower it"),
        ("mesh={'pipe': 2}", r"mesh: expected axes out of data, model, expert, got 'pipe'"),
        ("mesh={'model': 0}", r"mesh: expected a whole number >= 1 on axis 'model', got 0"),
        ("tensor_parallel=0", r"tensor_parallel: expected a whole number >= 1, got 0"),
        ("tensor_parallel=2, mesh={'model': 2}", r"mesh and tensor_parallel: expected one of them, got both"),
        ("tensor_parallel=8, refuse_uneven=True", r"4 heads over 8 devices: zeros would be added, which was refused"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(on_eight, arguments, said):
    (line,) = on_eight("refused", arguments)
    assert re.search(said, line)
