"""What a device has of a model of usual size: its share, and 2 % of the weights at the most."""

import pytest
import torch
import transformers
from jax.sharding import AbstractMesh

from model_adapters.loading.model_class import module_of
from sharding_rules import MESH_AXES, TABLES
from torchax_serve.planning.abstract_model import abstract_model, module_of_type

MOST = 0.02
# The smallest model of the type has a table of positions that is 1 % of it, and heads that eight devices do not divide.
OPT_1_3B = transformers.OPTConfig(
    hidden_size=2048, ffn_dim=8192, num_hidden_layers=24, num_attention_heads=32, word_embed_proj_dim=2048
)


@pytest.mark.parametrize("model_type", TABLES)
def test_weights_are_evenly_sharded(model_type):
    if model_type == "opt":
        module = module_of(transformers.OPTForCausalLM, OPT_1_3B, torch.bfloat16)
    else:
        module = module_of_type(model_type)
    for number in (2, 4, 8):
        sizes = tuple({"model": number}.get(axis, 1) for axis in MESH_AXES)
        model = abstract_model(module, AbstractMesh(sizes, MESH_AXES))
        assert model.weights_bytes > 0.2e9
        assert model.weights_bytes_per_device <= model.weights_bytes * (1 / number + MOST)
