"""`DeviceTensor`: scheduler and loop on the device, and nothing copied to the host between steps."""

import jax
import numpy as np
import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler, UniPCMultistepScheduler
from tiny_pipelines import PIPELINES, call, copied, stable_diffusion

from model_adapters.bridge.device_tensor import NUM_TRANSFERS, DeviceTensor
from torchax_serve.diffusion.pipeline import pipeline_to_jax

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def made(tmp_path):
    def pair(name):
        eager = PIPELINES[name](tmp_path)
        eager.set_progress_bar_config(disable=True)
        return eager, pipeline_to_jax(copied(eager), latents_on_device=True)

    return pair


@pytest.mark.parametrize("name", PIPELINES)
def test_steps_copy_nothing_to_the_host(made, name):
    eager, pipeline = made(name)
    np.testing.assert_allclose(call(pipeline, steps=2), call(eager, steps=2), atol=1e-3)
    transfers = []
    for steps in (2, 5):
        NUM_TRANSFERS.clear()
        call(pipeline, steps=steps)
        transfers.append(dict(NUM_TRANSFERS))
    assert transfers[0] == transfers[1]
    assert 0 < sum(transfers[0].values()) <= 3


@pytest.mark.parametrize("scheduler", [EulerAncestralDiscreteScheduler, UniPCMultistepScheduler])
def test_other_schedulers(tmp_path, scheduler):
    eager = stable_diffusion(tmp_path)
    eager.scheduler = scheduler.from_config(eager.scheduler.config)
    eager.set_progress_bar_config(disable=True)
    pipeline = pipeline_to_jax(copied(eager), latents_on_device=True)
    np.testing.assert_allclose(call(pipeline, steps=4), call(eager, steps=4), atol=1e-3)


def on_device(values):
    return DeviceTensor.of(jax.numpy.asarray(values, jax.numpy.float32))


def test_operators_give_what_pytorch_gives():
    a, b = np.arange(6.0, dtype=np.float32).reshape(2, 3), torch.full((2, 3), 0.5)
    x, eager = on_device(a), torch.from_numpy(a.copy())
    for function in (
        lambda x: x * b + 1,
        lambda x: b - x / 2,
        lambda x: torch.cat([x, x, b]).chunk(3)[0],
        lambda x: x[:, 1:].sum(dim=-1, keepdim=True),
        lambda x: x.to(torch.float32).reshape(3, 2).permute(1, 0),
        lambda x: torch.nn.functional.interpolate(x[None, None], scale_factor=2.0),
        lambda x: (x**2).clamp(1, 9).sqrt(),
        lambda x: torch.where(x > 2, x, torch.zeros_like(x)),
    ):
        found = function(x)
        assert isinstance(found, DeviceTensor)
        np.testing.assert_allclose(found.cpu().numpy(), function(eager).numpy(), rtol=1e-6)


def test_values_on_the_host():
    x = on_device([1.0, 2.0])
    assert type(x.cpu()) is torch.Tensor
    assert x.device == torch.device("cpu")
    assert x.tolist() == [1, 2]
    assert float(x.sum()) == 3
    assert np.asarray(x).tolist() == [1, 2]
    host = torch.zeros(2)
    host.add_(x)
    host[0] = x[1]
    assert host.tolist() == [2, 2]


def test_random_numbers_are_those_of_pytorch():
    torch.manual_seed(1)
    wanted = torch.randn_like(torch.zeros(4))
    torch.manual_seed(1)
    assert torch.equal(torch.randn_like(on_device(np.zeros(4))), wanted)


def test_writes_in_place():
    x = on_device([1.0, 2.0, 3.0])
    x += 1
    x[0] = 9.0
    assert x.tolist() == [9, 3, 4]
    part, turned = x[1:], x.reshape(3, 1).transpose(0, 1)
    part.mul_(2)
    assert x.tolist() == [9, 6, 8]
    x[1] = 5
    assert part.tolist() == [5, 8] and turned.tolist() == [[9, 5, 8]]
