"""torchao tensors in safetensors: int8, int4 and float8, an element for each number.

A weight ``m.weight`` lies as ``m._weight_qdata``, ``m._weight_scale`` …; the header of the file has JSON of its class
and attributes (`torchao.prototype.safetensors.safetensors_support`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open

from model_adapters.errors import CheckpointError
from model_adapters.loading.formats import fp8
from model_adapters.loading.formats.parts import QuantizedParts
from model_adapters.loading.formats.settings import QuantizationSettings
from model_adapters.loading.formats.weight_groups import WeightGroup

_NAME = "torchao"
_READ = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")


def find(entries: Mapping[str, Any], settings: QuantizationSettings) -> list[WeightGroup]:
    """Returns the weights that the files' headers describe; refuses classes that are not read."""
    described: dict[str, str] = {}
    for file in sorted({entry.file for entry in entries.values() if not isinstance(entry, torch.Tensor)}):
        with safe_open(file, framework="pt") as handle:
            described |= handle.metadata() or {}
    groups = []
    for name, text in sorted(described.items()):
        said = _json(text)
        if "." not in name or not isinstance(said, dict) or said.get("_type") in ("Tensor", None):
            continue
        if said["_type"] not in _READ:
            raise settings.refuse(
                f"tensors of class {said['_type']} (expected one of {', '.join(_READ)})",
                "quantize it with IntxWeightOnlyConfig or Int8WeightOnlyConfig of torchao, whose layouts are plain",
            )
        module, _, leaf = name.rpartition(".")
        tensors = {part: f"{module}._{leaf}_{part}" for part in said.get("_tensor_data_names", ())}
        if missing := [each for each in tensors.values() if each not in entries]:
            raise CheckpointError(f"{name}: the files lack {missing[0]}, which their header names")
        groups.append(WeightGroup(name, tensors, {"type": said["_type"], "data": json.dumps(said["_data"])}))
    return groups


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def read(group: WeightGroup, tensors: Mapping[str, torch.Tensor], settings: QuantizationSettings) -> QuantizedParts:
    """Returns the parts of one weight, exactly; activations are not rounded."""
    kind, data = group.metadata["type"], json.loads(group.metadata["data"])
    if tensors.get("act_pre_scale") is not None:
        raise settings.refuse("act_pre_scale (activations that are scaled)")
    block = data.get("block_size")
    qdata, scale = tensors["qdata"], tensors["scale"].float()
    if kind == "Float8Tensor":
        return _read_float8(group.weight, qdata, scale)
    rows = qdata.shape[0]
    if (
        block is None
        or scale.shape[0] not in (1, rows)
        or (any(size != 1 for size in block[:-1]) and scale.shape[0] != 1)
    ):
        raise settings.refuse(f"block_size {block} (expected one row)")
    scale = scale.reshape(scale.shape[0], -1).expand(rows, -1)
    zeros, offset = tensors.get("zero_point"), None
    if zeros is not None and bool(zeros.any()):
        offset = -(zeros.float().reshape(zeros.shape[0], -1).expand(rows, -1) * scale)
    four = str((data.get("target_dtype") or {}).get("_data", "")) in ("int4", "int3", "int2", "int1")
    return QuantizedParts(qdata, scale, offset, bits=4 if four else 8, group=int(block[-1]), source=_NAME)


def _read_float8(name: str, qdata: torch.Tensor, scale: torch.Tensor) -> QuantizedParts:
    block = None
    if scale.numel() > 1 and scale.shape[-1] > 1:
        block = [qdata.shape[0] // scale.shape[0], qdata.shape[1] // scale.shape[1]]
    return fp8.of_float8(name, qdata, scale, block, _NAME)
