"""Arguments that PyTorch refuses are an error here too: error inputs of PyTorch's own tests, and others."""

import contextlib
import itertools
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from view_checks import Module

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.operator_parity.compare import UNSET, Call, all_operators
from model_adapters.bridge.views import to_jax_array, to_torch_tensor
from model_adapters.lowerings import argument_checks, install
from torchax_serve import InvalidArgumentError, UnsupportedModelError, extract_jax, to_jax

NARROW = {torch.int64: torch.int32, torch.float64: torch.float32, torch.complex128: torch.complex64}
WIDE = (torch.float64, torch.complex128)
"""Dtypes that JAX does not have: an error about them is none here."""
USUAL = [
    *("nn.functional.max_pool2d", "index_add", "gather", "isclose", "kthvalue", "multinomial"),
    *("scatter", "cat", "roll", "rot90", "masked_scatter", "logcumsumexp", "amax", "narrow_copy", "t"),
]


@pytest.fixture(scope="module")
def operators():
    all_operators()  # which prepares the import
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


def refused(function, *tensors):
    """What PyTorch raises; None if nothing."""
    try:
        with torch.no_grad():
            function(*(each.clone() for each in tensors))
    except Exception as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore")  # PyTorch's of its own samples
@pytest.mark.parametrize("name", USUAL)
def test_error_inputs_are_errors(name, operators):
    num_checked = check_error_inputs(operators[name])
    assert num_checked


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_all_error_inputs_are_errors(operators):
    for name, op in operators.items():
        if op.error_inputs_func is not None and name not in UNSET and name not in USUAL:
            check_error_inputs(op)


def check_error_inputs(op):
    """Checks all error inputs of an operator; returns how many PyTorch refuses."""
    num_checked = 0
    for error in op.error_inputs("cpu"):
        module = Call(op.op, error.sample_input)
        if any(each.dtype in WIDE for each in module.tensors) or refused(module, *module.tensors) is None:
            continue
        weights, function = extract_jax(module)
        with pytest.raises(Exception):  # noqa: B017  (of many kinds, as PyTorch's are)
            function(weights, tuple(module.tensors))
        num_checked += 1
    return num_checked


class Asked(TorchDispatchMode):
    """Asks the checks about each operator that PyTorch runs; `refused` are those that it runs all the same."""

    def __init__(self):
        super().__init__()
        self.refused = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [narrowed(each) for each in args], {name: narrowed(each) for name, each in (kwargs or {}).items()}
        with argument_checks.enabled():
            try:
                argument_checks.check(func, *given)
            except InvalidArgumentError as error:
                self.refused.add(str(error))
        return out


def narrowed(value):
    """A tensor as JAX has it, of 32 bits."""
    if isinstance(value, torch.Tensor):
        return value.to(NARROW.get(value.dtype, value.dtype))
    return [narrowed(each) for each in value] if type(value) is list else value


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_what_pytorch_takes_is_not_refused(operators):
    """Of all operators' samples; random integers, which it says it does not draw, are drawn by one."""
    install.install()
    num_asked = 0
    for name, op in operators.items():
        for dtype in (torch.float32, torch.int64):
            for sample in itertools.islice(op.sample_inputs("cpu", dtype), 8) if dtype in op.dtypes else ():
                with contextlib.suppress(Exception), Asked() as asked:
                    op.op(sample.input, *sample.args, **sample.kwargs)
                assert not asked.refused or name == "randn_like", (name, asked.refused)
                num_asked += 1
    assert num_asked > 4000


X = torch.rand(4, 6)
CALLS = {
    "sizes of a split": lambda x: x.split([2, 3], 1),
    "reflected padding": lambda x: F.pad(x[None], (7, 0), mode="reflect"),
    "circular padding": lambda x: F.pad(x[None], (0, 7), mode="circular"),
    "expand": lambda x: x.expand(3, 4, 7),
    "view": lambda x: x.view(5, 5),
    "matrices that do not fit": lambda x: x @ x,
    "products of two dtypes": lambda x: x @ x.T.bfloat16(),
    "a linear layer of two dtypes": lambda x: F.linear(x, x.long()),
    "narrow": lambda x: x.narrow(0, 3, 3),
    "unfold": lambda x: x.unfold(0, 5, 1),
    "floats as indices": lambda x: F.embedding(x, x),
    "floats as a mask": lambda x: x.masked_fill(x, 1.0),
    "floats as a condition": lambda x: torch.where(x, x, x),
    "cat of other shapes": lambda x: torch.cat([x, x.T]),
    "stack of other shapes": lambda x: torch.stack([x, x.T]),
    "an axis twice": lambda x: x.permute(0, 0),
    "an axis beyond": lambda x: x.softmax(3),
    "a norm of other axes": lambda x: F.layer_norm(x, (5,)),
    "channels of a convolution": lambda x: F.conv1d(x[None], x.new_ones(2, 3, 3)),
    "a bias of a transposed convolution": lambda x: F.conv_transpose1d(x[None], x.new_ones(4, 3, 2), x[0]),
    "padding below 0": lambda x: F.conv2d(x[None, None], x.new_ones(1, 1, 2, 2), padding=-1),
    "repeat of fewer axes": lambda x: x.repeat(2),
    "vectors of matrices": lambda x: torch.outer(x, x),
    "dot of other lengths": lambda x: torch.dot(x[0], x[:, 0]),
    "addmm of two dtypes": lambda x: torch.addmm(x.long()[:, :4], x, x.T),
    "a source of other axes": lambda x: x.index_add(0, torch.tensor([1]), x[:2]),
    "a source of another dtype": lambda x: x.index_copy(0, torch.tensor([1]), x[:1].long()),
    "a part of another shape": lambda x: torch.select_scatter(x, x[:, 0], 0, 1),
    "an order of complex numbers": lambda x: torch.complex(x, x).sort(),
    "results of another dtype": lambda x: torch.amax(x, 0, out=torch.empty_like(x[0], dtype=torch.int32)),
    "a part beyond the memory": lambda x: x.as_strided_scatter(x[:2, :2], (2, 2), (200, 200)),
    "floats for integers": lambda x: torch.addr(x.long(), x[:, 0].long(), x[0].long(), alpha=2.5),
    "a window beyond the array": lambda x: F.max_pool2d(x[None, None], 7),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_pytorch_refuses_is_refused_by_name(name):
    weights, function = extract_jax(Module(CALLS[name]))
    assert refused(CALLS[name], X) is not None
    with pytest.raises((RuntimeError, IndexError, ValueError, TypeError)):
        function(weights, (X.clone(),))


NUMBERS = {
    "fill_": lambda x, value: x.fill_(value),
    "an item": lambda x, value: (x.__setitem__(0, value), x)[1],
    "items of a mask": lambda x, value: (x.__setitem__(x > 3, value), x)[1],
    "masked_fill": lambda x, value: x.masked_fill(x > 3, value),
    "scatter": lambda x, value: x.scatter(0, torch.zeros(1, 4, dtype=torch.long), value),
    "clamp": lambda x, value: x.clamp(max=value),
    "clamp_min_": lambda x, value: x.clamp(0, 9).clamp_min_(value),
    "pad": lambda x, value: F.pad(x, (1, 1), value=value),
    "full_like": lambda x, value: torch.full_like(x, value),
    "new_full": lambda x, value: x.new_full((2,), value),
    "threshold": lambda x, value: F.threshold(x, 1, value),
    "power": lambda x, value: x**value,
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_numbers_that_a_dtype_does_not_hold_are_refused_as_in_pytorch(dtype):
    x = torch.arange(8).view(2, 4).to(dtype)
    values = (-1, 300, 2.5, -1e39) if dtype in (torch.uint8, torch.int8) else (70000, torch.finfo(torch.float32).min)
    for (name, change), value in itertools.product(NUMBERS.items(), values):
        weights, function = extract_jax(Module(lambda x, change=change, value=value: change(x * 1, value)))
        given = to_jax_array(x.clone())
        if refused(lambda x, change=change, value=value: change(x * 1, value), x) is not None:
            with pytest.raises((RuntimeError, ValueError, UnsupportedModelError)):
                function(weights, (given,))
            continue
        found = to_torch_tensor(function(weights, (given,)))
        torch.testing.assert_close(found, change(x * 1, value), equal_nan=True, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("pool", [torch.nn.MaxPool2d(7), torch.nn.AvgPool2d(7), torch.nn.AvgPool1d(7)], ids=str)
def test_a_window_beyond_its_array_is_an_error_in_every_function(pool):
    """XLA would end the process."""
    x = torch.ones((1, 2, 4) if isinstance(pool, torch.nn.AvgPool1d) else (1, 2, 4, 4))
    for module in (pool, to_jax(pool)):
        with pytest.raises(RuntimeError, match="too small"):
            module(x)


def test_the_message_is_pytorchs():
    weights, function = extract_jax(Module(lambda x: x.index_select(3, torch.tensor([0]))))
    with pytest.raises(InvalidArgumentError, match=r"PyTorch takes: an axis from -2 to 1, got 3"):
        function(weights, (X,))
    weights, function = extract_jax(Module(CALLS["sizes of a split"]))
    with pytest.raises(InvalidArgumentError, match="split_with_sizes expects split_sizes to sum exactly to 6"):
        function(weights, (X,))


def test_code_that_tries_gets_an_error_that_it_knows():
    def forward(x):
        try:
            return x.view(5, 5)
        except RuntimeError:
            return x.reshape(6, 4)

    weights, function = extract_jax(Module(forward))
    assert function(weights, (X,)).shape == (6, 4)
