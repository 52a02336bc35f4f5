"""Adapters of requests on models of other kinds: fused and turned weights, forwards per request, fewer bits."""

import numpy as np
import pytest
import torch
from adapter_models import ATTENTION, PeftModels, ranks
from engine_models import VOCAB_SIZE, tiny_model
from thorough import except_for
from transformers import T5Config, T5ForConditionalGeneration

from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from model_adapters.ops.compressed_weight import unpacked
from torchax_serve import EngineOptions, SamplingParams, serve

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

OPTIONS = EngineOptions(max_model_len=64, max_num_seqs=8, page_size=8, max_num_batched_tokens=16)
PROMPT = [int(token) for token in np.random.default_rng(1).integers(3, VOCAB_SIZE, 20)]
NUM_NEW = 8
ROUNDED = {
    "weight_qtype": "int8"
}  # activations are not rounded, so that dense weights of the same values are an oracle


def greedy(adapter, **options):
    return SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, adapter=adapter, **options)


def check_tokens(served, peft, names=None, prompt=PROMPT):
    """Tokens of a row with each adapter and of one with none, in one batch, are eager peft's."""
    names = [*(names or peft.names), None]
    prompts = [prompt[: len(prompt) - index] for index in range(len(names))]
    wanted = [peft.tokens(name, each, NUM_NEW) for name, each in zip(names, prompts, strict=True)]
    got = served.generate_batch(prompts, [greedy(name) for name in names])
    assert [answer.token_ids for answer in got] == wanted
    return got


TARGETS = {
    "gpt2": (["c_attn", "c_proj", "c_fc"], "packed"),
    "qwen3": ([*ATTENTION, "gate_proj", "up_proj", "down_proj"], "packed"),
    "mixtral": (ATTENTION, "packed"),
    "bloom": (["query_key_value", "dense"], "per-sequence"),
    "mamba": (["in_proj"], "packed"),
    "youtu": (["q_b_proj", "kv_a_proj_with_mqa", "o_proj"], "packed"),
    # What makes keys of latents differs by request.
    "youtu-keys": (["kv_b_proj", "o_proj"], "per-sequence"),
}


@pytest.mark.parametrize("name", except_for(["qwen3", "bloom"], TARGETS))
def test_tokens_are_those_of_peft(name, tmp_path):
    targets, executor = TARGETS[name]
    name = name.removesuffix("-keys")
    configs = {key: {**config, "target_modules": targets} for key, config in ranks(3).items()}
    if name == "gpt2":
        configs = {key: {**config, "fan_in_fan_out": True} for key, config in configs.items()}
    peft = PeftModels(tiny_model(name), tmp_path, configs)
    with serve(tiny_model(name), engine=OPTIONS, adapters=peft.folders()) as served:
        got = check_tokens(served, peft)
        assert ("per-sequence" in served.engine.description) == (executor == "per-sequence")
        plain = served.generate_batch([PROMPT[:-3]], [greedy(None)])[0]
        assert plain.token_ids == got[-1].token_ids


def test_a_quantized_base_has_adapters_beside_it(tmp_path):
    base = tmp_path / "base"
    tiny_model("llama").save_pretrained(base)
    peft = PeftModels(tiny_model("llama"), tmp_path, ranks(3))
    with serve(base, engine=OPTIONS, quantization=ROUNDED) as plain:
        alone = plain.generate_batch([PROMPT], [greedy(None, logprobs=2)])[0]
        stored = {name: unpacked(weight) for name, weight in plain._runtimes[0].weights.items()}
    rounded = tiny_model("llama")
    state = rounded.state_dict()
    changes = [not np.array_equal(np.asarray(stored[name]), tensor) for name, tensor in state.items()]
    assert sum(changes) >= 14, "the linear layers are rounded"
    rounded.load_state_dict({name: torch.tensor(np.asarray(stored[name])) for name in state})
    beside = PeftModels(rounded, tmp_path / "rounded", ranks(3))  # seeded: the same adapters
    with serve(base, engine=OPTIONS, quantization=ROUNDED, adapters=peft.folders()) as served:
        check_tokens(served, beside)
        row = served.generate_batch([PROMPT, PROMPT], [greedy(None, logprobs=2), greedy("a1")])[0]
    assert (row.token_ids, row.logprobs) == (alone.token_ids, alone.logprobs)


def test_a_base_in_bfloat16_and_compressed(tmp_path):
    """Rows without an adapter are those of the model alone; those with one differ."""
    peft = PeftModels(tiny_model("llama", torch.bfloat16), tmp_path, ranks(2))
    prompts, asked = [PROMPT, PROMPT[4:]], greedy(None, logprobs=2)
    engine = EngineOptions(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=16, batch_invariant=True)
    with serve(tiny_model("llama", torch.bfloat16), engine=engine) as plain:
        wanted = plain.generate_batch(prompts, asked)
    with serve(tiny_model("llama", torch.bfloat16), engine=engine, adapters=peft.folders()) as served:
        got = served.generate_batch([*prompts, PROMPT], [asked, asked, greedy("a1")])
    assert [(each.token_ids, each.logprobs) for each in got[:2]] == [(each.token_ids, each.logprobs) for each in wanted]
    assert got[2].token_ids != wanted[0].token_ids


def test_new_weights_keep_their_adapters(tmp_path):
    other = tiny_model("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    peft = PeftModels(tiny_model("llama"), tmp_path, ranks(2))
    after = PeftModels(other, tmp_path / "after", ranks(2))
    with serve(tiny_model("llama"), engine=OPTIONS, adapters=peft.folders()) as served:
        check_tokens(served, peft)
        served.set_weights(state)
        check_tokens(served, after)
        served.refresh()


def test_an_engine_that_is_made_again_has_the_adapters(tmp_path):
    peft = PeftModels(tiny_model("llama"), tmp_path, ranks(2))
    with serve(
        tiny_model("llama"), engine=OPTIONS, adapters={"a0": peft.folder("a0")}, max_loras=2, max_lora_rank=2
    ) as served:
        served.load_adapter("a1", peft.folder("a1"))  # before there is an engine
        check_tokens(served, peft)
        served.refresh()
        check_tokens(served, peft)


def test_an_adapter_is_merged_next_to_others(tmp_path):
    peft = PeftModels(tiny_model("llama"), tmp_path, ranks(2))
    with serve(tiny_model("llama"), engine=OPTIONS, adapter=peft.folder("a0"), max_loras=1) as served:
        assert served.generate_batch([PROMPT], [greedy(None)])[0].token_ids == peft.tokens("a0", PROMPT, NUM_NEW)


def test_layers_of_experts_and_models_with_encoders_are_refused_by_name(tmp_path):
    mixture = PeftModels(
        tiny_model("mixtral"), tmp_path / "m", {"x": {"target_modules": [], "target_parameters": ["gate_up_proj"]}}
    )
    with pytest.raises((UnsupportedModelError, InvalidArgumentError), match=r"target_parameters|experts"):
        serve(tiny_model("mixtral"), adapters=mixture.folders())
    config = T5Config(vocab_size=61, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError, match="expected a decoder with a head on one host, this model is an enc"):
        serve(T5ForConditionalGeneration(config), max_loras=1)
