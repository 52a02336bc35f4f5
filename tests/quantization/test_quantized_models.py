"""Models with quantized weights: tokens and logits are those of the same weights made dense."""

import json

import numpy as np
import pytest
import torch
from thorough import except_for
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    Qwen3MoeConfig,
)

from model_adapters.errors import InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError
from model_adapters.loading import load_model
from model_adapters.ops.compressed_weight import unpacked
from model_adapters.ops.quantized_weight import QuantizedWeight, dequantize
from torchax_serve import EngineOptions, SamplingParams, serve, to_jax
from torchax_serve.runtime.eager import EagerReference

TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 80}
MOE = {"num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 16}
CONFIGS = {
    "llama": LlamaConfig(**TINY),
    "tied": LlamaConfig(**TINY, tie_word_embeddings=True),
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=80, n_positions=64, bos_token_id=1, eos_token_id=2),
    "falcon": FalconConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=80),
    "qwen3_moe": Qwen3MoeConfig(**TINY, **MOE, num_experts=4, moe_intermediate_size=32, decoder_sparse_step=1),
    "gpt_oss": GptOssConfig(**{**TINY, "intermediate_size": 64}, **MOE, num_local_experts=4),
    "mamba": MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=80, state_size=4),
}
IDS = torch.arange(3, 27).reshape(2, 12)


def saved(folder, config, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # so that tokens differ clearly
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = saved(tmp_path_factory.mktemp(name), CONFIGS[name])
        return made[name]

    return folder


def kl(ours, theirs):
    """Mean KL divergence, in nats, of two sets of logits [..., vocab]."""
    first, second = (torch.log_softmax(each.double(), -1) for each in (ours, theirs))
    return (second.exp() * (second - first)).sum(-1).mean().item()


RULES = {"int8": "int8", "floats": {"weight_qtype": "int8", "tile_size": 16}, "fp8": "fp8", "w8a8": "w8a8"}


@pytest.mark.parametrize("name", except_for(["gpt2", "qwen3_moe"], CONFIGS))
def test_logits_are_those_of_the_weights_made_dense(folders, name):
    with serve(folders(name), dtype="float32", quantization={"weight_qtype": "int8"}) as model:
        quantized = {n for n, w in model._loaded.weights.items() if isinstance(w, QuantizedWeight)}
        assert any("layers" in n or ".h." in n for n in quantized)
        ours = model(IDS).logits
        reference = EagerReference(model._loaded)
        with torch.no_grad():
            theirs = reference.module(IDS).logits
        assert kl(ours, theirs) < 1e-6
        files = AutoModelForCausalLM.from_pretrained(folders(name), dtype=torch.float32)
        assert not torch.allclose(theirs, files(IDS).logits, rtol=1e-4)


@pytest.mark.parametrize("rules", except_for(["int8", "w8a8"], RULES))
def test_the_engine_generates_with_quantized_weights(folders, rules):
    with serve(folders("tied"), dtype="float32", quantization=RULES[rules]) as model:
        assert model._loaded.weights["lm_head.weight"] is model._loaded.weights["model.embed_tokens.weight"]
        ids = IDS[0].tolist()
        tokens = list(model.iter_tokens(ids, params=SamplingParams(max_new_tokens=8, do_sample=False)))
        batch = model.generate(IDS[:1], max_new_tokens=8, do_sample=False)[0, 12:].tolist()
        assert tokens == batch and len(tokens) == 8


def test_batch_invariance_needs_a_kernel_for_every_quantized_weight(folders):
    options = EngineOptions(batch_invariant=True, max_num_seqs=4)
    with serve(folders("llama"), engine=options, quantization="int4") as model:
        prompts = [list(range(3, 15)), list(range(20, 27)), list(range(40, 60))]
        params = SamplingParams(max_new_tokens=6, do_sample=False)
        single = [list(model.iter_tokens(ids, params=params)) for ids in prompts]
        streams = [model.iter_tokens(ids, params=params) for ids in prompts]
        assert [list(stream) for stream in streams] == single
    said = r"no C\+\+ kernel multiplies with the quantized weight"
    with (
        serve(folders("llama"), engine=options, quantization={"weight_qtype": "int8", "tile_size": 8}) as model,
        pytest.raises(InvalidArgumentError, match=said),
    ):
        list(model.iter_tokens(prompts[0], params=params))


def test_a_report_says_what_is_at_how_many_bits(folders):
    loaded = load_model(folders("qwen3_moe"), quantization="int4")
    assert loaded.report.quantization == (
        "11 weights int4 (groups of 32, activations int8); 2 weights int4 (one scale a row, activations int8); "
        "4.50 bits a number"
    )
    rules = {"module_path": "lm_head", "weight_qtype": "int8"}
    assert load_model(folders("llama"), quantization=rules).report.quantization == (
        "1 weights int8 (one scale a row); 8.50 bits a number; 14 linear layers dense"
    )
    assert loaded.report.weights_bytes < 0.4 * loaded.report.checkpoint_bytes
    assert load_model(folders("qwen3_moe")).report.quantization == ""


def test_to_jax_shares_what_is_not_quantized(folders):
    plain = AutoModelForCausalLM.from_pretrained(folders("llama"))
    with torch.no_grad():
        before = plain(IDS).logits
    model = to_jax(plain, quantization="int8")
    assert 0 < kl(model(IDS).logits, before) < 0.05
    weights = model._jax_runtime.weights
    assert isinstance(weights["lm_head.weight"], QuantizedWeight)
    assert model.generate(IDS, max_new_tokens=4, do_sample=False).shape == (2, 16)
    with pytest.raises(InvalidArgumentError, match="got one that runs on JAX already"):
        to_jax(model, quantization="int4")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(UnsupportedModelError, match=r"lm_head.weight: the model has changed"):
        model(IDS)


def test_serving_an_object_quantizes_copies(folders):
    plain = AutoModelForCausalLM.from_pretrained(folders("llama"))
    with serve(plain, quantization="int8") as model:
        assert isinstance(model._loaded.weights["lm_head.weight"], QuantizedWeight)
        assert torch.equal(plain.lm_head.weight, AutoModelForCausalLM.from_pretrained(folders("llama")).lm_head.weight)


def test_a_state_dict_has_the_dense_weights(folders):
    with serve(folders("tied"), quantization="int8") as model:
        state = model.state_dict()
        weight = model._loaded.weights["model.layers.0.mlp.up_proj.weight"]
        np.testing.assert_array_equal(
            state["model.layers.0.mlp.up_proj.weight"].float(), np.asarray(dequantize(weight), np.float32)
        )


def test_random_weights_are_quantized_as_well(tmp_path):
    (tmp_path / "config.json").write_text(CONFIGS["llama"].to_json_string())
    loaded = load_model(tmp_path, random_weights=True, quantization="int8")
    assert isinstance(loaded.weights["lm_head.weight"], QuantizedWeight)


def test_dequantized_weights_are_near_those_of_the_files(folders):
    dense = load_model(folders("gpt_oss")).weights
    for preset, bound in (("int8", 0.01), ("int4", 0.12), ("fp8", 0.04)):
        for name, weight in load_model(folders("gpt_oss"), quantization=preset).weights.items():
            want = np.asarray(dense[name], np.float32)
            error = np.linalg.norm(np.asarray(unpacked(weight), np.float32) - want)
            assert error <= (bound if isinstance(weight, QuantizedWeight) else 0) * np.linalg.norm(want)


def test_wrong_rules_are_errors_before_weights_are_read(folders):
    with pytest.raises(InvalidArgumentError, match="did you mean int8"):
        serve("no/such-model", quantization="int9")
    with pytest.raises(InvalidArgumentError, match="matches no module of LlamaForCausalLM"):
        serve(folders("llama"), quantization={"module_path": "model.layer.0.q", "weight_qtype": "int8"})
    with pytest.raises(UnsupportedArgumentError, match="quantization: expected a mesh or one device, got device_put"):
        load_model(folders("llama"), quantization="int8", device_put=lambda name, array: array)


def test_two_schemes_are_two_programs_on_disk(folders, tmp_path, monkeypatch):
    from torchax_serve.compilation.program_signature import model_identity

    identities = set()
    for rules in (None, "w8a8", {"weight_qtype": "int8"}):
        loaded = load_model(folders("llama"), quantization=rules)
        identities.add(model_identity(type(loaded.module), json.dumps({}), loaded.weights))
    assert len(identities) == 3
