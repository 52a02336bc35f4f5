"""Writes by boolean masks, known while the program is made or traced, beside PyTorch."""

import jax
import pytest
import torch

from model_adapters.bridge.extract import extract_jax
from model_adapters.bridge.views import to_torch_tensor
from model_adapters.lowerings import constant_folding

MASK = [True, False, True, True, False]
NUM_SET = sum(MASK)
WIDTH = 3


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, rows, mask):
        return self.function(x * 1, rows, mask)


WRITES = {
    "rows": lambda x, rows, mask: x.__setitem__(mask, rows),
    "one row": lambda x, rows, mask: x.__setitem__(mask, rows[0]),
    "one row, two axes": lambda x, rows, mask: x.__setitem__(mask, rows[:1]),
    "a column": lambda x, rows, mask: x.__setitem__(mask, rows[:, :1]),
    "a number": lambda x, rows, mask: x.__setitem__(mask, 7),
    "index_put_": lambda x, rows, mask: x.index_put_((mask,), rows),
    "index_put_ that adds": lambda x, rows, mask: x.index_put_((mask,), rows, accumulate=True),
    "masked_scatter_": lambda x, rows, mask: x.masked_scatter_(mask[:, None], rows),
    "masked_fill_": lambda x, rows, mask: x.masked_fill_(mask[:, None], -2.0),
    "of all elements": lambda x, rows, mask: x.__setitem__(mask[:, None].expand(5, WIDTH), rows.reshape(-1)),
    "into a view": lambda x, rows, mask: x.t().__setitem__(mask[None].expand(WIDTH, 5), rows.reshape(-1)),
    "into a part": lambda x, rows, mask: x[:, 1:].__setitem__(mask, rows[:, 1:]),
}


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "traced"])
@pytest.mark.parametrize("name", WRITES)
def test_rows_go_where_the_mask_is_set(name, is_known):
    def run(x, rows, mask):
        before = x[1:]
        WRITES[name](x, rows, torch.tensor(MASK) if is_known else mask)
        return x, before * 1

    x, rows = torch.arange(5.0 * WIDTH).view(5, WIDTH), -1 - torch.arange(float(NUM_SET * WIDTH)).view(-1, WIDTH)
    given = x, rows, torch.tensor(MASK)
    expected = Module(run)(*given)
    weights, function = extract_jax(Module(run))
    with constant_folding.enabled():
        found = jax.jit(function)(weights, tuple(each.numpy() for each in given))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(to_torch_tensor(one), other)


def test_the_program_of_a_traced_mask_has_no_cumulative_sum():
    def run(x, rows, mask):
        x[mask] = rows
        return x

    weights, function = extract_jax(Module(run))
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((64, 4), "f4"), ((9, 4), "f4"), ((64,), "bool"))]
    assert "cumsum" not in str(jax.make_jaxpr(function)(weights, tuple(shapes)))
