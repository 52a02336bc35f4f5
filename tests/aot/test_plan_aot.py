"""Plans for accelerators that are not there: the engine's steps, sharded, through their own compilers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
import torch
import transformers
from jax.sharding import NamedSharding, PartitionSpec
from tpu_shapes import mesh_of

from model_adapters.errors import InvalidArgumentError
from model_adapters.loading.model_class import module_of
from model_adapters.ops import on_platform, routed_matmul
from model_adapters.ops.memory_layout import inputs_first
from torchax_serve.planning.chips import CHIPS
from torchax_serve.planning.plan import PlanRequest, make_plan
from torchax_serve.planning.topology import describe

CONFIG = transformers.LlamaConfig(
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=2,
    vocab_size=32000,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=128,
)
REQUEST = PlanRequest(topology="v6e:2x4", max_model_len=2048, max_num_seqs=16, prefill_lens=())


@pytest.fixture
def module():
    return module_of(transformers.LlamaForCausalLM, CONFIG, torch.bfloat16)


@pytest.mark.parametrize("topology", ["v6e:2x4", "v5e:2x2", "h200:4"])
def test_a_decoder_is_planned(module, topology):
    report = make_plan(module, "toy", dataclasses.replace(REQUEST, topology=topology))
    (decode,) = report.programs
    assert report.fits
    assert {kind: number for kind, (number, _) in decode.collectives.items()} == {"all-reduce": 5, "all-gather": 1}
    assert decode.alias_bytes == report.pages_bytes  # every page is written in place
    assert decode.temporary_bytes < 32e6
    assert report.weights_bytes <= report.weights_bytes_of_one_device * (1 / report.num_devices + 0.02)
    assert report.bounds[0].bound_by == "memory"
    if not topology.startswith("h200"):  # XLA's sum for GPUs knows nothing of times
        assert 0 < decode.compiler_s < 1e-3


def test_layers_with_experts_are_planned():
    config = transformers.MixtralConfig(
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=2,
        vocab_size=32000,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=8,
    )
    mixture = module_of(transformers.MixtralForCausalLM, config, torch.bfloat16)
    report = make_plan(mixture, "toy", dataclasses.replace(REQUEST, mesh="model=2,expert=4"))
    assert report.fits
    assert report.programs[0].collectives["all-reduce"][0] == 5


@pytest.mark.parametrize("chip", ["v6e", "tpu7x"])
def test_experts_are_read_once(chip):
    """In the order of their axes weights are copied: three times the bytes."""
    sharding, shape = NamedSharding(mesh_of(chip), PartitionSpec()), (64, 512, 1024)
    x = jax.ShapeDtypeStruct((16, shape[2]), jnp.bfloat16, sharding=sharding)
    ids = jax.ShapeDtypeStruct((16, 8), jnp.int32, sharding=sharding)

    def bytes_of(place):
        weight = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)
        with on_platform("tpu"):
            traced = jax.jit(lambda *args: routed_matmul(*args)).trace(x, weight, ids)
            compiled = traced.lower(lowering_platforms=("tpu",)).compile()
        return compiled.cost_analysis()["bytes accessed"], compiled.memory_analysis().temp_size_in_bytes

    num_bytes = 2 * math.prod(shape)
    accessed, temporary = bytes_of(inputs_first(sharding))
    assert num_bytes < accessed < 1.1 * num_bytes and temporary < num_bytes / 2
    assert bytes_of(sharding)[0] > 2.5 * num_bytes


@pytest.mark.parametrize(
    ("model_type", "executor"), [("bloom", "per-sequence"), ("mamba", "packed"), ("openai-gpt", "static")]
)
def test_models_of_each_executor_are_planned(model_type, executor):
    configs = {  # whose pages fill tiles of 128 lanes; a convolution's three inputs take the room of four
        "bloom": transformers.BloomConfig(hidden_size=512, n_layer=2, n_head=8, vocab_size=1024),
        "mamba": transformers.MambaConfig(hidden_size=1024, num_hidden_layers=2, vocab_size=1024),
        "openai-gpt": transformers.OpenAIGPTConfig(n_embd=256, n_layer=2, n_head=8, vocab_size=1024, n_positions=2048),
    }
    config = configs[model_type]
    model_class = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    report = make_plan(module_of(model_class, config, torch.bfloat16), model_type, REQUEST)
    assert (report.fits, report.executor) == (True, executor)
    assert report.programs[0].alias_bytes == report.pages_bytes + report.states_bytes
    if model_type == "mamba":
        num_rows, num_channels = REQUEST.max_num_seqs + 1, 2048 // 8
        assert report.states_bytes == 2 * num_rows * num_channels * (4 * 2 + 16 * 4)


@pytest.mark.parametrize(
    "chip", [chip for chip in CHIPS.values() if chip.platform == "tpu"], ids=lambda chip: chip.name
)
def test_chips_are_as_many_devices_as_jax_has_of_them(chip):
    for shape in chip.topologies[:2]:
        _, devices = describe(f"{chip.name}:{shape}")
        assert len(devices) == math.prod(map(int, shape.split("x"))) * chip.devices_per_chip


def test_a_topology_that_the_compiler_does_not_know(module):
    with pytest.raises(InvalidArgumentError, match="expected one that libtpu knows, such as v6e:2x2"):
        describe("v6e:3x5")


def test_heads_that_the_chips_do_not_divide_can_be_planned():
    config = transformers.Olmo2Config(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    uneven = module_of(transformers.Olmo2ForCausalLM, config, torch.bfloat16)  # a norm over all heads: none is repeated
    report = make_plan(uneven, "olmo2", REQUEST)
    assert report.fits
    assert report.programs[0].name == "decode"
