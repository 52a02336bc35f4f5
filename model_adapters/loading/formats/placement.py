"""Puts a quantized weight of a checkpoint on the device."""

from __future__ import annotations

import dataclasses

import jax
import torch

from model_adapters.bridge.host_arrays import to_jax_zero_copy, to_numpy
from model_adapters.loading.formats.quantized_tensor import QuantizedTensor
from model_adapters.ops.quantized_weight import QuantizedWeight, Scheme, make_quantized
from model_adapters.quantization.device_layout import lay_out
from model_adapters.sharding.model_sharding import ModelSharding
from model_adapters.sharding.quantized_sharding import put_quantized


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """Places weights that are quantized in a checkpoint.

    Attributes:
        sharding: How weights lie on a mesh; None is the default device.
        makes_dense: Whether all of them become dense.
    """

    sharding: ModelSharding | None = None
    makes_dense: bool = False

    def takes(self, name: str, tensor: QuantizedTensor) -> bool:
        """Tells whether the weight `name` stays as it is stored.

        Notes on the tensor if only the mesh prevents it.
        """
        if self.makes_dense:
            return False
        if self.sharding is None:
            return True
        parts = tensor.parts
        is_grouped = parts.scale.shape[-1] > 1
        moved = is_grouped and self.sharding.moves_columns(name, transposed=parts.transposed)
        if parts.columns is None and not moved:
            return True
        tensor.note_dense()  # columns in an order of their own, or groups of columns that the mesh moves
        return False

    def __call__(self, name: str, tensor: QuantizedTensor) -> QuantizedWeight:
        """Returns the weight `name`, in the order of the kernels where these can read it."""
        weight = lay_out(_plain_weight(name, tensor), on_mesh=self.sharding is not None)
        return jax.block_until_ready(weight if self.sharding is None else put_quantized(self.sharding, name, weight))


def _plain_weight(name: str, tensor: QuantizedTensor) -> QuantizedWeight:
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
    return make_quantized(name, *arrays, scheme=scheme)


def _placed(part: torch.Tensor) -> jax.Array:
    return to_jax_zero_copy(part) if jax.default_backend() == "cpu" else jax.device_put(to_numpy(part))
