"""Tensors become arrays: same values, the same memory where that can be."""

import gc
import weakref

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from model_adapters.bridge.host_arrays import shares_memory, to_jax_zero_copy, to_numpy

SHARED = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.uint8, torch.bool]
NARROWED = {torch.int64: "int32", torch.float64: "float32"}


def tensor_of(dtype, shape):
    values = torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float32).reshape(shape) % 100
    return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)


def check_equal(array, tensor):
    wanted = NARROWED.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    assert (str(array.dtype), array.shape) == (wanted, tuple(tensor.shape))
    np.testing.assert_array_equal(np.asarray(array).astype(np.float64), tensor.detach().double().numpy())


@pytest.mark.parametrize("dtype", SHARED, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4)], ids=str)
def test_whole_tensors_share_their_memory(dtype, shape):
    tensor = tensor_of(dtype, shape)
    array = to_jax_zero_copy(tensor)
    check_equal(array, tensor)
    assert shares_memory(array, tensor)


@given(
    dtype=st.sampled_from([*SHARED, *NARROWED, torch.float8_e4m3fn]),
    shape=st.lists(st.integers(0, 6), max_size=4),
    offset=st.integers(0, 40),
    transposed=st.booleans(),
    requires_grad=st.booleans(),
)
@settings(max_examples=80)
def test_any_layout_gives_the_same_values(dtype, shape, offset, transposed, requires_grad):
    num = int(np.prod(shape))
    tensor = tensor_of(dtype, (num + offset,))[offset:].reshape(shape)
    if transposed and len(shape) > 1:
        tensor = tensor.transpose(0, -1)
    if requires_grad and dtype in (torch.float32, torch.bfloat16):
        tensor = torch.nn.Parameter(tensor)
    check_equal(to_jax_zero_copy(tensor), tensor)
    np.testing.assert_array_equal(to_numpy(tensor).astype(np.float64), tensor.detach().double().numpy())


def test_a_buffer_that_does_not_start_at_64_bytes_is_copied():
    whole = torch.arange(100, dtype=torch.float32)
    part = whole[1:]
    assert part.data_ptr() % 64
    array = to_jax_zero_copy(part)
    check_equal(array, part)
    assert not shares_memory(array, part)


def test_the_array_keeps_the_memory_of_the_tensor_alive():
    tensor = torch.full((1000, 1000), 3.0)
    array = to_jax_zero_copy(tensor)
    watch = weakref.ref(tensor)
    del tensor
    gc.collect()
    torch.full((1000, 1000), 4.0)  # would land on memory that was given back
    assert watch() is None
    assert float(array.min()) == float(array.max()) == 3.0


def test_a_tensor_elsewhere_is_refused():
    with pytest.raises(ValueError, match="expected a tensor on the CPU, got one on meta"):
        to_jax_zero_copy(torch.empty(3, device="meta"))
