"""Small layers in a list, compared with eager PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import jax
import numpy as np
import torch

from model_adapters.bridge.extract import extract_jax
from model_adapters.jaxpr.interpreter import SHARED

WIDTH = 8


class Layer(torch.nn.Module):
    """Two products, with what a test changes of them."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.full((WIDTH,), 0.1 * (index + 1)))

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return x + self.second(torch.tanh(self.first(x))) + self.shift


class Stack(torch.nn.Module):
    """Layers one after the other."""

    def __init__(self, kind: type[Layer], number: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([kind(index) for index in range(number)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def compared(module: torch.nn.Module, tolerance: float = 1e-5) -> list[Any]:
    """Compares the module with eager PyTorch; returns the programs of its shared calls."""
    x = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)
    with torch.no_grad():
        expected = copy.deepcopy(module).eval()(x.clone())
    weights, function = extract_jax(module.eval())
    traced = jax.jit(function).trace(weights, (x.numpy(),))
    found = traced.lower().compile()(weights, (x.numpy(),))
    np.testing.assert_allclose(np.asarray(found), expected.numpy(), rtol=tolerance, atol=tolerance)
    return [each.params["jaxpr"] for each in traced.jaxpr.eqns if str(each.params.get("name")).startswith(SHARED)]
