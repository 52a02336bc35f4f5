"""Strides as PyTorch has them: what code reads of them, and whether reshape gives a view of an operator's result."""

import math
import random

import pytest
import torch
from view_checks import Module, check

from model_adapters.bridge.extract import extract_jax
from model_adapters.errors import UnsupportedModelError

functional = torch.nn.functional
RESULTS = {
    "relu": lambda x: x.relu(),
    "add": lambda x: x + x[0],
    "add of a constant": lambda x: x + torch.arange(3.0),
    "where": lambda x: torch.where(x > 5, x, 1.0),
    "empty_like": lambda x: torch.empty_like(x).copy_(x),
    "clone": lambda x: x.clone(),
    "clone in C order": lambda x: x.clone(memory_format=torch.contiguous_format),
    "to": lambda x: x.to(torch.bfloat16).float(),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "sum": lambda x: x.sum(0, keepdim=True),
    "amax": lambda x: x.amax(1),
    "softmax": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(2, 1).values,
    "tril": lambda x: x.tril(),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 1),
    "lookup": lambda x: x[torch.tensor([1, 0])],
    "index_select": lambda x: x.index_select(1, torch.tensor([1, 0])),
    "gather": lambda x: x.gather(1, torch.zeros(3, 1, 3, dtype=torch.long)),
    "take_along_dim": lambda x: torch.take_along_dim(x, torch.zeros(1, 1, 3, dtype=torch.long), 1),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "layer_norm": lambda x: functional.layer_norm(x, (3,)),
    "group_norm": lambda x: functional.group_norm(x, 3),
    "gelu": lambda x: functional.gelu(x),
    "linear": lambda x: functional.linear(x, torch.ones(2, 3)),
    "conv1d": lambda x: functional.conv1d(x, torch.ones(2, x.shape[1], 1)),
    "pad": lambda x: functional.pad(x, (1, 1)),
    "interpolate": lambda x: functional.interpolate(x, scale_factor=2.0),
    "matmul": lambda x: x @ x.mT,
    "einsum": lambda x: torch.einsum("abc,abd->dca", x, x),
    "cdist": lambda x: torch.cdist(x, x),
    "inv": lambda x: torch.linalg.inv(x @ x.mT + 99 * torch.eye(x.shape[1])),
    "solve": lambda x: torch.linalg.solve(x @ x.mT + 99 * torch.eye(x.shape[1]), x),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + 99 * torch.eye(x.shape[1])),
    "attention": lambda x: functional.scaled_dot_product_attention(*[(x / 9)[None].transpose(1, 2)] * 3),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", RESULTS)
def test_a_write_into_what_reshape_gives(name, turned):
    def run(x):
        turns = (1, 0, 2) if name == "attention" else (2, 0, 1)
        found = RESULTS[name](x.permute(turns) if turned else x)
        for part in (found.reshape(-1), found.transpose(0, 1).contiguous(), found.flatten(1)):
            part[:1] += 3
        return (found,)

    check(run, torch.arange(27.0).view(3, 3, 3))


def test_strides_are_told():
    def run(x):
        turned, part = x.permute(2, 0, 1), x[1:, :, ::2]
        told = [*turned.stride(), turned.stride(-1), *part.stride(), part.storage_offset(), x.stride(0)]
        are = [turned.is_contiguous(), part.is_contiguous(), x[1:].is_contiguous(), turned.relu().is_contiguous()]
        images = x[None].permute(0, 3, 1, 2)
        are += [images.is_contiguous(memory_format=torch.channels_last)]
        are += [x[None].contiguous(memory_format=torch.channels_last).is_contiguous()]
        again = turned.as_strided(turned.size(), turned.stride())
        again[0] = 5
        return x * torch.tensor([*told, *are]).float().sum(), again

    check(run)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 3), (3, 3), (3, 1), (2, 3), (1, 3, 3)])
def test_systems_of_equations(shape, left):
    def run(x):
        matrices = x[:, :, :3] @ x[:, :, :3].mT + 9 * torch.eye(3)
        right = x.reshape(-1)[: math.prod(shape)].view(shape) / 9
        return torch.linalg.solve(matrices, right, left=left or right.shape != (2, 3, 3)), matrices

    check(run, torch.sin(torch.arange(24.0)).view(2, 3, 4))


def test_strides_that_a_library_chooses_are_refused():
    def run(x):
        found = torch.view_as_real(torch.fft.fft(x, dim=0))
        found.reshape(-1).add_(1)
        return found

    weights, function = extract_jax(Module(run))
    with pytest.raises(UnsupportedModelError, match="use view or clone"):
        function(weights, (torch.ones(2, 3, 4).numpy(),))


PARTS = {
    "transpose": lambda x, r: x.transpose(r.randrange(x.dim()), 0),
    "flatten": lambda x, r: x.flatten(0, min(1, x.dim() - 1)),
    "reshape": lambda x, r: x.reshape(-1),
    "contiguous": lambda x, r: x.contiguous(),
    "unsqueeze": lambda x, r: x.unsqueeze(r.randrange(x.dim() + 1)),
    "squeeze": lambda x, r: x.squeeze(),
    "narrow": lambda x, r: x.narrow(-1, 1, x.shape[-1] - 1),
    "chunk": lambda x, r: x.chunk(2, 0)[-1],
    "step": lambda x, r: x[..., ::2],
    "select": lambda x, r: x.select(r.randrange(x.dim()), 0),
    "diagonal": lambda x, r: x.diagonal(r.choice([-1, 0, 1]), -1, 0),
    "unfold": lambda x, r: x.unfold(0, x.shape[0], 1),
    "detach": lambda x, r: x.detach(),
    "relu": lambda x, r: x.relu(),
}
CHANGES = {
    "add_": lambda x: x.add_(2),
    "masked_fill_": lambda x: x.masked_fill_(x > 9, -1.0),
    "mask": lambda x: x.__setitem__(x > 12, 0.5),
    "copy_": lambda x: x.copy_(x.flip(0)),
    "out": lambda x: torch.sub(x, 1, out=x),
    "first": lambda x: x[0].mul_(3),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([0]), 4.0),
}


@pytest.mark.parametrize("seed", range(16))
def test_chains_of_views_and_writes(seed):
    """Views of views and copies, each of which may be written; all are read at the end."""

    def run(x):
        r, made = random.Random(seed), [x * 1]
        for _ in range(12):
            chosen = r.choice(made)
            if chosen.dim() and r.random() < 0.6:
                try:
                    part = PARTS[r.choice([*PARTS])](chosen, r)
                except (RuntimeError, IndexError, ValueError):  # the shape has no such part
                    continue
                made += [part] if part.numel() else []
            elif chosen.dim():
                CHANGES[r.choice([*CHANGES])](chosen)
        return made

    check(run, jitted=bool(seed % 2))
