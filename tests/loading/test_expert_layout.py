"""Experts' weights whose inputs come first in memory, as TPUs' products read them; here on a CPU."""

import pytest
import torch
import transformers

from model_adapters.ops import memory_layout
from torchax_serve import EngineOptions, SamplingParams, serve

OPTIONS = EngineOptions(max_model_len=64, max_num_seqs=2)
PROMPTS = [5, 9, 17, 3], [*range(3, 40)]
PARAMS = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 61, "max_position_embeddings": 128}


def tiny(seed=0):
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        **SIZES,
        moe_intermediate_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def eager(model):
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in PROMPTS]


def tokens(served):
    return [list(answer.token_ids) for answer in served.generate_batch(list(PROMPTS), PARAMS)]


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(memory_layout, "PLATFORMS", ("cpu",))


def experts_of(served):
    weights = served._generator()._jax_runtime.weights
    return {name: array for name, array in weights.items() if ".experts." in name}


@pytest.mark.parametrize("is_object", [False, True], ids=["folder", "object"])
@torch.no_grad()
def test_tokens_are_those_of_eager_pytorch(is_object, on_cpu, tmp_path):
    model, other = tiny(), tiny(seed=1)
    wanted, wanted_of_other = eager(model), eager(other)
    assert wanted != wanted_of_other
    model.save_pretrained(tmp_path)
    new = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with serve(model if is_object else tmp_path, engine=OPTIONS) as served:
        assert tokens(served) == wanted
        experts = experts_of(served)
        assert len(experts) == 4
        assert {array.format.layout.major_to_minor for array in experts.values()} == {(0, 2, 1)}
        served.set_weights(new)
        assert tokens(served) == wanted_of_other
        assert {array.format.layout.major_to_minor for array in experts_of(served).values()} == {(0, 2, 1)}


@pytest.mark.parametrize("weights", ["safetensors", "orbax"])
@torch.no_grad()
def test_a_bundle_has_them_so(weights, on_cpu, tmp_path):
    if weights == "orbax":
        pytest.importorskip("orbax.checkpoint", reason="Orbax is an extra")
    model = tiny()
    wanted = eager(model)
    with serve(model, engine=OPTIONS) as served:
        served.export(tmp_path / "bundle", engine=OPTIONS, weights=weights, native=False)
    assert eager(model) == wanted  # the object runs on JAX from its own tensors once that is closed
    with serve(tmp_path / "bundle", engine=OPTIONS) as served:
        assert tokens(served) == wanted
        stored = served._stored.weights
        layouts = {name: array.format.layout.major_to_minor for name, array in stored.items() if ".experts." in name}
    assert len(layouts) == 4
    assert set(layouts.values()) == {(0, 2, 1)}


def test_names_and_places():
    """Only what is [experts, out, in] is named, and only TPUs have it so."""
    mixture = transformers.GraniteMoeHybridConfig(
        **SIZES,
        intermediate_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        layer_types=["attention", "attention"],
        mamba_n_heads=4,
    )
    inputs_first = transformers.GptOssConfig(
        **SIZES, intermediate_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4
    )
    with torch.device("meta"):
        models = [transformers.AutoModelForCausalLM.from_config(config) for config in (mixture, inputs_first)]
    found = [memory_layout.experts_by_output(model) for model in (tiny(), *models)]
    assert [len(names) for names in found] == [4, 4, 0]
    with serve(tiny(), engine=OPTIONS) as served:
        (array, *_) = experts_of(served).values()
        assert memory_layout.place_of(array) == array.sharding
