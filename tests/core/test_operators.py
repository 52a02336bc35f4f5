"""A few operators over PyTorch's own samples of their arguments; benchmarks/operators.py compares all."""

import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.operator_parity.compare import REFUSED, SAME, all_operators, check_operator
from model_adapters.lowerings import linear_algebra
from pytree_registry.torchax_import import REMOVED
from torchax_serve import extract_jax

SAMPLE = (
    "allclose arange cdist cholesky_inverse cholesky_solve digamma ldexp lu_unpack native_layer_norm searchsorted "
    "linalg.solve linalg.householder_product nn.functional.conv_transpose2d max_pool2d_with_indices_backward "
    "nn.functional.adaptive_max_pool1d nn.functional.adaptive_max_pool2d nn.functional.adaptive_max_pool3d "
    "linspace.tensor_overload"
) + (" cholesky" if hasattr(torch.ops.aten, "cholesky") else "")
"""torch has no `cholesky` beside that of ``torch.linalg`` from 2.14 on."""


@pytest.fixture(scope="module")
def operators():
    return all_operators()


@pytest.mark.filterwarnings("ignore")  # PyTorch's of its own samples
@pytest.mark.parametrize("name", SAMPLE.split())
def test_an_operator_computes_as_pytorch_does(name, operators):
    counts, messages = check_operator(operators[name], max_samples=2, max_gradients=1)
    assert set(counts) == {SAME}, messages


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.norm(dim=1),
        lambda x: torch.atan2(x[:, 0], x[:, 1]),
        lambda x: torch.linalg.vector_norm(x, dim=(0, 1)),
        lambda x: x.clamp(min=0, max=2),
        lambda x: x.clamp_min(2),
        lambda x: torch.clamp(x, torch.tensor([0.0, 1.0]), torch.tensor([0.5, 2.0])),
    ],
)
def test_gradients_at_corners_are_those_of_pytorch(function):
    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    x = torch.tensor([[0.0, 0.0], [1.0, 2.0], [-1.0, 3.0], [float("nan"), 0.0]], requires_grad=True)
    expected = function(x[:3])
    expected.sum().backward()
    weights, on_jax = extract_jax(Module())
    found, gradient = jax.value_and_grad(lambda x: on_jax(weights, (x,)).sum())(x.detach()[:3].numpy())
    np.testing.assert_allclose(found, expected.sum().item(), rtol=1e-6)
    np.testing.assert_allclose(gradient, x.grad[:3], rtol=1e-6)
    np.testing.assert_array_equal(on_jax(weights, (x.detach(),)), function(x.detach()).numpy())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_several_sizes(mode):
    torch.manual_seed(0)
    module = torch.nn.EmbeddingBag(9, 4, mode=mode, padding_idx=2, include_last_offset=True)
    indices, starts = torch.tensor([1, 2, 8, 3, 3, 2]), torch.tensor([0, 3, 3, 5, 6])
    expected = module(indices, starts)
    (expected**2).sum().backward()
    weights, function = extract_jax(module)
    np.testing.assert_allclose(function(weights, (indices, starts)), expected.detach(), rtol=1e-5)
    found = jax.grad(lambda weights: (function(weights, (indices, starts)) ** 2).sum())(weights)
    np.testing.assert_allclose(found["weight"], module.weight.grad, rtol=1e-5)


def test_what_jax_has_for_a_part_of_the_numbers_is_refused(operators):
    counts, messages = check_operator(operators["polygamma.polygamma_n_2"], max_samples=1, max_gradients=0)
    assert set(counts) == {REFUSED} and "expected n=0, got" in messages[REFUSED]


def test_what_a_newer_torch_has_removed_keeps_no_other_operator_from_its_lowering(monkeypatch):
    class Newer:
        def __getattr__(self, name):
            if name in REMOVED:
                raise AttributeError(name)
            return getattr(torch.ops.aten, name)

    newer = SimpleNamespace(ops=SimpleNamespace(aten=Newer()), cdist=torch.cdist, linalg=torch.linalg)
    monkeypatch.setattr(linear_algebra, "torch", newer)
    found = []
    monkeypatch.setattr(linear_algebra, "set_lowering", lambda operator, function: found.append(operator))
    linear_algebra.install()
    assert {torch.ops.aten.cholesky_solve, torch.linalg.solve, torch.cdist} <= set(found)
    assert not any(str(each) == "aten.cholesky" for each in found)
