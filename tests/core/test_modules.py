"""`to_jax` of modules of any library, functions and classes: beside PyTorch, and what is refused by name."""

import itertools
import logging
import re

import jax
import pytest
import torch

from torchax_serve import InvalidArgumentError, UnsupportedModelError, extract_jax, lower, to_jax


def layers(*sizes):
    return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def convolutions():
    parts = (torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
    return torch.nn.Sequential(*parts, torch.nn.Flatten(), torch.nn.Linear(8, 4))


CASES = {
    "convolutions": (convolutions, lambda: [torch.randn(2, 3, 16, 16)]),
    "lstm": (lambda: torch.nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True), lambda: [torch.randn(2, 5, 8)]),
    "gru": (lambda: torch.nn.GRU(8, 16), lambda: [torch.randn(5, 2, 8), torch.randn(1, 2, 16)]),
    "transformer": (
        lambda: torch.nn.Transformer(32, 4, 1, 1, 64, batch_first=True),
        lambda: [torch.randn(2, 7, 32), torch.randn(2, 5, 32)],
    ),
    "embedding bag": (lambda: torch.nn.EmbeddingBag(10, 4), lambda: [torch.tensor([[1, 2], [3, 4]])]),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_pytorch(name):
    torch.manual_seed(0)
    make, inputs = CASES[name]
    module, args = make().eval(), inputs()
    with torch.no_grad():
        expected = jax.tree.leaves(module(*args))
    found = jax.tree.leaves(to_jax(module)(*args))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_changes_of_the_module_count():
    module, x = to_jax(layers(4, 4, 2)), torch.randn(3, 4)
    module(x)
    with torch.no_grad():
        module[1].weight.mul_(2)
        module[0] = torch.nn.Identity()
        expected = torch.nn.functional.linear(x, module[1].weight, module[1].bias)
    torch.testing.assert_close(module(x), expected)
    assert to_jax(module) is module


def test_gradients_are_those_of_pytorch():
    module, x = layers(4, 8, 1), torch.randn(3, 4)
    (module(x) ** 2).mean().backward()
    weights, function = extract_jax(module)
    found = jax.jit(jax.grad(lambda weights: (function(weights, (x,)) ** 2).mean()))(weights)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(torch.tensor(found[name].tolist()), parameter.grad, rtol=1e-4, atol=1e-5)


def test_functions_and_classes_run_on_jax():
    @to_jax
    def product(a, b, *, scale):
        return a @ b * scale

    assert product(torch.ones(2, 3), torch.ones(3, 2), scale=2.0).tolist() == [[6, 6], [6, 6]]
    weight = torch.ones(2)
    with pytest.raises(InvalidArgumentError, match="got one that reads weight, a Tensor; pass it as an argument"):
        to_jax(lambda x: x * weight)

    @to_jax
    class Net(torch.nn.Module):
        def __init__(self, size):
            super().__init__()
            self.linear = torch.nn.Linear(size, 1)

        def forward(self, x):
            return self.linear(x)

    net = Net(3)
    assert isinstance(net, Net) and hasattr(net, "_jax_runtime")
    x = torch.ones(2, 3)
    torch.testing.assert_close(net(x), torch.nn.functional.linear(x, net.linear.weight, net.linear.bias))
    with pytest.raises(InvalidArgumentError, match=r"expected a class of torch\.nn\.Module, got int"):
        to_jax(int)


class Keeps(torch.nn.Module):
    """Keeps a table that is computed once, and, if asked to, its last result."""

    def __init__(self, adds):
        super().__init__()
        self.adds, self.table, self.last = adds, None, None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(x.shape[-1], device=x.device) * 2.0
        found = x + self.table
        if self.adds:
            found = found if self.last is None else found + self.last
            self.last = found
        return found


def test_a_kept_tensor_is_noted_unless_it_changes_the_next_result(caplog):
    with caplog.at_level(logging.WARNING, logger="torchax_serve"):
        assert to_jax(Keeps(adds=False))(torch.ones(2)).tolist() == [1, 3]
    assert "Keeps.forward sets table in PyTorch, and not on JAX" in caplog.text
    with pytest.raises(UnsupportedModelError, match="keeps tensors in last, table, which change its next result"):
        to_jax(Keeps(adds=True))(torch.ones(2))


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x):
        self.number += 1
        return x * self.number


class Branches(torch.nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class Drops(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.dropout(x, 0.5, training=True)


class NoForward(torch.nn.Module):
    pass


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (Counts(), UnsupportedModelError, "Counts writes into its own weights (number)"),
        (Branches(), UnsupportedModelError, "got one that reads a value (test_modules.py:"),
        (Drops(), UnsupportedModelError, "Drops.forward draws random numbers"),
        (NoForward(), InvalidArgumentError, "NoForward: expected a module with a forward"),
        (torch.nn.Linear(2, 2).double(), UnsupportedModelError, "got float64; call model.float() first"),
    ],
)
def test_what_a_program_cannot_do_is_named(module, error, message):
    with pytest.raises(error, match=re.escape(message)):
        to_jax(module)(torch.ones(2))


class Described(torch.nn.Module):
    def forward(self, x, name):
        return {"sum": x.sum(), "name": name, "rows": x.shape[0], "scale": 0.5, "is_new": True, "none": None}


def test_results_keep_what_is_no_tensor():
    module = to_jax(Described())
    for rows in (2, 3, 2):
        found = module(torch.ones(rows, 2), "a")
        assert found.pop("sum").item() == 2 * rows
        assert found == {"name": "a", "rows": rows, "scale": 0.5, "is_new": True, "none": None}
        assert type(found["is_new"]) is bool and type(found["rows"]) is int


def test_pytorchs_own_errors_stay():
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        to_jax(torch.nn.Linear(3, 2))(torch.ones(1, 4))


def test_operators_without_a_lowering_are_listed_and_can_be_given_one():
    @torch.library.custom_op("tests::first", mutates_args=())
    def first(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    @torch.library.custom_op("tests::second", mutates_args=())
    def second(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    class Both(torch.nn.Module):
        def forward(self, x):
            return torch.ops.tests.second(torch.ops.tests.first(x, 3.0))

    listed = r"got tests::first \(test_modules.py:\d+\), tests::second \(test_modules.py:\d+\); write them with others"
    with pytest.raises(UnsupportedModelError, match=listed):
        to_jax(Both())(torch.ones(2))
    lower("tests::first")(lambda x, factor: x * factor)
    lower(torch.ops.tests.second)(lambda x: x + 1)
    assert to_jax(Both())(torch.ones(2)).tolist() == [4, 4]
    with pytest.raises(InvalidArgumentError, match="expected the name of one of PyTorch"):
        lower("tests::third")
