"""The tensor that transformers handles for a quantized weight, against the same operation on the dense weight."""

import pytest
import torch

from model_adapters.loading.formats.parts import QuantizedParts
from model_adapters.loading.formats.quantized_tensor import QuantizedTensor


def made(seed=0, rows=6, columns=64, group=16, *, lead=(), offset=True, in_order=True, dense=None):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 8, (*lead, rows, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(*lead, rows, columns // group, generator=generator)
    shift = torch.rand(scale.shape, generator=generator) if offset else None
    order = None if in_order else torch.randperm(columns, generator=generator).int()
    parts = QuantizedParts(values, scale, shift, order, bits=4, group=group)
    return QuantizedTensor(parts, torch.float32, f"w{seed}", [] if dense is None else dense)


def check(operation, *tensors):
    """`operation` gives quantized tensors, of the numbers that it gives of the dense ones."""
    got, wanted = operation(*tensors), operation(*(tensor.parts.dense() for tensor in tensors))
    for one, other in zip(*((each if isinstance(each, tuple) else (each,)) for each in (got, wanted)), strict=True):
        assert isinstance(one, QuantizedTensor) and tuple(one.shape) == tuple(other.shape)
        torch.testing.assert_close(one.parts.dense(), other, rtol=0, atol=0)
    assert not any(tensor.made_dense for tensor in tensors)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(
    "operation",
    [
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.cat([a, b], dim=1),
        lambda a, b: torch.stack([a, b]),
        lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1),
        lambda a, b: torch.stack([a, b]).transpose(1, 2).contiguous(),
        lambda a, b: torch.cat([a.T, b.T], dim=1),
        lambda a, b: torch.stack([a, b]).unbind(0),
    ],
)
def test_operations_on_two(operation, offset):
    check(operation, made(0, offset=offset), made(1, offset=offset))


@pytest.mark.parametrize(
    "operation",
    [
        lambda a: a.chunk(2),
        lambda a: a.chunk(2, dim=1),
        lambda a: a.split([2, 4]),
        lambda a: a.split([16, 48], dim=1),
        lambda a: a.T,
        lambda a: a.transpose(-1, -2).chunk(2, dim=0),
        lambda a: a.detach().clone().contiguous(),
        lambda a: torch.nn.Parameter(a, requires_grad=True),
    ],
)
def test_operations_on_one(operation):
    check(operation, made())


def test_one_with_and_one_without_an_offset_are_joined():
    check(lambda a, b: torch.cat([a, b]), made(0, offset=False), made(1))


def test_order_of_columns_survives_what_works_on_rows():
    check(lambda a: a.chunk(3), made(in_order=False))


@pytest.mark.parametrize(
    "operation",
    [
        lambda a, b: torch.cat([a[..., :8], b], dim=1),
        lambda a, b: torch.cat([a, torch.ones(1, 64)]),
        lambda a, b: a.reshape(2, 3, 64).transpose(0, 1).reshape(6, 64),
        lambda a, b: a + 1,
        lambda a, b: a.split([8, 56], dim=1)[1],
    ],
)
def test_any_other_operation_computes_with_the_dense_weight_and_notes_it(operation):
    first, second = made(0), made(1)
    expected = operation(first.parts.dense(), second.parts.dense())
    got = operation(first, second)
    assert not isinstance(got, QuantizedTensor)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert first.made_dense == ["w0"]


def test_other_kinds_are_joined_as_dense_weights():
    first, other = made(0), made(1, group=32)
    joined = torch.cat([first, other])
    assert not isinstance(joined, QuantizedTensor) and first.made_dense and other.made_dense
    torch.testing.assert_close(joined, torch.cat([first.parts.dense(), other.parts.dense()]), rtol=0, atol=0)


def test_a_cast_changes_the_dtype_that_model_code_sees():
    tensor = made()
    cast = tensor.to(device=torch.device("cpu"), dtype=torch.bfloat16)
    assert cast.dtype == torch.bfloat16 and cast.parts is tensor.parts and not tensor.made_dense
    assert torch.equal(tensor, cast) and not torch.equal(tensor, made(1))
    assert tensor.numel() == 6 * 64 and tensor.is_floating_point() and not tensor.is_meta


def test_each_weight_of_a_joined_one_is_noted_as_dense():
    dense = []
    torch.cat([made(0, dense=dense), made(1, dense=dense)]).add(1)
    assert dense == ["w0", "w1"]
