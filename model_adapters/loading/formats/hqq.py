"""HQQ: integers with a float zero point in groups along the columns (``axis=1``).

Tensors of a layer (github.com/mobiusml/hqq ``hqq/core/quantize.py``, state dict in safetensors' types): ``W_q`` uint8,
``scale`` and ``zero`` [groups, 1]; ``shape``, ``nbits``, ``group_size``, ``axis``, ``packing`` and more as small
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from model_adapters.errors import CheckpointError
from model_adapters.loading.formats.parts import QuantizedParts
from model_adapters.loading.formats.settings import QuantizationSettings
from model_adapters.loading.formats.weight_groups import WeightGroup, groups_by_suffix

_ROLES = {name: f".{name}" for name in ("W_q", "scale", "zero", "shape", "nbits", "axis", "packing", "group_size")}
_NOTES = (
    "unpack_view_dtype",
    "view_as_float",
    "quant_scale",
    "quant_zero",
    "compute_dtype",
    "offload_meta",
    "encoded_state_dict",
    "stores_quant_config",
    "channel_wise",
    "optimize",
    "round_zero",
)


def find(entries: Mapping[str, Any], settings: QuantizationSettings) -> list[WeightGroup]:
    """Returns the weights with codes."""
    return groups_by_suffix(entries, ".W_q", ".weight", _ROLES, {name: f".{name}" for name in _NOTES})


def read(group: WeightGroup, tensors: Mapping[str, torch.Tensor], settings: QuantizationSettings) -> QuantizedParts:
    """Returns one weight's parts: ``(q - zero) * scale`` as ``q * scale + (-zero * scale)``."""
    name = group.weight
    for role in ("scale", "zero", "shape", "nbits", "axis"):
        if role not in tensors:
            raise CheckpointError(f"{name}: expected a tensor {role} with its codes, got none")
    bits, axis = int(tensors["nbits"]), int(tensors["axis"])
    if bits not in (2, 4, 8):
        raise settings.refuse(f"nbits {bits} (expected 2, 4 or 8)")
    if axis != 1:
        raise settings.refuse(f"axis {axis} (groups along the rows)", "quantize it with axis=1")
    for role in ("quant_scale", "quant_zero", "view_as_float"):
        if role in tensors and bool(tensors[role].any()):
            raise settings.refuse(f"{role} (scales that are quantized)", "quantize it without that option")
    num_rows, num_columns = (int(size) for size in tensors["shape"])
    numbers = _unpacked(tensors["W_q"], bits, num_rows * num_columns, name).reshape(num_rows, num_columns)
    scale = tensors["scale"].float().reshape(num_rows, -1)
    zero = tensors["zero"].float().reshape(num_rows, -1)
    if scale.shape != zero.shape or num_columns % scale.shape[1]:
        raise CheckpointError(f"{name}: expected scales and zeros in groups of {num_columns} columns, got others")
    offset = -(zero * scale)
    if bits == 8:  # unsigned 8-bit numbers do not fit in int8
        numbers, offset = (numbers.to(torch.int16) - 128), (128 - zero) * scale
    size = num_columns // scale.shape[1]
    return QuantizedParts(numbers.to(torch.int8), scale, offset, bits=8 if bits == 8 else 4, group=size, source="hqq")


def _unpacked(packed: torch.Tensor, bits: int, count: int, name: str) -> torch.Tensor:
    """Returns uint8 codes: the first rows of the groups are in the highest bits of a byte."""
    if packed.dtype != torch.uint8 or packed.numel() * (8 // bits) != count:
        raise CheckpointError(f"{name}: expected {count * bits // 8} bytes of codes, got {packed.numel()}")
    pieces = [(packed >> shift) & (2**bits - 1) for shift in range(8 - bits, -1, -bits)]
    return torch.cat(pieces, 0)
