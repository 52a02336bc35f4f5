"""Tensors that a forward makes without naming a device, and writes computed values into, beside PyTorch."""

import jax
import numpy as np
import pytest
import torch
from view_checks import Module, check

from model_adapters.bridge.extract import extract_jax
from model_adapters.errors import UnsupportedModelError


def items(x):
    y = torch.zeros(2, 5, 4)
    y[:, 1:4] = x
    y[:, 0] += x[:, 0]
    y[y > 20] = 0.0
    return (y,)


def items_of_rows(x):
    y = torch.zeros(2, 3, 4)
    for i in range(2):
        for j in range(3):
            y[i][j] = x[i, j] * 2
            y[i, j, 0] += 1
    return (y,)


def through_views(x):
    y = torch.ones(3, 4)
    y.t()[0] = x[0, :, 0]
    y.view(-1)[-1] = 7.0
    turned = torch.ones(4, 3).t()
    turned.mul_(x[0])
    return y, turned


def by_operators(x):
    y, places = torch.zeros(3, 4), torch.tensor([0, 1])
    y.copy_(x[0]).masked_fill_(x[0] > 3, 1.0)
    y.index_put_((places,), x[0, :2])
    y.index_add_(0, places, x[1, :2]).addmm_(x[0], x[1].t() @ x[1])
    y.scatter_(1, torch.tensor([[0], [1], [2]]), x[0, :, :1])
    y *= x[1]
    return (y,)


def by_out(x):
    y, wide, half = torch.empty(2, 3, 4), torch.zeros(2, 3, 8), torch.ones(4)
    torch.mul(half, 0.5, out=half)  # all on the host
    torch.mul(x, 2, out=y)
    torch.add(x, 1, out=wide[..., ::2])
    values, places = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long)
    torch.max(x, 2, out=(values, places))
    kept = torch.empty(2, 3)
    torch.linalg.svd(x, False, out=(torch.empty(2, 3, 3), kept, torch.empty(2, 3, 4)))
    return y, wide, values, places * 1.0, kept, x * half


def of_values_of_the_host(x):
    y = torch.arange(12.0).view(3, 4) + 1
    y[0] = x[0, 0]
    numbers = torch.tensor([1.0, 2.0, 3.0, 4.0])
    numbers[0] = x[0, 0, 0]
    chosen = torch.zeros(3, dtype=torch.long)
    chosen[1] = x[0].argmax()
    return y, numbers, chosen * 1.0


def under_other_names(x):
    y = torch.zeros(3, 4)
    same, kept, before = y, {"rows": [y]}, y + 1

    def write(target):
        target.add_(x[0])

    write(kept["rows"][0])
    same += 1
    return y, same, before, y.reshape(-1) @ y.view(-1), y.t() @ y


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize(
    "run", [items, items_of_rows, through_views, by_operators, by_out, of_values_of_the_host, under_other_names]
)
def test_computed_values_are_written(run, jitted):
    check(run, jitted=jitted)


KEPT = torch.ones(3, 4)


def with_another_view(x):
    y = torch.zeros(3, 4)
    row = y[0]
    y[0] = x[0, 0]
    return row


@pytest.mark.parametrize("run", [lambda x: KEPT.add_(x[0]), lambda x: KEPT[0].copy_(x[0, 0]), with_another_view])
def test_what_outlives_the_forward_or_has_other_views_is_refused(run):
    weights, function = extract_jax(Module(run))
    for call in (function, jax.jit(function)):
        with pytest.raises(UnsupportedModelError, match=r"into a tensor on the host.*new_zeros"):
            call(weights, (np.ones((2, 3, 4), np.float32),))
    assert type(KEPT) is torch.Tensor and KEPT.sum() == 12
