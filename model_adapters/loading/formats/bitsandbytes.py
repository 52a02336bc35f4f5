"""bitsandbytes: 4-bit codes in blocks of 64 numbers, and int8 with a scale a row.

4 bits (`bitsandbytes.functional.QuantState`): ``weight`` uint8[numbers / 2, 1], the first number in the high bits, or
the same bytes in the dtype of ``bnb_4bit_quant_storage``;
``weight.absmax``, float32 or, if nested, uint8 codes of ``weight.nested_quant_map`` with ``weight.nested_absmax`` for
256 of them and an offset; ``weight.quant_map`` the table of 16; ``weight.quant_state.bitsandbytes__nf4`` JSON in bytes.
8 bits: ``weight`` int8[out, in] and ``SCB`` float32[out], the largest number of a row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from model_adapters.errors import CheckpointError
from model_adapters.loading.formats.parts import FLOATS, QuantizedParts, require_kinds, require_shapes
from model_adapters.loading.formats.settings import QuantizationSettings
from model_adapters.loading.formats.weight_groups import WeightGroup, groups_by_suffix

_STATE = ".quant_state.bitsandbytes__"
_ROLES = {"weight": "", "absmax": ".absmax", "table": ".quant_map"}
_NESTED = {"nested_absmax": ".nested_absmax", "nested_table": ".nested_quant_map"}
_INT8_LARGEST = 127


def find(entries: Mapping[str, Any], settings: QuantizationSettings) -> list[WeightGroup]:
    """Returns the weights in 4 or 8 bits."""
    states = {"nf4": f"{_STATE}nf4", "fp4": f"{_STATE}fp4"}
    four = groups_by_suffix(entries, ".absmax", "", _ROLES, {**_NESTED, **states})
    eight = groups_by_suffix(
        entries, ".SCB", ".weight", {"weight": ".weight", "SCB": ".SCB"}, {"format": ".weight_format"}
    )
    return four + eight


def read(group: WeightGroup, tensors: Mapping[str, torch.Tensor], settings: QuantizationSettings) -> QuantizedParts:
    """Returns the parts of one weight, exactly."""
    if "SCB" in tensors:
        return _read_int8(group.weight, tensors)
    state = tensors.get("nf4", tensors.get("fp4"))
    if state is None:
        raise CheckpointError(f"{group.weight}: expected its quant_state in the files, got none")
    try:
        said = json.loads(bytes(state.tolist()))
        num_rows, num_columns = said["shape"]
        block, kind = int(said["blocksize"]), str(said["quant_type"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{group.weight}: its quant_state is no JSON of bitsandbytes ({error})") from error
    packed = tensors["weight"].reshape(-1).view(torch.uint8)  # floats hold the bytes with bnb_4bit_quant_storage
    if packed.numel() * 2 != num_rows * num_columns:
        raise CheckpointError(
            f"{group.weight}: expected {num_rows * num_columns // 2} bytes for {[num_rows, num_columns]}, "
            f"got {packed.numel()}"
        )
    codes = torch.stack([packed >> 4, packed & 15], 1).reshape(num_rows, num_columns)
    _check_scales(group.weight, tensors, -(-num_rows * num_columns // block))
    size = math.gcd(num_columns, block)  # blocks go on over the end of a row
    scale = _absmax(tensors, said).repeat_interleave(block // size)[: num_rows * num_columns // size]
    table = tuple(tensors["table"].float().tolist())
    scale = scale.reshape(num_rows, num_columns // size)
    return QuantizedParts(codes, scale, bits=4, group=size, source=f"bitsandbytes {kind}", table=table)


def _check_scales(name: str, tensors: Mapping[str, torch.Tensor], num_blocks: int) -> None:
    """Raises CheckpointError for tables or scales of another kind or number than expected."""
    is_nested = any(role in tensors for role in _NESTED)
    kinds = {"absmax": (1, (torch.uint8,) if is_nested else FLOATS), "table": (1, FLOATS)}
    require_kinds(name, kinds | dict.fromkeys(_NESTED, (1, FLOATS)), tensors)
    shapes = {"absmax": (num_blocks,), "table": (16,)} | ({"nested_table": (256,)} if is_nested else {})
    require_shapes(name, shapes, dict(tensors))


def _absmax(tensors: Mapping[str, torch.Tensor], said: Mapping[str, Any]) -> torch.Tensor:
    """Returns the scale of each block, float32[blocks]."""
    absmax = tensors["absmax"]
    if absmax.dtype != torch.uint8:
        return absmax.float()
    by_block = tensors["nested_absmax"].float().repeat_interleave(int(said["nested_blocksize"]))[: absmax.numel()]
    return tensors["nested_table"].float()[absmax.long()] * by_block + torch.tensor(float(said["nested_offset"]))


def _read_int8(name: str, tensors: Mapping[str, torch.Tensor]) -> QuantizedParts:
    require_kinds(name, {"SCB": (1, FLOATS)}, tensors)
    weight, largest = tensors["weight"], tensors["SCB"].float()
    if weight.dtype != torch.int8 or largest.shape != weight.shape[:1]:
        raise CheckpointError(
            f"{name}: expected int8[out, in] and SCB [out], got {weight.dtype}{list(weight.shape)} and "
            f"{list(largest.shape)}"
        )
    order = tensors.get("format")
    if order is not None and int(order) != 0:
        raise CheckpointError(f"{name}: expected weight_format 0 (rows), got {int(order)}: save the model anew")
    scale = (largest / _INT8_LARGEST)[:, None]
    return QuantizedParts(weight, scale, bits=8, group=weight.shape[1], source="bitsandbytes int8")
