"""`to_jax(pipeline)`: images are those of eager PyTorch, with diffusers' own loop, outputs and options."""

import copy
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from diffusers import UNet2DModel
from diffusers.hooks import HookRegistry
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.attention_processor import AttnProcessor
from diffusers.models.autoencoders.vae import DecoderOutput
from diffusers.models.transformers.transformer_flux2 import Flux2KVCache
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP
from peft import LoraConfig
from tiny_pipelines import PIPELINES, PROMPT, call, copied

import pytree_registry
from model_adapters.bridge.views import jax_view, torch_view
from model_adapters.diffusion import attention
from torchax_serve import UnsupportedArgumentError, UnsupportedModelError, to_jax
from torchax_serve.diffusion.pipeline import pipeline_to_jax

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers, about its own arguments and torch
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Each pipeline in eager PyTorch and on JAX, made once."""
    made = {}

    def pair(name):
        if name not in made:
            eager = PIPELINES[name](tmp_path_factory.mktemp("tokenizer"))
            eager.set_progress_bar_config(disable=True)
            made[name] = eager, to_jax(copied(eager))
        return made[name]

    return pair


def num_traces(pipeline):
    """Traces by cache of programs: a model whose structure has changed has a new one."""
    runtimes = [vars(each).get("_jax_runtime") for each in pipeline.components.values() if hasattr(each, "modules")]
    return [(each.programs, each.programs.num_traces.total()) for each in runtimes if hasattr(each, "programs")]


@pytest.mark.parametrize("name", PIPELINES)
def test_images_are_those_of_eager_pytorch(pairs, name):
    eager, pipeline = pairs(name)
    wanted = call(eager)
    found = call(pipeline)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
    assert np.ptp(wanted) > 0.1, "an image of one colour shows nothing"
    traces = num_traces(pipeline)
    np.testing.assert_allclose(call(pipeline, steps=4, seed=4), call(eager, steps=4, seed=4), atol=TOLERANCE)
    assert num_traces(pipeline) == traces, "a step or a seed made another program"


def test_an_empty_registry_of_hooks_is_no_change(pairs):
    model = to_jax(copy.deepcopy(pairs("stable diffusion")[0].unet))
    given = {"sample": torch.randn(1, 4, 16, 16), "timestep": 7, "encoder_hidden_states": torch.randn(1, 5, 32)}
    model(**given)
    programs = vars(model)["_jax_runtime"].programs
    HookRegistry.check_if_exists_or_initialize(model)  # as pipelines do at the end of a call
    model(**given)
    assert vars(model)["_jax_runtime"].programs is programs


def test_prompts_and_seeds_change_the_image(pairs):
    _, pipeline = pairs("stable diffusion")
    one = call(pipeline)
    assert np.abs(call(pipeline, prompt="snow") - one).max() > 1e-4
    assert np.abs(call(pipeline, seed=8) - one).max() > 1e-2


def test_object_class_and_name_stay(pairs):
    eager, pipeline = pairs("stable diffusion")
    assert isinstance(pipeline.unet, type(eager.unet))
    assert type(pipeline.unet).__name__ == "UNet2DConditionModel"
    assert to_jax(pipeline) is pipeline
    assert pipeline.unet.config == eager.unet.config


def test_outputs_have_diffusers_classes_and_latents_a_distribution(pairs):
    eager, pipeline = pairs("stable diffusion")
    given = {"sample": torch.randn(2, 4, 16, 16), "timestep": 7, "encoder_hidden_states": torch.randn(2, 5, 32)}
    image = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        wanted, encoded = eager.unet(**given), eager.vae.encode(image).latent_dist
        decoded = eager.vae.decode(encoded.mode()).sample
    found = pipeline.unet(**given)
    assert type(found) is UNet2DConditionOutput
    torch.testing.assert_close(found.sample, wanted.sample, atol=1e-4, rtol=0)
    (as_tuple,) = pipeline.unet(**given, return_dict=False)
    torch.testing.assert_close(as_tuple, wanted.sample, atol=1e-4, rtol=0)
    distribution = pipeline.vae.encode(image).latent_dist
    assert type(distribution) is type(encoded)
    for name in ("mean", "logvar", "std", "var", "parameters"):
        torch.testing.assert_close(getattr(distribution, name), getattr(encoded, name), atol=1e-4, rtol=1e-4)
    noise = [each.sample(torch.Generator().manual_seed(1)) for each in (distribution, encoded)]
    torch.testing.assert_close(*noise, atol=1e-4, rtol=0)
    output = pipeline.vae.decode(distribution.mode())
    assert type(output) is DecoderOutput
    torch.testing.assert_close(output.sample, decoded, atol=1e-4, rtol=0)


def test_output_classes_are_pytrees():
    pytree_registry.register_all()
    output = UNet2DConditionOutput(sample=jax.numpy.ones(3))
    doubled = jax.jit(lambda x: jax.tree.map(lambda leaf: 2 * leaf, x))(output)
    assert type(doubled) is UNet2DConditionOutput
    assert doubled["sample"] is doubled.sample
    assert doubled[0].tolist() == [2, 2, 2]


def test_the_cache_of_reference_tokens_is_a_pytree():
    cache = Flux2KVCache(num_double_layers=1, num_single_layers=1)
    cache.num_ref_tokens = 5
    cache.get_single(0).store(jax.numpy.ones(3), jax.numpy.zeros(3))
    pytree_registry.register_all()
    doubled = jax.jit(lambda x: jax.tree.map(lambda leaf: 2 * leaf, x))(cache)
    assert type(doubled) is Flux2KVCache and doubled.num_ref_tokens == 5
    assert [each.tolist() for each in doubled.get_single(0).get()] == [[2, 2, 2], [0, 0, 0]]
    with pytest.raises(RuntimeError, match="not been populated"):
        doubled.get_double(0).get()


def test_a_callback_gets_the_latents_of_each_step(pairs):
    seen = {"eager": [], "jax": []}
    for which, pipeline in zip(seen, pairs("stable diffusion"), strict=True):

        def on_step(pipeline, step, timestep, values, which=which):
            seen[which].append(values["latents"].clone())
            return values

        call(pipeline, callback_on_step_end=on_step, callback_on_step_end_tensor_inputs=["latents"])
    assert len(seen["jax"]) == 2
    torch.testing.assert_close(seen["jax"], seen["eager"], atol=TOLERANCE, rtol=TOLERANCE)


def test_changes_of_a_model_take_effect(pairs):
    before, _ = pairs("stable diffusion")
    eager = copied(before)
    pipeline = to_jax(copied(before))
    first = call(pipeline)
    for each in (eager, pipeline):
        torch.manual_seed(5)
        each.unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
        each.vae.enable_tiling()
    wanted, found = call(eager), call(pipeline)
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
    assert np.abs(found - first).max() > 2 * TOLERANCE
    for each in (eager, pipeline):
        each.unet.disable_adapters()
        each.vae.disable_tiling()
    np.testing.assert_allclose(call(pipeline), first, atol=TOLERANCE)


def test_lora_loaded_before_to_jax(pairs, tmp_path):
    eager = copied(pairs("stable diffusion")[0])
    torch.manual_seed(6)
    eager.unet.add_adapter(LoraConfig(r=4, target_modules=["to_k", "to_out.0"], init_lora_weights=False))
    np.testing.assert_allclose(call(to_jax(copied(eager))), call(eager), atol=TOLERANCE)


def test_bfloat16(pairs):
    eager = copied(pairs("flux")[0]).to(torch.bfloat16)
    pipeline = to_jax(copied(pairs("flux")[0]).to(torch.bfloat16))
    wanted, found = call(eager), call(pipeline)
    assert np.abs(found - wanted).mean() < 2e-2


def test_a_model_on_jax_is_not_copied(pairs):
    with pytest.raises(UnsupportedModelError, match="copy it before to_jax"):
        copy.deepcopy(pairs("stable diffusion")[1].unet)


def _masks():
    torch.manual_seed(1)
    return {
        "none": None,
        "boolean of keys": torch.tensor([[True] * 5 + [False] * 2, [True] * 7]),
        "boolean": torch.rand(2, 1, 6, 7) > 0.3,
        "additive": torch.randn(2, 4, 6, 7),
        "of queries and keys": torch.randn(6, 7),
    }


class _Store:
    """Keeps attention maps as LEdits++ does: a list by name, in an object that all processors share."""

    def __init__(self):
        self.step = {"maps": []}


class _StoringProcessor(AttnProcessor):
    def __init__(self, store):
        self.store = store

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None):
        out = super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
        self.store.step["maps"].append(out)
        return out


class _ScalingProcessor(_StoringProcessor):
    def __init__(self, store, scale):
        super().__init__(store)
        self.scale = scale

    def __call__(self, *args, **kwargs):
        return self.scale * super().__call__(*args, **kwargs)


def test_what_processors_store_is_there_after_each_call(pairs):
    """New processors like earlier ones, which LEdits++ sets for each image, run the earlier programs."""
    eager, own = (copy.deepcopy(pairs("stable diffusion")[0].unet) for _ in range(2))
    to_jax(own)
    torch.manual_seed(0)
    given = torch.randn(1, 4, 8, 8), torch.tensor(5), torch.randn(1, 7, eager.config.cross_attention_dim)
    programs = []
    for scale in (1.0, 1.0, 0.5, 1.0):
        stores = _Store(), _Store()
        for model, store in zip((eager, own), stores, strict=True):
            model.set_attn_processor(_ScalingProcessor(store, scale))
        for _ in range(2):
            with torch.no_grad():
                wanted = eager(*given).sample
            torch.testing.assert_close(own(*given).sample, wanted, atol=TOLERANCE, rtol=0)
        wanted, found = (store.step["maps"] for store in stores)
        assert len(found) == len(wanted) > 4
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)
        programs.append(own._jax_runtime.programs)
    assert programs[0] is programs[1] is programs[3] is not programs[2]
    assert [each.num_traces.total() for each in programs] == [1, 1, 1, 1]


class _SettingProcessor(_StoringProcessor):
    def __call__(self, *args, **kwargs):
        self.last = super().__call__(*args, **kwargs)
        return self.last


def test_a_processor_that_stores_elsewhere_is_refused(pairs):
    model = copy.deepcopy(pairs("stable diffusion")[0].unet)
    model.set_attn_processor(_SettingProcessor(_Store()))
    with pytest.raises(UnsupportedModelError, match=r"expected attention processors that store tensors at the end of"):
        to_jax(model)(torch.randn(1, 4, 8, 8), torch.tensor(5), torch.randn(1, 7, model.config.cross_attention_dim))


class _Caching(UNet2DModel):
    """A model that writes into a cache among its arguments, as AnyFlow's does."""

    def forward(self, sample, cache):
        cache["keys"][0] = sample[0]
        return sample


def test_a_model_that_writes_into_an_argument_is_refused():
    model = to_jax(
        _Caching(
            sample_size=8, block_out_channels=(32,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",)
        )
    )
    with pytest.raises(UnsupportedModelError, match="writes into a tensor inside of one of its arguments, such as a"):
        model(torch.ones(1, 3, 8, 8), {"keys": torch.zeros(2, 3, 8, 8)})


def test_a_text_encoder_of_diffusers_that_returns_a_tuple():
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 37}
    config = MCLIPConfig(vocab_size=100, numDims=24, transformerDimSize=32, pad_token_id=1, **sizes)
    torch.manual_seed(0)
    eager = MultilingualCLIP(config).eval()
    own = copy.deepcopy(eager)
    pipeline_to_jax(SimpleNamespace(components={"text_encoder": own}))
    ids, mask = torch.tensor([[0, 5, 6, 2], [0, 7, 2, 1]]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    with torch.no_grad():
        wanted = eager(ids, attention_mask=mask)
    for mine, theirs in zip(own(ids, attention_mask=mask), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mask", _masks())
def test_attention_is_that_of_pytorch(mask):
    given = _masks()[mask]
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 7, 4, 8), torch.randn(2, 7, 4, 8)
    seen = given[:, None, None] if mask == "boolean of keys" else given
    wanted = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen)
    views = [None if x is None else torch_view(jax.numpy.asarray(x.numpy())) for x in (q, k, v, given)]
    found = jax_view(attention.attention(*views))
    np.testing.assert_allclose(np.asarray(found), wanted.transpose(1, 2).numpy(), atol=1e-5)
    torch.testing.assert_close(attention.attention(q, k, v, given), wanted.transpose(1, 2))


def test_the_registered_backend_has_a_name_of_diffusers(pairs):
    """AceStep asks by name whether the active backend is one of flash attention's."""
    pairs("stable diffusion")
    assert AttentionBackendName("torchax_serve") is AttentionBackendName.NATIVE
    with pytest.raises(ValueError, match="'other' is not a valid"):
        AttentionBackendName("other")


def test_transformers_attend_through_the_registered_backend(pairs, monkeypatch):
    calls = []
    own = _AttentionBackendRegistry._backends[attention.NAME]

    def counted(*args, **kwargs):
        calls.append(kwargs["query"].shape)
        return own(*args, **kwargs)

    monkeypatch.setitem(_AttentionBackendRegistry._backends, attention.NAME, counted)
    before = _AttentionBackendRegistry.get_active_backend()
    call(to_jax(copied(pairs("flux")[0])))
    assert calls
    assert _AttentionBackendRegistry.get_active_backend() == before


def test_backends_with_other_numbers_are_refused(pairs):
    pipeline = copied(pairs("flux")[0])
    for module in pipeline.transformer.modules():
        if hasattr(module, "processor"):
            module.processor._attention_backend = "sage"
    with pytest.raises(UnsupportedArgumentError, match="reset_attention_backend"):
        call(to_jax(pipeline))


def test_another_batch_and_size_are_other_programs(pairs):
    eager, pipeline = pairs("stable diffusion")
    prompts = [PROMPT, "snow"]
    np.testing.assert_allclose(call(pipeline, prompt=prompts), call(eager, prompt=prompts), atol=TOLERANCE)
    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    images = [
        each(PROMPT, height=48, width=32, num_inference_steps=2, generator=generator, output_type="np").images
        for each, generator in zip((eager, pipeline), generators, strict=True)
    ]
    np.testing.assert_allclose(*images, atol=TOLERANCE)
