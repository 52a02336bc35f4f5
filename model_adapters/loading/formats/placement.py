"""Puts a quantized weight of a checkpoint on the device."""

from __future__ import annotations

import jax
import torch

from model_adapters.bridge.host_arrays import to_jax_zero_copy, to_numpy
from model_adapters.loading.formats.quantized_tensor import QuantizedTensor
from model_adapters.ops.quantized_weight import QuantizedWeight, Scheme, make_quantized
from model_adapters.quantization.cpu_layout import lay_out


def place_quantized(name: str, tensor: QuantizedTensor) -> QuantizedWeight:
    """Returns the weight `name` on the default device, in the order of the kernels where these can read it."""
    parts = tensor.parts
    scheme = Scheme(
        parts.bits,
        parts.group,
        parts.act_dtype,
        str(tensor.dtype).removeprefix("torch."),
        transposed=parts.transposed,
        source=parts.source,
        act_group=None if parts.act_dtype == "none" else parts.values.shape[-1],  # one scale for each row
        act_scale=parts.act_scale,
        table=parts.table,
    )
    arrays = [
        None if part is None else _placed(part) for part in (parts.values, parts.scale, parts.offset, parts.columns)
    ]
    return jax.block_until_ready(lay_out(make_quantized(name, *arrays, scheme=scheme)))


def _placed(part: torch.Tensor) -> jax.Array:
    return to_jax_zero_copy(part) if jax.default_backend() == "cpu" else jax.device_put(to_numpy(part))
