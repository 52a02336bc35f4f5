"""Recurrences over a prompt are one loop on the device: programs do not grow with it, and the numbers are PyTorch's."""

import copy

import jax
import jax.numpy as jnp
import pytest
import torch
from thorough import except_for

from model_adapters.program.model_program import CallSpec
from parity_sweep.tiny.config import tiny_config
from parity_sweep.tiny.models import causal_class, random_model
from torchax_serve import to_jax

TYPES = ("mamba", "falcon_mamba", "jamba", "zamba", "rwkv", "recurrent_gemma")
LENGTHS = (9, 33)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def num_equations(jaxpr):
    """Of a program, those inside of loops and calls once."""
    inner = [each for equation in jaxpr.eqns for each in jax.tree.leaves(list(equation.params.values()))]
    closed = [getattr(each, "jaxpr", each) for each in inner]
    return len(jaxpr.eqns) + sum(num_equations(each) for each in closed if hasattr(each, "eqns"))


@pytest.mark.parametrize("model_type", except_for(["mamba", "rwkv", "recurrent_gemma"], TYPES))
def test_programs_do_not_grow_with_a_prompt_and_logits_are_those_of_pytorch(model_type):
    model = random_model(causal_class(model_type), tiny_config(model_type))
    ids = torch.randint(5, 96, (2, LENGTHS[1]), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = copy.deepcopy(model)(input_ids=ids).logits
    served = to_jax(model)
    assert torch.allclose(served(input_ids=ids).logits, wanted, atol=1e-4)
    runtime = served._jax_runtime

    def program(tokens):
        return runtime.program.forward(runtime.weights, None, None, {"input_ids": tokens}, CallSpec())[0]["logits"]

    short, long = (num_equations(jax.make_jaxpr(program)(jnp.ones((1, n), jnp.int32)).jaxpr) for n in LENGTHS)
    assert long <= short + 10


def test_eager_pytorch_keeps_its_own_functions_beside_a_served_model():
    model = random_model(causal_class("mamba"), tiny_config("mamba"))
    eager, ids = copy.deepcopy(model), torch.arange(5, 20)[None]
    before = eager(input_ids=ids).logits
    served = to_jax(model)(input_ids=ids).logits
    assert torch.equal(eager(input_ids=ids).logits, before)
    assert torch.allclose(served, before, atol=1e-4)


def test_a_first_layer_that_keeps_a_state_does_not_hide_the_padding_of_later_ones():
    """Eager steps of MiniMax with a cache see the padding; without one, and served, they do not."""
    config = tiny_config("minimax")
    config.layer_types = ["linear_attention", "full_attention"]
    config.num_hidden_layers = 2
    model = random_model(causal_class("minimax"), config)
    ids = torch.randint(5, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    wanted = copy.deepcopy(model).generate(**given, use_cache=False)
    assert torch.equal(to_jax(model).generate(**given), wanted)
