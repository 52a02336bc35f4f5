"""A few operators over PyTorch's own samples of their arguments; benchmarks/operators.py compares all."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.operator_parity.compare import REFUSED, SAME, all_operators, check_operator
from model_adapters.lowerings import linear_algebra
from pytree_registry.torchax_import import REMOVED

SAMPLE = (
    "allclose arange cdist cholesky_inverse cholesky_solve digamma ldexp lu_unpack native_layer_norm searchsorted "
    "linalg.solve nn.functional.conv_transpose2d max_pool2d_with_indices_backward linspace.tensor_overload"
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
