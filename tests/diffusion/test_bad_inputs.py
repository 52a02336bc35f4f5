"""Pipelines that cannot run on JAX as they are: one line that names the model and the remedy."""

import types

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from diffusers.hooks import HookRegistry, ModelHook
from tiny_pipelines import call, copied, stable_diffusion, unet

from torchax_serve import InvalidArgumentError, UnsupportedArgumentError, UnsupportedModelError, to_jax

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return stable_diffusion(tmp_path_factory.mktemp("tokenizer"))


def test_on_another_device(eager):
    pipeline = copied(eager)
    pipeline.unet.to("meta")
    with pytest.raises(InvalidArgumentError) as error:
        to_jax(pipeline)
    assert str(error.value).startswith("unet.conv_in.weight: expected a tensor on the CPU, got one on meta; call pipe")


def test_compiled_by_torch(eager):
    pipeline = copied(eager)
    pipeline.unet.compile()
    with pytest.raises(InvalidArgumentError, match=r"^unet: expected a module without torch\.compile, got a compiled"):
        to_jax(pipeline)
    pipeline = copied(eager)
    pipeline.unet = torch.compile(pipeline.unet)
    with pytest.raises(InvalidArgumentError, match=r"^unet: expected a module without torch\.compile"):
        to_jax(pipeline)


def test_offloaded_by_accelerate(eager):
    pipeline = copied(eager)
    add_hook_to_module(pipeline.unet, AlignDevicesHook(execution_device="cpu"))
    with pytest.raises(InvalidArgumentError, match=r"^unet: .*offloaded .*accelerate.*leave enable_\*_offload"):
        to_jax(pipeline)


def test_offloaded_afterwards(eager):
    pipeline = to_jax(copied(eager))
    add_hook_to_module(pipeline.unet.mid_block, AlignDevicesHook(execution_device="cpu"))
    with pytest.raises(InvalidArgumentError, match="offloaded"):
        call(pipeline)


def test_hooks_of_diffusers(eager):
    pipeline = copied(eager)
    HookRegistry.check_if_exists_or_initialize(pipeline.unet).register_hook(ModelHook(), "cache")
    with pytest.raises(InvalidArgumentError, match=r"by hooks \(cache\)"):
        to_jax(pipeline)


def test_forward_hook_on_a_part(eager):
    pipeline = copied(eager)
    pipeline.unet.conv_in.register_forward_hook(lambda *args: None)
    with pytest.raises(UnsupportedModelError, match=r"^unet\.conv_in: expected no forward hook"):
        to_jax(pipeline)


def test_distributed_by_accelerate(eager):
    pipeline = copied(eager)
    pipeline.hf_device_map = {"unet": "cpu"}
    with pytest.raises(InvalidArgumentError, match="device_map"):
        to_jax(pipeline)


def test_quantized_and_double_precision(eager):
    pipeline = copied(eager)
    pipeline.unet.is_quantized = True
    with pytest.raises(UnsupportedModelError, match=r"^unet: expected weights without quantization"):
        to_jax(pipeline)
    with pytest.raises(UnsupportedModelError, match="float64"):
        to_jax(unet().double())


def test_quantization_is_refused(eager):
    with pytest.raises(UnsupportedArgumentError, match=r"^quantization: expected none with a StableDiffusionPipeline"):
        to_jax(copied(eager), quantization="int8")


def test_sizes_that_latents_do_not_divide(eager):
    pipeline = to_jax(copied(eager))
    with pytest.raises(ValueError, match="divisible by 8"):  # diffusers' own words
        pipeline("a fox", height=30, width=30, num_inference_steps=1)


def test_errors_of_arguments_are_those_of_diffusers(eager):
    pipeline = to_jax(copied(eager))
    given = {"timestep": 7, "encoder_hidden_states": torch.randn(1, 5, 32)}
    with pytest.raises(RuntimeError) as theirs, torch.no_grad():
        eager.unet(torch.randn(1, 3, 16, 16), **given)
    with pytest.raises(RuntimeError) as ours:
        pipeline.unet(torch.randn(1, 3, 16, 16), **given)
    assert str(ours.value) == str(theirs.value)
    with pytest.raises(UnsupportedArgumentError, match=r"cross_attention_kwargs: .*on JAX, got a SimpleNamespace"):
        pipeline.unet(torch.randn(1, 4, 16, 16), **given, cross_attention_kwargs={"x": types.SimpleNamespace()})


def test_autocast_is_refused(eager):
    pipeline = to_jax(copied(eager))
    with pytest.raises(UnsupportedArgumentError, match="autocast"), torch.autocast("cpu", torch.bfloat16):
        pipeline.unet(torch.randn(1, 4, 16, 16), 7, torch.randn(1, 5, 32))
