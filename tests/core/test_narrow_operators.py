"""Operators over 16-bit floats beside float64: as near as PyTorch's own results."""

import jax
import numpy as np
import pytest
import torch
from view_checks import Module

from model_adapters.bridge.extract import extract_jax
from model_adapters.bridge.views import to_torch_tensor

F = torch.nn.functional
ROWS = np.random.default_rng(0).normal(size=(16, 300))
IMAGES = np.random.default_rng(1).normal(size=(2, 8, 9, 9)) * 3 + 20
PLACES = (torch.arange(16) % 2)[:, None].expand(16, 300)

CASES = {
    "cumsum": (lambda x: (x.cumsum(-1), x.cumsum(0)), ROWS),
    "cumprod": (lambda x: x[:, :9].cumprod(-1), ROWS),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x, -1), ROWS),
    "prod": (lambda x: x[:, :7].prod(-1), ROWS),
    "softmax": (lambda x: (x.softmax(0), x[None, None].softmax(-1), x.log_softmax(-1)), ROWS),
    "logaddexp": (lambda x: (torch.logaddexp(x, x * 2), torch.logaddexp2(x, x * 2)), ROWS),
    "glu": (lambda x: F.glu(x, -1), ROWS),
    "norms": (lambda x: (x.norm(3, 0), x.norm(1), torch.linalg.vector_norm(x, 1, 1)), ROWS),
    "scatter_add": (lambda x: x.new_zeros(2, 300).scatter_add(0, PLACES, x), ROWS),
    "scatter_reduce": (lambda x: x.new_zeros(2, 300).scatter_reduce(0, PLACES, x, "mean"), ROWS),
    "index_add": (lambda x: x.new_zeros(2, 300).index_add(0, PLACES[:, 0], x), ROWS),
    "group_norm": (lambda x: F.group_norm(x, 2), IMAGES),
    "batch_norm": (lambda x: F.batch_norm(x, x.new_ones(8), x.new_ones(8), x.new_ones(8), x.new_ones(8)), IMAGES),
    "instance_norm": (lambda x: F.instance_norm(x), IMAGES),
    "avg_pool": (lambda x: (F.avg_pool2d(x, 5, 1, 2), F.avg_pool2d(x, 3, ceil_mode=True)), IMAGES),
    "adaptive_avg_pool": (lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, 4)), IMAGES),
    "bicubic": (lambda x: F.interpolate(x, (7, 13), mode="bicubic"), IMAGES - 20),
}


def _listed(results):
    return list(results) if isinstance(results, tuple | list) else [results]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_are_rounded_once(name, dtype):
    function, values = CASES[name]
    x = torch.tensor(values).to(dtype)
    weights, extracted = extract_jax(Module(function))
    found = [to_torch_tensor(each) for each in jax.tree.leaves(extracted(weights, (x.clone(),)))]
    for one, other, exact in zip(found, _listed(function(x)), _listed(function(x.double())), strict=True):
        assert one.dtype == other.dtype == dtype
        unit = torch.finfo(dtype).eps * 2.0 ** exact.abs().clamp(min=torch.finfo(dtype).smallest_normal).log2().floor()
        errors, theirs = ((each - exact).abs() / unit for each in (one, other))
        assert errors.max() <= max(1.0, theirs.max())
