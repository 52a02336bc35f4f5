"""Torch operators as they are lowered, against torch."""

import jax
import numpy as np
import pytest
import torch

from model_adapters.bridge.extract import extract_jax
from model_adapters.bridge.host_arrays import to_jax_zero_copy
from model_adapters.lowerings import install

install.install()


class Calls(torch.nn.Module):
    """A module whose forward is `function`."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def lowered(function, *tensors):
    """`function` of torch tensors, run by JAX under jit."""
    weights, call = extract_jax(Calls(function))
    return np.asarray(jax.jit(call)(weights, tuple(to_jax_zero_copy(x) for x in tensors)))


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


REDUCTIONS = {
    "mean of all": lambda x: x.mean(),
    "mean of the last": lambda x: x.mean(-1),
    "mean, kept": lambda x: x.pow(2).mean(-1, keepdim=True),
    "mean of two": lambda x: x.mean((0, 2)),
    "mean of the first": lambda x: x.mean(0),
    "sum of all": lambda x: x.sum(),
    "sum of the last": lambda x: x.sum(dim=-1),
    "sum, kept": lambda x: x.sum(2, keepdim=True),
    "sum of the first": lambda x: x.sum(0),
    "sum in a dtype": lambda x: x.sum(-1, dtype=torch.float32),
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax of rows": lambda x: torch.softmax(x[0], -1),
    "softmax of the first": lambda x: torch.softmax(x, 0),
    "softmax in a dtype": lambda x: torch.softmax(x[0], dim=-1, dtype=torch.float32),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "layer norm of two": lambda x: torch.nn.functional.layer_norm(x, x.shape[-2:], x[0] * 2, x[1]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name, dtype):
    x, function = numbers(3, 5, 70, dtype=dtype), REDUCTIONS[name]
    got, expected = lowered(function, x), function(x)
    assert str(got.dtype) == str(expected.dtype).removeprefix("torch.")
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[expected.dtype]
    np.testing.assert_allclose(got.astype(float), expected.double().numpy(), rtol=rtol, atol=rtol)


def test_integers_are_summed_as_such():
    x = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    np.testing.assert_array_equal(lowered(lambda x: x.sum(-1), x), x.sum(-1).numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_is_normed_the_same_to_the_last_bit_whatever_is_beside_it(dtype):
    x, weight = numbers(33, 1024, dtype=dtype), numbers(1024, dtype=dtype)

    def rms_norm(x, weight):
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    for function in (rms_norm, lambda x, weight: torch.nn.functional.layer_norm(x, (1024,), weight)):
        together = lowered(function, x, weight)
        for rows in (1, 2, 8, 31):
            np.testing.assert_array_equal(lowered(function, x[:rows].contiguous(), weight), together[:rows])
