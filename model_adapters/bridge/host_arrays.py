"""Conversion of torch tensors on the host to JAX arrays, with a shared buffer if possible."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import torch

from model_adapters.device_arrays import XLA_CPU_ALIGNMENT
from model_adapters.errors import UnsupportedModelError

_NARROWED = {torch.int64: torch.int32, torch.float64: torch.float32, torch.complex128: torch.complex64}

# dtypes that numpy learns from ml_dtypes: an integer of the same width carries the bytes
_VIA_INTEGER: dict[torch.dtype, tuple[torch.dtype, np.dtype]] = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fn)),
    torch.float8_e5m2: (torch.uint8, np.dtype(ml_dtypes.float8_e5m2)),
}


def _check_integers(tensor: torch.Tensor) -> None:
    """Raises UnsupportedModelError for 64-bit integers that do not fit in 32 bits.

    Those of a hash function are an example.
    """
    limits = torch.iinfo(torch.int32)
    if tensor.dtype == torch.int64 and tensor.numel():
        least, most = torch.aminmax(tensor)
        if least < limits.min or most > limits.max:
            worst = int(most if most > limits.max else least)
            raise UnsupportedModelError(
                f"expected integers that 32 bits hold, got {worst} in a tensor of 64-bit ones, which JAX narrows; "
                "set JAX_ENABLE_X64=1"
            )


def check_floats(module: torch.nn.Module) -> None:
    """Raises UnsupportedModelError for parameters in float64.

    They would be computed with in float32 here.
    """
    wide = (torch.float64, torch.complex128)
    name = next((name for name, parameter in module.named_parameters() if parameter.dtype in wide), None)
    if name is not None:
        raise UnsupportedModelError(
            f"{name}: expected weights in float32, bfloat16 or float16, got float64; call model.float() first"
        )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in C order, in a dtype that JAX without 64-bit types has.

    The tensor has to be on the host.
    """
    if tensor.layout is not torch.strided:
        raise UnsupportedModelError(f"expected a dense tensor, got one of {tensor.layout}; call its to_dense()")
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        raise ValueError(f"expected a tensor on the CPU, got one on {tensor.device}")
    if not jax.config.read("jax_enable_x64") and tensor.dtype in _NARROWED:
        _check_integers(tensor)
        tensor = tensor.to(_NARROWED[tensor.dtype])
    return tensor.resolve_conj().resolve_neg().contiguous()


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Returns the numpy array over the memory of a CPU tensor.

    bfloat16 and float8 are those of ml_dtypes.
    """
    tensor = _plain(tensor)
    if tensor.dtype in _VIA_INTEGER:
        integer, dtype = _VIA_INTEGER[tensor.dtype]
        return tensor.view(integer).numpy().view(dtype)
    return tensor.numpy()


def to_jax_zero_copy(tensor: torch.Tensor) -> jax.Array:
    """Returns the JAX array of a CPU tensor, on the CPU.

    It is a view if the tensor is in C order and 64-byte aligned, else a copy. Without 64-bit types in JAX (its default)
    int64 becomes int32 and float64 becomes float32. The tensor must not be written to afterwards, since JAX
    assumes that arrays are constant.
    """
    tensor = _plain(tensor)
    if tensor.data_ptr() % XLA_CPU_ALIGNMENT:
        tensor = tensor.clone(memory_format=torch.contiguous_format)  # torch's own buffers start at 64 bytes
    # Through numpy rather than DLPack: JAX lets go of a numpy array on a Python thread. A torch tensor taken by DLPack
    # is freed on the XLA thread that used it last, which brings the process down where the interpreter is ending.
    return jax.device_put(to_numpy(tensor), jax.local_devices(backend="cpu")[0], may_alias=True)


def shares_memory(array: jax.Array, tensor: torch.Tensor) -> bool:
    """Tells whether the array on the CPU is a view of the very buffer of the tensor."""
    return array.unsafe_buffer_pointer() == tensor.data_ptr()
