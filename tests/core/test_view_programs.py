"""Programs that write by indices, masks and parts through views, beside PyTorch; and operands that overlap."""

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from view_checks import Module, check

from model_adapters.bridge.extract import extract_jax
from model_adapters.bridge.views import to_torch_tensor
from model_adapters.errors import InvalidArgumentError

VIEWS = {
    "a turned part": lambda x: x[0].T,
    "axes exchanged": lambda x: x.transpose(0, 2),
    "a part of a part": lambda x: x.select(0, 1).narrow(1, 1, 3),
    "axes moved": lambda x: x.movedim((0, 1), (-1, 0)),
    "frames": lambda x: x.unfold(2, 2, 2),
    "a split": lambda x: x.split(2, 2)[1],
    "steps": lambda x: x[:, ::2, 1::2],
    "strides": lambda x: x.as_strided((2, 3), (12, 4), 1),
    "a diagonal": lambda x: x.diagonal(0, 1, 2),
    "imaginary parts": lambda x: torch.view_as_complex(x.view(2, 3, 2, 2)).imag,
    "negated imaginary parts": lambda x: torch.view_as_complex(x.view(2, 3, 2, 2)).conj().imag,
    "all in a row": lambda x: x.view(-1),
    "bits": lambda x: x.view(torch.int32),
}


def ones_of(part, *shape):
    return torch.ones(*shape, dtype=part.dtype)


def places_in(part, dim):
    return (torch.arange(part.numel()).view(part.shape) * 7) % part.shape[dim]


WRITES = {
    "index_put_": lambda p: p.index_put_((torch.tensor([0, 0]),), ones_of(p, 2, *p.shape[1:]) * 5),
    "index_put_ that adds": lambda p: p.index_put_(
        (torch.tensor([0, 0, -1]),), ones_of(p, 3, *p.shape[1:]) * 5, accumulate=True
    ),
    "index_put_ by a mask": lambda p: p.index_put_((p > 5,), ones_of(p, ())),
    "index_add_": lambda p: p.index_add_(0, torch.tensor([0, 0]), ones_of(p, 2, *p.shape[1:]), alpha=3),
    "index_copy_": lambda p: p.index_copy_(0, torch.tensor([1]), ones_of(p, 1, *p.shape[1:])),
    "index_fill_": lambda p: p.index_fill_(-1, torch.tensor([0, 1]), 3),
    "scatter_": lambda p: p.scatter_(-1, torch.ones((*p.shape[:-1], 1), dtype=torch.long), 4),
    "scatter_add_": lambda p: p.scatter_add_(0, places_in(p, 0), ones_of(p, *p.shape) * 4),
    "scatter_ that multiplies": lambda p: p.scatter_(0, places_in(p, 0), 4, reduce="multiply"),
    "scatter_reduce_ amax": lambda p: p.scatter_reduce_(0, places_in(p, 0), ones_of(p, *p.shape) * 4, "amax"),
    "scatter_reduce_ mean": lambda p: p.scatter_reduce_(
        0, places_in(p, 0), ones_of(p, *p.shape) * 4, "mean", include_self=False
    ),
    "masked_scatter_": lambda p: p.masked_scatter_(p > 5, torch.arange(30).to(p.dtype)),
    "put_ that adds": lambda p: p.put_(torch.tensor([0, 1, 0]), ones_of(p, 3), accumulate=True),
    "copy_ of itself turned": lambda p: p.copy_(p.flip(0)),
    "out= of its own rows": lambda p: torch.add(p[0], p[-1], out=p[0]),
    "rows in a loop": lambda p: [p[i].mul_(i + 2) for i in range(p.shape[0])],
    "all but the first of its rows": lambda p: [row.sub_(p[0]) for row in p.unbind(0)[1:]],
    "rows exchanged": lambda p: p.__setitem__(torch.tensor([0, 1]), p[torch.tensor([1, 0])]),
    "the last axis by a list": lambda p: p.__setitem__((..., [0, 1]), 1),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_through_views(name):
    """Each write through each view; every other one in a program."""

    def through(view):
        def run(x):
            x = x * 1
            before, part = x[0], view(x)
            WRITES[name](part)
            seen = [x * 1, before * 1, part * 1]
            x.add_(1)
            return *seen, x, part

        return run

    shift = [*WRITES].index(name)
    for place, view in enumerate([*VIEWS.values()][shift % 3 :: 3]):
        check(through(view), jitted=bool((place + shift) % 2))


class Rolling(torch.nn.Module):
    """Keeps the newest values in a buffer whose columns it moves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(3, 5))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.long))

    def forward(self, x):
        for column in x.view(-1, 3):
            self.kept[:, :-1] = self.kept[:, 1:]
            self.kept.T[-1].copy_(column)
            self.counts.index_add_(0, column.argmax()[None], torch.ones(1, dtype=torch.long))
            self.kept.view(-1).unfold(0, 5, 5).select(1, 0).mul_(0.5)
        return self.kept * 1, self.counts.float()


def test_a_buffer_that_is_moved_in_a_loop():
    x = torch.arange(12.0) % 7
    weights, function = extract_jax(Rolling())
    for found, expected in zip(jax.jit(function)(weights, (x.numpy(),)), Rolling()(x), strict=True):
        torch.testing.assert_close(to_torch_tensor(found), expected)


def refused(run, x):
    """Whether PyTorch has an error for it."""
    try:
        run(x.clone())
    except RuntimeError:
        return True
    return False


OPERATORS = {
    "add_": lambda target, operand: target.add_(operand),
    "copy_": lambda target, operand: target.copy_(operand),
    "item": lambda target, operand: target.__setitem__(..., operand),
    "out": lambda target, operand: torch.mul(operand, 2, out=target),
    "maximum": lambda target, operand: torch.maximum(operand, target * 2, out=target),
}


@given(st.sampled_from([*OPERATORS]), st.data())
@settings(max_examples=60, deadline=None)
def test_operands_that_overlap_are_refused_or_read_as_pytorch_does(name, data):
    """Two parts of one tensor, of one shape: what PyTorch refuses is refused; what is computed is what it computes."""
    places = st.tuples(*[st.sampled_from([(0, 1), (1, 1), (0, 2), (1, 2)])] * 2)
    (first, second), turned = (data.draw(places) for _ in range(2)), data.draw(st.booleans())
    shape = data.draw(st.sampled_from([(2, 2), (1, 3), (2, 1)]))

    def part(x, where):
        chosen = tuple(slice(a, a + step * n, step) for (a, step), n in zip(where, shape, strict=True))
        return x[chosen]

    def run(x):
        x = x * 1
        operand = part(x, second)
        OPERATORS[name](part(x, first), operand.T if turned and shape == (2, 2) else operand)
        return (x,)

    x = torch.arange(24.0).view(4, 6) + 1
    weights, function = extract_jax(Module(run))
    if refused(run, x):
        with pytest.raises(InvalidArgumentError, match="written before they are read"):
            function(weights, (x.numpy(),))
        return
    try:
        (found,) = function(weights, (x.numpy(),))
    except InvalidArgumentError as error:
        assert "written before they are read" in str(error)
        return
    torch.testing.assert_close(to_torch_tensor(found), run(x.clone())[0])


OVERLAPS = {
    "a column of itself": lambda x: x.sub_(x[..., :1]),
    "rows moved by one": lambda x: x[..., 1:].__setitem__(..., x[..., :-1]),
    "itself, turned": lambda x: x[0, :, :3].add_(x[0, :, :3].T),
    "scatter_add_ of itself": lambda x: x.scatter_add_(0, torch.zeros(2, 3, 4, dtype=torch.long), x),
    "index_add_ of itself": lambda x: x.index_add_(0, torch.tensor([0, 0]), x),
    "items of a list": lambda x: x.__setitem__([0, 1], x[:1]),
    "masked_scatter_ of itself": lambda x: x.masked_scatter_(x > 3, x),
    "a product into an operand": lambda x: x[..., :3].baddbmm_(x, x.mT),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_what_is_written_while_it_is_read_is_refused_by_name(name):
    weights, function = extract_jax(Module(lambda x: OVERLAPS[name](x * 1)))
    for call in (function, jax.jit(function)):
        with pytest.raises(InvalidArgumentError, match=r"_: expected operands that share no memory.*clone\(\)"):
            call(weights, (np.ones((2, 3, 4), np.float32),))


def test_parts_that_are_apart_or_read_first_are_written():
    def run(x):
        x = x * 1
        x[..., :-1] = x[..., 1:]
        x[0, :2] = x[1, 1:]
        x[1, [0, 2]] = x[0, :2]
        x.view(-1)[::2].copy_(x.view(-1)[1::2])
        x.mul_(x)
        torch.add(x, x, out=x)
        x[0].fill_(x[0, 0, 1])
        return (x,)

    check(run)


def test_a_source_of_too_few_elements_is_refused():
    weights, function = extract_jax(Module(lambda x: x.masked_scatter_(x > 0, x[0].clone())))
    with pytest.raises(InvalidArgumentError, match=r"at least 24 elements.*got 12"):
        function(weights, (np.ones((2, 3, 4), np.float32),))
