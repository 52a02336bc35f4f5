"""Code that writes into tensors, on JAX beside PyTorch."""

import jax
import torch

from model_adapters.bridge.extract import extract_jax
from model_adapters.bridge.views import to_torch_tensor


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def check(function, x=None, *, jitted=True):
    """Compares what `function` returns of float32[2, 3, 4], or of `x`, with PyTorch."""
    x = torch.arange(24.0).view(2, 3, 4) + 1 if x is None else x
    expected = function(x.clone())
    weights, jax_function = extract_jax(Module(function))
    found = (jax.jit(jax_function) if jitted else jax_function)(weights, (x.numpy(),))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(to_torch_tensor(one), other.contiguous(), atol=1e-5, rtol=1e-5)
