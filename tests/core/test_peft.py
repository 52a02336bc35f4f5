"""Adapters of peft around, in and out of a model that runs on JAX."""

import copy

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from model_adapters.errors import InvalidArgumentError
from torchax_serve import SamplingParams, serve, to_jax

# What peft says beside eager PyTorch, too: of a name in transformers, and of positions that generate hands to it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning"),
]
IDS = torch.arange(5, 14)[None]
OPTIONS = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.3)).eval()


def lora():
    torch.manual_seed(1)
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


def stages(model):
    """Logits after each thing that is done with adapters, by name."""
    wrapped = peft.get_peft_model(model, lora()).eval()
    yield "wrapped", wrapped(input_ids=IDS).logits
    yield "generated", wrapped.generate(input_ids=IDS, **OPTIONS)
    with wrapped.disable_adapter():
        yield "disabled", wrapped(input_ids=IDS).logits
    wrapped.merge_adapter()
    yield "merged", wrapped(input_ids=IDS).logits
    wrapped.unmerge_adapter()
    yield "taken out", wrapped.unload()(input_ids=IDS).logits


def test_adapters_of_peft_take_effect_at_every_stage():
    served = to_jax(llama())
    served(input_ids=IDS)
    with torch.no_grad():
        for (name, expected), (_, got) in zip(stages(llama()), stages(served), strict=True):
            assert torch.allclose(got.float(), expected.float(), atol=1e-3), name


# PEFT passes the older name of the cache, also beside the newer one.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache` are set:FutureWarning")
@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_a_peft_model_goes_to_jax_with_prompts_that_it_has_learned(kind):
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(llama(), kind(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    served = to_jax(copy.deepcopy(wrapped))
    with torch.no_grad():
        assert torch.allclose(served(input_ids=IDS).logits, wrapped(input_ids=IDS).logits, atol=1e-3)
        given = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
        assert torch.equal(served.generate(**given, **OPTIONS), wrapped.generate(**given, **OPTIONS))


def test_serve_takes_a_peft_model_with_its_adapters():
    wrapped = peft.get_peft_model(llama(), lora()).eval()
    expected = wrapped.generate(input_ids=IDS, **OPTIONS)[0, IDS.shape[1] :].tolist()
    plain = llama().generate(input_ids=IDS, **OPTIONS)[0, IDS.shape[1] :].tolist()
    assert expected != plain
    with serve(wrapped) as served:
        answer = served.generate_batch([IDS[0].tolist()], SamplingParams(max_new_tokens=3, temperature=0))
    assert answer[0].token_ids == expected


def test_serve_says_where_learned_prompts_run():
    prompted = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(InvalidArgumentError, match=r"PeftModelForCausalLM.*call to_jax\(model\).generate"):
        serve(peft.get_peft_model(llama(), prompted))


def test_each_row_has_its_adapter_by_name():
    wrapped = peft.get_peft_model(llama(), lora(), adapter_name="one")
    wrapped.add_adapter("two", lora())
    for name, parameter in wrapped.named_parameters():
        if ".two." in name:
            parameter.data.mul_(-1.5)
    served = to_jax(copy.deepcopy(wrapped.eval()))
    rows = {"input_ids": IDS.repeat(3, 1), "adapter_names": ["two", "__base__", "one"]}
    with torch.no_grad():
        expected = wrapped(**rows).logits
        assert not torch.allclose(expected[0], expected[2], atol=0.1)
        assert torch.allclose(served(**rows).logits, expected, atol=1e-3)
        assert torch.equal(served.generate(**rows, **OPTIONS), wrapped.generate(**rows, **OPTIONS))
