"""Llama 4's experts compute the tokens that chose them, with the results of computing all."""

import copy

import pytest
import torch

from model_adapters.ops import registry
from parity_sweep.tiny.config import tiny_config
from parity_sweep.tiny.models import causal_class, random_model
from torchax_serve import to_jax


@pytest.mark.parametrize("num_chosen", [1, 2])
def test_logits_are_those_of_eager_transformers(num_chosen):
    config = tiny_config("llama4_text", overrides={"num_local_experts": 5, "num_experts_per_tok": num_chosen})
    model = random_model(causal_class("llama4_text"), config)
    assert any(type(module).__name__ == "Llama4TextMoe" for module in model.modules())
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    with torch.no_grad():
        expected = copy.deepcopy(model)(ids).logits
    with registry.record_calls() as calls:
        found = to_jax(model)(ids).logits
    assert ("routed_matmul", "cpu-ffi") in calls
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
