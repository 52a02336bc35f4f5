"""A model whose code PyTorch itself cannot run: the error says so, and carries PyTorch's own."""

import jax
import pytest
import torch
import transformers

from parity_sweep.tiny.config import tiny_config
from torchax_serve import UnsupportedModelError, serve

IDS = torch.tensor([[3, 4, 5, 6]])


@pytest.fixture(scope="module")
def config():
    """Of the code of transformers 5.23, whose cache asks the configuration for what it has not."""
    return tiny_config("blt")


@pytest.fixture(scope="module")
def in_torch(config):
    """What eager PyTorch raises on the call."""
    with pytest.raises(Exception) as raised:
        transformers.BltForCausalLM(config).eval()(IDS)
    return raised.value


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_the_error_names_the_type_and_carries_that_of_torch(config, in_torch, from_checkpoint, tmp_path):
    module = transformers.BltForCausalLM(config).eval()
    if from_checkpoint:  # whose module has no values of its own
        module.save_pretrained(tmp_path)
    with serve(tmp_path if from_checkpoint else module) as served:
        with pytest.raises(UnsupportedModelError, match="blt: expected a forward that runs in PyTorch") as raised:
            served(IDS)
        assert str(in_torch) in str(raised.value)
        assert type(raised.value.__cause__) is type(in_torch)
        with pytest.raises(UnsupportedModelError, match="PyTorch itself fails on, without JAX"):
            served.generate(IDS, max_new_tokens=2, do_sample=False)


class Reading(transformers.LlamaForCausalLM):
    """Runs in PyTorch, and reads a result, which is unknown while a program is made."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        assert float(output.logits.sum()) < 1e9
        return output


def test_of_a_model_that_torch_can_run_the_place_that_cannot_be_traced_is_said():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    module = Reading(transformers.LlamaConfig(**sizes, num_attention_heads=2)).eval()
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    with torch.no_grad():
        module(IDS)
    place = r"llama: expected a forward that can be traced, got ConcretizationTypeError at test_fails_in_torch.py:\d+: "
    with serve(module) as served, pytest.raises(UnsupportedModelError, match=place) as raised:
        served(IDS)
    assert isinstance(raised.value.__cause__, jax.errors.ConcretizationTypeError)
    assert all(torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())
