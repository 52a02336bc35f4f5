"""MXFP4 and MXFP8: small floats in groups of 32 columns with a power of two as their scale.

gpt-oss has its experts as ``*_blocks`` uint8[E, out, in / 32, 16] and ``*_scales`` uint8[E, out, in / 32], exponents
plus 127, two numbers in a byte with the first in the low bits (`transformers.integrations.mxfp4`). Its classes have the
experts as [E, in, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from model_adapters.errors import CheckpointError
from model_adapters.loading.formats import fp8
from model_adapters.loading.formats.parts import QuantizedParts, require_kinds, require_shapes, unpack_bytes
from model_adapters.loading.formats.settings import QuantizationSettings
from model_adapters.loading.formats.weight_groups import WeightGroup, groups_by_suffix
from model_adapters.ops.quantized_weight import FP4_DOUBLED

_GROUP = 32


def find(entries: Mapping[str, Any], settings: QuantizationSettings) -> list[WeightGroup]:
    """Returns the experts in blocks."""
    return groups_by_suffix(entries, "_blocks", "", {"blocks": "_blocks", "scales": "_scales"}, {})


def read(group: WeightGroup, tensors: Mapping[str, torch.Tensor], settings: QuantizationSettings) -> QuantizedParts:
    """Returns the parts of the experts, exactly: halves as whole numbers, the scales halved."""
    blocks = tensors["blocks"]
    if blocks.dtype != torch.uint8 or blocks.ndim < 3 or blocks.shape[-1] != _GROUP // 2:
        raise CheckpointError(f"{group.weight}: expected blocks uint8[..., out, in / 32, 16], got {list(blocks.shape)}")
    require_kinds(group.weight, {"scales": (blocks.ndim - 1, (torch.uint8,))}, tensors)
    require_shapes(group.weight, {"scales": tuple(blocks.shape[:-1])}, dict(tensors))
    codes = unpack_bytes(blocks, 4).flatten(-2)
    numbers = torch.tensor(FP4_DOUBLED, dtype=torch.int8)[codes.long()]
    scale = fp8.exponents_to_float(tensors["scales"]) / 2
    return QuantizedParts(numbers, scale, bits=4, group=_GROUP, transposed=True, source="mxfp4")


def find_fp8(entries: Mapping[str, Any], settings: QuantizationSettings) -> list[WeightGroup]:
    """Returns the weights in MXFP8."""
    return fp8.find(entries, settings)


def read_fp8(group: WeightGroup, tensors: Mapping[str, torch.Tensor], settings: QuantizationSettings) -> QuantizedParts:
    """Returns the parts of a weight in MXFP8, exactly."""
    return fp8.of_float8(group.weight, tensors["weight"], tensors["scale"], (1, _GROUP), "mxfp8")
