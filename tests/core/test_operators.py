"""A few operators over PyTorch's own samples of their arguments; benchmarks/operators.py compares all."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.operator_parity.compare import REFUSED, SAME, all_operators, check_operator

SAMPLE = (
    "allclose arange cdist cholesky cholesky_inverse cholesky_solve ldexp lu_unpack native_layer_norm searchsorted "
    "linalg.solve nn.functional.conv_transpose2d"
)


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
