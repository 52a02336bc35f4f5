"""Writes in place into tensors that share memory, beside PyTorch: views of all kinds, copies, bases written later."""

import copy
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from view_checks import Module, check

from model_adapters.bridge.extract import extract_jax
from model_adapters.bridge.views import computing, to_torch_tensor
from model_adapters.errors import InvalidArgumentError, UnsupportedModelError
from torchax_serve import to_jax

VIEWS = {
    "view": lambda x: x.view(4, 6),
    "view_as": lambda x: x.view_as(torch.zeros(6, 4)),
    "reshape": lambda x: x.reshape(6, 4),
    "flatten": lambda x: x.flatten(1),
    "ravel": lambda x: x.ravel(),
    "unflatten": lambda x: x.unflatten(0, (2, 1)),
    "transpose": lambda x: x.transpose(0, 2),
    "swapaxes": lambda x: x.swapaxes(1, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "movedim": lambda x: x.movedim(0, -1),
    "mT": lambda x: x.mT,
    "t": lambda x: x[0].t(),
    "T": lambda x: x[1].T,
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "select": lambda x: x.select(1, 2),
    "integer": lambda x: x[1],
    "integer tensor": lambda x: x[torch.tensor(1)],
    "slices": lambda x: x[:, 1:, ::2],
    "ellipsis": lambda x: x[..., None, 3],
    "slice of a slice": lambda x: x[1:][0][1:],
    "narrow": lambda x: x.narrow(2, 1, 2),
    "chunk": lambda x: x.chunk(2, -1)[1],
    "split": lambda x: x.split(2, 1)[1],
    "split_with_sizes": lambda x: x.split([1, 3], 2)[1],
    "tensor_split": lambda x: torch.tensor_split(x, 3, 1)[1],
    "hsplit": lambda x: x.hsplit(3)[2],
    "vsplit": lambda x: x.vsplit(2)[0],
    "unbind": lambda x: x.unbind(1)[2],
    "rows": lambda x: list(x)[1],
    "diagonal": lambda x: x.diagonal(1, 1, 2),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "as_strided": lambda x: x.as_strided((2, 3), (12, 4), 1),
    "as_strided of a part": lambda x: x[1].as_strided((2, 2), (4, 1)),
    "as_strided of a turned part": lambda x: x[1].t().as_strided((2, 2), (4, 1)),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(torch.float32),
    "expand of nothing": lambda x: x.expand(2, 3, 4),
    "atleast_3d": lambda x: torch.atleast_3d(x[0]),
    "view_as_complex": lambda x: torch.view_as_complex(x.view(2, 3, 2, 2)).real,
    "imag": lambda x: torch.view_as_complex(x.view(2, 3, 2, 2)).imag,
    "conj": lambda x: torch.view_as_real(torch.view_as_complex(x.view(2, 3, 2, 2)).conj().resolve_conj()),
    "turned twice": lambda x: x.transpose(0, 1).transpose(0, 1).view(-1),
    "turned and flattened": lambda x: x.transpose(0, 1).reshape(-1),
    "turned and contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "turned, added to, flattened": lambda x: (x.transpose(0, 1) + 1).reshape(-1),
    "turned and flattened in part": lambda x: x.permute(1, 2, 0).flatten(0, 1),
    "clone": lambda x: x.clone(),
    "by a list": lambda x: x[[1]],
    "by a mask": lambda x: x[torch.tensor([True, False])],
    "repeat": lambda x: x.repeat(1, 1, 1),
    "cpu": lambda x: x.cpu(),
    "unsafe_chunk": lambda x: x.unsafe_chunk(2, 0)[1],
    "an operator's overloads": lambda x: torch.ops.aten.alias(x),
    "one of its overloads": lambda x: torch.ops.aten.select(x, 1, 1),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[:1])[0],
    "adjoint": lambda x: x.adjoint(),
    "type": lambda x: x.type(torch.float32),
    "einsum that permutes": lambda x: torch.einsum("bij->jbi", x),
    "einsum that changes nothing": lambda x: torch.einsum("bij", x),
    "einsum of a diagonal": lambda x: torch.einsum("bii->bi", x[..., :3]),
    "einsum of an ellipsis": lambda x: torch.einsum("b...->...b", [x]),
    "einsum by numbers": lambda x: torch.einsum(x, [0, 1, 2], [2, 0, 1]),
    "einsum that sums": lambda x: torch.einsum("bij->bj", x),
    "to that copies": lambda x: x.to(torch.float32, copy=True),
    "to that may copy": lambda x: x.to("cpu", torch.float32, False, False),
}
WRITES = {
    "add_": lambda part: part.add_(10),
    "item": lambda part: part.__setitem__(0, 7.0),
    "items of a list": lambda part: part.__setitem__([1, 0], part[[0, 1]] * 2),
    "fill_": lambda part: part.fill_(3),
    "zero_": lambda part: part.zero_(),
    "copy_": lambda part: part.copy_(torch.arange(part.shape[-1])),
    "masked_fill_": lambda part: part.masked_fill_(part > 5, -1.0),
    "exp_": lambda part: part.neg_().exp_(),
    "lerp_": lambda part: part.lerp_(part * 2, 0.5),
    "out": lambda part: torch.mul(part, 2, out=part),
    "out of exp": lambda part: torch.exp(part * 0.1, out=part),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_and_its_base_are_written_together(name):
    """The base and what else was viewed of it, after a write into the view; then all, after one into the base."""

    def run(x):
        x = x * 1
        before, part = x[0], VIEWS[name](x)
        part[0] = 100.0
        seen = [x * 1, before * 1, part * 1]
        x.mul_(3)
        return *seen, x, before, part, x.flatten()

    check(run)


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("view", ["transpose", "unbind", "diagonal"])
def test_what_writes_in_place(view, name):
    def run(x):
        x = x * 1
        WRITES[name](VIEWS[view](x))
        return (x,)

    check(run)


def test_axes_are_added_and_removed_in_place():
    def run(x):
        x = x * 1
        other = x[0]
        other.unsqueeze_(0).mul_(2)
        turned = x[1].t_().swapaxes_(0, 1).transpose_(1, 0)
        turned[0] = 5
        return x, other, turned, other.squeeze_(0) + 1

    check(run)


def test_tensors_whose_axes_change_in_place_go_through_pytorchs_own_code():
    """Products, reshape and sizes, which PyTorch computes of the shape that its own tensor has."""

    def run(x):
        turned, one, other = x * 1, x[:1] * 2, x * 3
        turned.transpose_(1, 2)
        one.squeeze_(0).t_()
        other.data = x[0].reshape(-1)[:5] * 2
        products = x @ turned, torch.bmm(turned, x), one @ x, torch.nn.functional.linear(x, one.t())
        return *products, turned.reshape(4, -1), one.size(0) + x, torch.cat([one, one]), other.reshape(1, -1) + 1

    check(run)


DIAGONALS = {
    "of a part": lambda x: x[1].fill_diagonal_(4.0),
    "of a turned part": lambda x: x[1].t().fill_diagonal_(4.0),
    "wrapped": lambda x: x.view(12, 2).fill_diagonal_(0.0, wrap=True),
    "of three axes": lambda x: x[:, :2, :2].fill_diagonal_(-1.0),
}


@pytest.mark.parametrize("name", DIAGONALS)
def test_diagonals_are_filled(name):
    def run(x):
        x = x * 1
        return x, DIAGONALS[name](x)

    check(run)


def test_a_diagonal_of_one_axis_is_refused():
    weights, function = extract_jax(Module(lambda x: x.view(-1).fill_diagonal_(1.0)))
    with pytest.raises(InvalidArgumentError, match="fill_diagonal_: expected two axes"):
        function(weights, (np.ones((2, 3, 4), np.float32),))


@pytest.mark.parametrize("change", [lambda x: x.resize_(30), lambda x: x.resize_as_(x[0]), lambda x: x.set_(x * 2)])
def test_other_memory_of_another_size_is_refused_by_name(change):
    weights, function = extract_jax(Module(lambda x: change(x * 1)))
    with pytest.raises(UnsupportedModelError, match=r"aten::(resize|resize_as|set)_.*use view and clone"):
        function(weights, (np.ones((2, 3, 4), np.float32),))


def test_frames_of_parts_and_of_turned_signals():
    def run(x):
        parts = x.view(2, 12)[1:, ::2], x.view(12, 2).t(), x.view(2, 12)
        options = {"window": x.new_ones(4), "center": False, "return_complex": True}
        return [torch.view_as_real(torch.stft(y, 4, 2, **options)) for y in parts]

    check(run)


def test_numbers_drawn_into_a_part_of_a_tensor():
    def run(x):
        x = x * 1
        x[0].normal_(2.0, 0.0)
        x[1, 0].normal_(mean=3.0, std=0.0)
        return (x,)

    check(run)


def test_a_range_chooses_rows_as_a_list_does():
    def run(x):
        x = x * 1
        rows = x[1, range(2)]
        x[:, range(1, 3)] = 7
        return x, rows

    check(run)


def test_bits_are_viewed():
    def run(x):
        x = x * 1
        bits = x.view(torch.int32)
        bits[0].bitwise_and_(0x7F800000)
        return x, bits

    check(run)


def test_parts_of_complex_numbers_are_written_as_floats():
    def run(x):
        numbers = torch.complex(x * 1, x * 2)
        numbers.view(torch.float32)[..., ::2].zero_()
        return x, torch.view_as_real(numbers)

    check(run)


def test_a_view_of_elements_more_than_once_is_refused():
    for view in (lambda x: x.unfold(1, 2, 1), lambda x: x[:, :1].expand(2, 3, 4)):
        weights, function = extract_jax(Module(lambda x, view=view: view(x * 1).mul_(2)))
        with pytest.raises(UnsupportedModelError, match="elements more than once"):
            function(weights, (np.ones((2, 3, 4), np.float32),))


class Holding(torch.nn.Module):
    """Keeps views in an attribute, a dict and a list, and writes into a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(12.0).view(3, 4))

    def forward(self, x):
        x = x * 1
        self.part, kept = x[1:], {"turned": x[0].t(), "rows": [x[0].unbind(0)[0]]}
        self.part.mul_(2)
        kept["turned"][0].add_(1)
        kept["rows"][0].zero_()
        x += 1
        turned = self.table.t()
        turned[0] = x[0, :, 0]
        self.table.view(-1)[::5] = 9
        part, self.part = self.part, None
        return part * 1, kept["turned"], kept["rows"][0], x, self.table + turned.t()


def test_views_in_attributes_and_containers_and_of_buffers():
    x = torch.arange(24.0).view(2, 3, 4)
    expected = Holding()(x.clone())
    weights, function = extract_jax(Holding())
    for one, other in zip(jax.jit(function)(weights, (x.numpy(),)), expected, strict=True):
        torch.testing.assert_close(to_torch_tensor(one), other.contiguous())


class Writing(torch.nn.Module):
    """A gated MLP that scales and clears parts of its states in place, through views."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        states = self.mlp.up_proj(x)
        first, second = states.chunk(2, -1)
        second.mul_(self.mlp.act_fn(self.mlp.gate_proj(x)).transpose(-1, -2)[..., : second.shape[-1], :].mT)
        states.flatten(0, 1).unsqueeze(0)[..., 0].zero_()
        x.view(-1)[:3].add_(0.5)
        return self.mlp.down_proj(states) + first.sum(-1, keepdim=True)


def test_a_model_whose_layers_write_through_views():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=97, num_hidden_layers=3, pad_token_id=0, eos_token_id=96, **sizes)
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.mlp = Writing(layer.mlp)
    ids = torch.randint(1, 90, (2, 9))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    weights, function = extract_jax(model)
    found = jax.jit(function)(weights, (), {"input_ids": ids.numpy()}).logits
    torch.testing.assert_close(to_torch_tensor(found), expected, atol=1e-5, rtol=1e-5)
    served = to_jax(copy.deepcopy(model))
    wanted = model.generate(ids[:1], max_new_tokens=4, do_sample=False)
    assert torch.equal(served.generate(ids[:1], max_new_tokens=4, do_sample=False), wanted)


class Layers(torch.nn.Module):
    """Layers of one kind whose results are views of their arguments, or of one array."""

    def __init__(self, layer):
        super().__init__()
        self.layers = torch.nn.ModuleList(Module(layer) for _ in range(3))

    def forward(self, x):
        x = x * 1
        for layer in self.layers:
            first, second = layer(x)
            first.mul_(2)
        return x, first, second


@pytest.mark.parametrize(
    "layer",
    [
        lambda x: (x.transpose(0, 1), x + 1),
        lambda x: (lambda y: (y[1:], y))(x * 3),
        lambda x: (x * 3).chunk(2, 0),
        lambda x: (x.add_(1), x * 2),
    ],
    ids=["of an argument", "of one array", "parts of one array", "the argument"],
)
def test_results_of_layers_are_views(layer):
    x = torch.arange(24.0).view(2, 3, 4)
    expected = Layers(layer)(x.clone())
    weights, function = extract_jax(Layers(layer))
    for one, other in zip(jax.jit(function)(weights, (x.numpy(),)), expected, strict=True):
        torch.testing.assert_close(to_torch_tensor(one), other)


def test_as_strided_of_a_tensor_of_the_host():
    def run(x):
        numbers = torch.arange(24)
        turned = numbers.view(4, 6).t()[1:]
        return x + numbers.as_strided((2, 3, 4), (4, 2, 1)), x[0, 0, 0] + turned.as_strided((2, 2), (2, 1))

    check(run)


def test_a_tensor_of_the_host_that_is_written_after_its_use():
    def run(x):
        number, found = torch.zeros(64), []
        for _ in range(3):
            number.add_(1)
            found.append(x[0, 0, 0] + number)
        return found

    check(run)


def test_data_is_set():
    """A tensor gets other memory: what was viewed of it stays, and the other tensor is written with it."""

    def run(x):
        x, other = x * 1, x * 2
        part = x[0]
        x.data = other
        x.add_(1)
        part.mul_(3)
        return x, other, part

    check(run)


def test_a_tensor_that_was_made_before_the_lowerings():
    program = """
import jax.numpy as jnp
from model_adapters.bridge.views import TorchTensor, computing, default_env
from model_adapters.lowerings import install
one, other = (TorchTensor(jnp.ones(3), default_env()) for _ in range(2))
install.install()
with computing():
    one.add_(1)
    other[1:].add_(one[1:])
    assert "_elem" not in vars(one) and one.tolist() == [2, 2, 2] and other.tolist() == [1, 3, 3]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_device_module_of_another_library_stays(monkeypatch):
    other = types.ModuleType("privateuseone")
    monkeypatch.setattr(torch, "privateuseone", other, raising=False)
    monkeypatch.setitem(sys.modules, "torch.privateuseone", other)
    with computing():
        pass
    assert torch.privateuseone is other and sys.modules["torch.privateuseone"] is other
    monkeypatch.undo()
    with computing():
        assert hasattr(torch, "privateuseone")
    assert not hasattr(torch, "privateuseone")
