"""Weights as tensors of eager PyTorch: the memory of arrays on the CPU, copies of those on an accelerator."""

from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from torchax_serve.runtime.eager import shared_tensor


class OnAnAccelerator:
    """A JAX array in the memory of an accelerator, to which torch has no way."""

    def __init__(self, values):
        self._values, self.ndim, self.dtype = values, values.ndim, values.dtype

    def devices(self):
        return [SimpleNamespace(platform="gpu")]

    def __array__(self, *args, **kwargs):
        return self._values


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int32])
def test_weights_on_an_accelerator_are_copied_to_the_host(dtype):
    values = np.arange(6).reshape(2, 3).astype(dtype)
    tensor = shared_tensor(OnAnAccelerator(values))
    assert tensor.device.type == "cpu"
    assert tensor.tolist() == values.tolist()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int32])
def test_weights_on_the_cpu_are_shared_and_integers_copied(dtype):
    array = jnp.arange(6).reshape(2, 3).astype(dtype)
    tensor = shared_tensor(array)
    assert tensor.tolist() == array.tolist()
    assert (tensor.data_ptr() == array.unsafe_buffer_pointer()) == (dtype != np.int32)
