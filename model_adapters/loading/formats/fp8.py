"""8-bit floats with scales by block, row or matrix: DeepSeek, AutoFP8, FBGEMM ...

Tensors of a weight: ``weight`` float8_e4m3fn[out, in] and ``weight_scale_inv`` [ceil(out / rows), ceil(in / columns)]
(blocks, by which values are multiplied in spite of the name) or ``weight_scale`` [out, 1], [1] or []. The layouts are
those that `transformers.integrations.finegrained_fp8` and `fbgemm_fp8` read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from model_adapters.errors import CheckpointError
from model_adapters.loading.formats.parts import FLOATS, QuantizedParts, by_rows, require_kinds
from model_adapters.loading.formats.settings import QuantizationSettings
from model_adapters.loading.formats.weight_groups import WeightGroup, groups_by_suffix

_INPUT = {"input_scale": "{module}.input_scale", "activation_scale": "{module}.activation_scale"}


EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
"""Dtypes of scales that are exponents."""


def is_block(block: Any) -> bool:
    """Returns whether `block` is the number of rows and of columns that share a scale."""
    return isinstance(block, (list, tuple)) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)


def find(entries: Mapping[str, Any], settings: QuantizationSettings) -> list[WeightGroup]:
    """Returns the weights with a scale."""
    block = settings.values.get("weight_block_size")
    if block is not None and not is_block(block):
        raise CheckpointError(f"{settings.file}: expected weight_block_size as rows and columns, got {block!r}")
    found = groups_by_suffix(
        entries, "_scale_inv", "", {"weight": "", "scale": "_scale_inv"}, {**_INPUT, "fused_input": "_activation_scale"}
    )
    if found:
        return found
    bound = {"input_scale_ub": "{module}.input_scale_ub"}
    found = groups_by_suffix(entries, ".weight_scale", ".weight", _CHANNEL, {**_INPUT, **bound})
    for name in _EXPERTS if settings.method == "fbgemm_fp8" else ():
        found += groups_by_suffix(entries, f"{name}_scale", name, {"weight": name, "scale": f"{name}_scale"}, {})
    return found


_CHANNEL = {"weight": ".weight", "scale": ".weight_scale"}
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
"""Tensors [E, in, out] of Llama 4, whose scales in FBGEMM's form are [E, 1, out] and [E, out, 1]."""


def read(group: WeightGroup, tensors: Mapping[str, torch.Tensor], settings: QuantizationSettings) -> QuantizedParts:
    """Returns the parts of one weight, exactly.

    Activations are not rounded: the configurations ask for a scale of each 128 columns or of each row.
    """
    if "weight" not in tensors:
        raise CheckpointError(f"{group.weight}: expected the weight of a scale in the files, got none")
    weight, scale, block = tensors["weight"], tensors["scale"], settings.values.get("weight_block_size")
    if not group.weight.endswith(_EXPERTS) or settings.method != "fbgemm_fp8":
        return of_float8(group.weight, weight, scale, block, "fp8")
    if weight.ndim != 3 or scale.numel() != weight.shape[0] * weight.shape[2]:
        raise CheckpointError(
            f"{group.weight}: expected experts [E, in, out] and a scale for each of their columns, got "
            f"{list(weight.shape)} and {list(scale.shape)}: get the weights again"
        )
    by_row = scale.reshape(weight.shape[0], weight.shape[2], 1)
    parts = of_float8(group.weight, weight.mT.contiguous(), by_row, None, "fp8")
    return dataclasses.replace(parts, transposed=True)


def of_float8(name: str, weight: torch.Tensor, scale: torch.Tensor, block: Any, source: str) -> QuantizedParts:
    """Returns the parts of a weight float8[..., out, in] with scales by block, row or matrix."""
    if weight.dtype != torch.float8_e4m3fn:
        raise CheckpointError(f"{name}: expected float8_e4m3fn, got {weight.dtype}: get config.json again")
    if weight.ndim < 2:
        raise CheckpointError(f"{name}: expected a matrix, got {list(weight.shape)}: get the weights again")
    require_kinds(name, {"scale": (scale.ndim, (*FLOATS, *EXPONENTS))}, {"scale": scale})
    rows, columns = weight.shape[-2:]
    scale = exponents_to_float(scale)
    if scale.numel() == 1 and weight.ndim == 2 and not block:
        return QuantizedParts(weight, by_rows(name, scale.reshape(1, 1), rows), group=columns, source=source)
    if scale.shape == weight.shape[:-2] or scale.shape == (*weight.shape[:-2], rows):
        scale = scale[..., None] if scale.ndim == weight.ndim - 1 else scale[..., None, None]
    if scale.shape[-2:] in ((rows, 1), (1, 1)) and not block:
        return QuantizedParts(weight, by_rows(name, scale, rows), group=columns, source=source)
    block_rows, block_columns = block or (128, 128)
    expected = (*weight.shape[:-2], -(-rows // block_rows), -(-columns // block_columns))
    if scale.numel() == math.prod(expected) == 1:
        scale = scale.reshape(expected)
    if tuple(scale.shape) != expected:
        if block is None:
            raise CheckpointError(
                f"{name}: expected a scale for each of {rows} rows, one for the matrix, or {list(expected)} in blocks "
                f"of {block_rows} x {block_columns}, got {list(scale.shape)}: get config.json and the weights again"
            )
        raise CheckpointError(
            f"{name}: expected scales {list(expected)} for {list(weight.shape)} in blocks of {block_rows} x "
            f"{block_columns}, got {list(scale.shape)}: get config.json and the weights again"
        )
    by_row = scale.repeat_interleave(block_rows, -2)[..., :rows, :]
    return QuantizedParts(weight, by_row, group=min(block_columns, columns), source=source)


def count_nan(values: torch.Tensor) -> int:
    """Returns how many numbers of a float8_e4m3fn tensor are NaN, whose bytes are 0x7f and 0xff."""
    signed, unsigned = values.view(torch.int8), values.view(torch.uint8)
    if not values.numel() or (int(signed.max()) < 127 and int(unsigned.max()) < 255):
        return 0  # by two passes without a copy, which most weights end with
    return int((signed & 127).eq(127).sum())


def exponents_to_float(scale: torch.Tensor) -> torch.Tensor:
    """Returns float32 scales; uint8 and float8_e8m0fnu ones are exponents plus 127."""
    if scale.dtype in EXPONENTS:
        exponents = scale.view(torch.uint8)
        powers = torch.exp2(exponents.float() - 127)
        return torch.where(exponents == 255, torch.nan, powers)
    return scale.float()
