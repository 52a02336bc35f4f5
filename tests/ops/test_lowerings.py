"""Torch operators as they are lowered, against torch."""

import jax
import numpy as np
import pytest
import torch

from model_adapters import bridge, lowerings
from model_adapters.arrays import share_with_jax

lowerings.install()


class Calls(torch.nn.Module):
    """A module whose forward is `function`."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def lowered(function, *tensors):
    """`function` of torch tensors, run by JAX under jit."""
    weights, call = bridge.extract_jax(Calls(function))
    return np.asarray(jax.jit(call)(weights, tuple(share_with_jax(x) for x in tensors)))


def numbers(*shape, dtype=torch.float32):
    return torch.tensor(np.random.default_rng(len(shape)).standard_normal(shape), dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2])
def test_cat(dim):
    a, b = numbers(2, 3, 4, 6), numbers(2, 3, 4, 6) + 1

    def joined(a, b):
        return torch.cat((-b, a), dim=dim)

    np.testing.assert_array_equal(lowered(joined, a, b), joined(a, b).numpy())


def test_cat_of_parts_of_other_sizes_and_dtypes_and_of_nothing():
    a, b, nothing = numbers(2, 3, 4, 6), numbers(2, 3, 4, 1).to(torch.bfloat16), torch.zeros(0)

    def joined(a, b, nothing):
        return torch.cat([a, nothing, b], -1)

    np.testing.assert_array_equal(lowered(joined, a, b, nothing), joined(a, b, nothing).numpy())
    assert lowered(lambda x: torch.cat([x, x]), nothing).shape == (0,)


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_activations_round_once(name):
    x = numbers(64, 33, dtype=torch.bfloat16) * 4
    function = getattr(torch.nn.functional, name)
    np.testing.assert_allclose(lowered(function, x).astype(float), function(x.double()).numpy(), rtol=2**-8, atol=1e-6)
