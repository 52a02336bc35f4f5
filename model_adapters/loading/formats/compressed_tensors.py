"""compressed-tensors: the checkpoints of llm-compressor, also many of vLLM's and Red Hat's.

Tensors of a weight by ``format`` (github.com/vllm-project/compressed-tensors ``compressors/``):

* int-quantized, float-quantized, naive-quantized: ``weight`` int8 or float8[out, in], ``weight_scale``,
  ``weight_zero_point``;
* pack-quantized: ``weight_packed`` int32[out, in * bits / 32] of numbers plus 2^(bits - 1), ``weight_shape``,
  ``weight_zero_point`` packed along the rows, ``weight_g_idx`` int32[in];
* nvfp4-pack-quantized: ``weight_packed`` uint8[out, in / 2], ``weight_scale`` float8[out, in / 16],
  ``weight_global_scale``, by which the scales are divided;
* mxfp4-pack-quantized, mxfp8-quantized: ``weight_scale`` uint8, exponents plus 127.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from model_adapters.errors import CheckpointError
from model_adapters.loading.formats import fp8
from model_adapters.loading.formats.gptq import column_order
from model_adapters.loading.formats.parts import (
    FLOATS,
    WORDS,
    QuantizedParts,
    by_rows,
    centred,
    require_kinds,
    require_shapes,
    unpack_bytes,
    unpack_words,
)
from model_adapters.loading.formats.settings import QuantizationSettings, compiled, matches
from model_adapters.loading.formats.weight_groups import WeightGroup, groups_by_suffix
from model_adapters.ops.quantized_weight import FP4_DOUBLED, ActDtype

_PLAIN = ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized")
_FP4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
_READ = (*_PLAIN, "pack-quantized", *_FP4, "mixed-precision")
_KINDS = {
    "shape": (1, (torch.int32, torch.int64)),
    "g_idx": (1, (torch.int32, torch.int64)),
}
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
"""How the scales of weights are laid out."""
_OPTIONAL = {
    "zero_point": ".weight_zero_point",
    "g_idx": ".weight_g_idx",
    "shape": ".weight_shape",
    "global_scale": ".weight_global_scale",
    "input_scale": ".input_scale",
    "input_zero_point": ".input_zero_point",
    "input_global_scale": ".input_global_scale",
}


def find(entries: Mapping[str, Any], settings: QuantizationSettings) -> list[WeightGroup]:
    """Returns the weights with a scale; refuses settings that are not read."""
    values = settings.values
    formats = {str(values.get("format", "dense"))} | {str(group.get("format")) for group in _groups(settings).values()}
    for unsupported in sorted(formats - {*_READ, "dense", "None"}):
        raise settings.refuse(f"format {unsupported!r} (expected one of {', '.join(_READ)})")
    if values.get("transform_config"):
        raise settings.refuse("transform_config (rotated weights)")
    sparsity = settings.mapping("sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise settings.refuse(f"sparsity_config.format {sparsity!r}")
    packed = {"packed": ".weight_packed", "scale": ".weight_scale"}
    found = groups_by_suffix(entries, ".weight_packed", ".weight", packed, _OPTIONAL)
    stored = {"weight": ".weight", "scale": ".weight_scale"}
    known = {group.weight for group in found}
    more = groups_by_suffix(entries, ".weight_scale", ".weight", stored, _OPTIONAL)
    return found + [group for group in more if group.weight not in known]


def _groups(settings: QuantizationSettings) -> Mapping[str, Any]:
    groups = settings.mapping("config_groups")
    if not groups:
        raise CheckpointError(f"{settings.file}: expected config_groups in quantization_config, got none")
    for name, group in groups.items():
        if (fault := _fault_of(group, settings)) is not None:
            raise CheckpointError(f"{settings.file}: {name} of config_groups: expected {fault}; get config.json again")
    return groups


def _fault_of(group: Any, settings: QuantizationSettings) -> str | None:
    """Returns what a group of settings should have been, and is; None if nothing is wrong."""
    if not isinstance(group, Mapping):
        return f"an object, got {group!r}"
    targets, weights = group.get("targets") or [], group.get("weights") or {}
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        return f"targets as a list of modules, got {targets!r}"
    for pattern in (each[3:] for each in targets if each.startswith("re:")):
        compiled(pattern, settings.file)
    for key in ("weights", "input_activations"):
        if not isinstance(group.get(key) or {}, Mapping):
            return f"{key} as an object, got {group[key]!r}"
    kind, strategy, size = weights.get("type", "int"), weights.get("strategy"), weights.get("group_size")
    if kind not in ("int", "float"):
        return f"weights of type int or float, got {kind!r}"
    if type(bits := weights.get("num_bits", 8)) is not int:
        return f"num_bits as a whole number, got {bits!r}"
    if strategy not in (None, *_STRATEGIES):
        return f"a strategy among {', '.join(_STRATEGIES)}, got {strategy!r}"
    if size not in (None, -1) and not (isinstance(size, int) and size >= 1):
        return f"group_size to be -1 or at least 1, got {size!r}"
    block = weights.get("block_structure")
    if strategy == "block" and not fp8.is_block(block):
        return f"block_structure as rows and columns, got {block!r}"
    return None


def scheme_of_module(module: str, settings: QuantizationSettings) -> Mapping[str, Any]:
    """Returns the settings of a module: those that name it, its class, or the only ones.

    Raises:
        CheckpointError: several groups, none of which is for the module.
    """
    groups = list(_groups(settings).values())
    for group in groups:
        if any(matches(target, module) for target in group.get("targets") or ()):
            return group
    for group in groups:
        if len(groups) == 1 or "Linear" in (group.get("targets") or ()):
            return group
    raise CheckpointError(
        f"{settings.file}: expected a group of config_groups for {module}, got none among {len(groups)}: "
        "get config.json again"
    )


def read(group: WeightGroup, tensors: Mapping[str, torch.Tensor], settings: QuantizationSettings) -> QuantizedParts:
    """Returns the parts of one weight, exactly; activations are rounded as the checkpoint says."""
    scheme, name = scheme_of_module(group.module, settings), group.weight
    if "scale" not in tensors:
        raise CheckpointError(f"{name}: expected weight_scale with the weight in the files, got none")
    require_kinds(name, _KINDS, tensors)
    weights = scheme.get("weights") or {}
    if weights.get("symmetric") is False and weights.get("type") != "float" and "zero_point" not in tensors:
        raise CheckpointError(
            f"{settings.file}: symmetric is false, so expected weight_zero_point with {name} in the files, got none: "
            "get config.json and the weights again"
        )
    if "packed" in tensors:
        if weights.get("type") == "float":
            return _read_fp4(name, tensors)
        parts = _read_packed(name, tensors, weights, settings)
    elif "weight" not in tensors:
        raise CheckpointError(f"{name}: expected the weight of a scale in the files, got none")
    elif tensors["weight"].dtype == torch.float8_e4m3fn:
        parts = _read_float8(name, tensors, weights)
    else:
        parts = _read_int8(name, tensors, weights)
    act_dtype, act_scale = _activations(name, scheme, tensors)
    return QuantizedParts(
        parts.values,
        parts.scale,
        parts.offset,
        parts.columns,
        parts.bits,
        parts.group,
        act_dtype,
        act_scale,
        source=_NAME,
    )


_NAME = "compressed-tensors"


def _activations(
    name: str, scheme: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[ActDtype, float | None]:
    """Returns what activations are rounded to, and their scale if it is fixed."""
    inputs = scheme.get("input_activations")
    if not inputs or inputs.get("num_bits") != 8 or inputs.get("strategy") not in ("token", "tensor"):
        return "none", None  # finer than a row (groups of fp8 blocks): not rounded, which is more exact
    if not inputs.get("symmetric", True):
        return "none", None
    kind: ActDtype = "int8" if inputs.get("type") == "int" else "float8_e4m3fn"
    fixed = tensors.get("input_scale")
    if inputs.get("dynamic") or fixed is None:
        return kind, None
    if fixed.numel() != 1:
        raise CheckpointError(f"{name}: expected one input_scale, got {list(fixed.shape)}")
    if not 0 < float(fixed) < math.inf:
        raise CheckpointError(f"{name}: expected a positive input_scale, got {float(fixed)}: get the weights again")
    return kind, float(fixed)


def _require_rows(name: str, scale: torch.Tensor, num_rows: int, weights: Mapping[str, Any]) -> None:
    """Raises CheckpointError for another number of scales than the strategy has."""
    expected = {"channel": (num_rows,), "tensor": (1, num_rows)}.get(str(weights.get("strategy")))
    if expected is not None and scale.numel() not in expected:
        raise CheckpointError(f"{name}: expected a scale for each of {num_rows} rows, got {list(scale.shape)}")


def _scale_of(name: str, scale: torch.Tensor, num_rows: int) -> torch.Tensor:
    scale = scale.float()
    return by_rows(name, scale.reshape(-1, 1) if scale.ndim < 2 else scale, num_rows)


def _zero_of(name: str, zero: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns zero points that are not packed, once they are integers, one for each scale."""
    if zero.is_floating_point() or zero.dtype in (torch.bool, torch.uint8) or zero.numel() != scale.numel():
        raise CheckpointError(
            f"{name}: expected weight_zero_point in int8{list(scale.shape)}, got "
            f"{str(zero.dtype).removeprefix('torch.')}{list(zero.shape)}: get the weights again"
        )
    return zero


def _group_size(name: str, weights: Mapping[str, Any], num_columns: int, num_groups: int) -> int:
    size = weights.get("group_size") if weights.get("strategy") in ("group", "tensor_group", None) else None
    size = num_columns if size in (None, -1) else int(size)
    if -(-num_columns // size) != num_groups:
        raise CheckpointError(
            f"{name}: expected {-(-num_columns // size)} scales in a row of {num_columns} columns in groups of {size}, "
            f"got {num_groups}: get config.json and the weights again"
        )
    return size


def _read_float8(name: str, tensors: Mapping[str, torch.Tensor], weights: Mapping[str, Any]) -> QuantizedParts:
    weight, scale = tensors["weight"], tensors["scale"]
    if weights.get("group_size") and weights.get("strategy") != "block":
        scale = fp8.exponents_to_float(scale)
        size = _group_size(name, weights, weight.shape[-1], scale.shape[-1])
        return QuantizedParts(weight, by_rows(name, scale, weight.shape[0]), group=size)
    _require_rows(name, scale, weight.shape[0], weights)
    block = weights.get("block_structure") if weights.get("strategy") == "block" else None
    return fp8.of_float8(name, weight, scale, block, _NAME)


def _read_int8(name: str, tensors: Mapping[str, torch.Tensor], weights: Mapping[str, Any]) -> QuantizedParts:
    weight, zero = tensors["weight"], tensors.get("zero_point")
    require_kinds(name, {"scale": (tensors["scale"].ndim, FLOATS)}, tensors)
    if weight.dtype != torch.int8 or weights.get("num_bits", 8) > 8:
        raise CheckpointError(f"{name}: expected int8, got {weight.dtype}: get config.json again")
    num_rows, num_columns = weight.shape
    _require_rows(name, tensors["scale"], num_rows, weights)
    scale = _scale_of(name, tensors["scale"], num_rows)
    group = _group_size(name, weights, num_columns, scale.shape[-1])
    offset = None
    if zero is not None and bool(_zero_of(name, zero, tensors["scale"]).any()):
        offset = -(_scale_of(name, zero, num_rows) * scale)
    columns = column_order(name, tensors.get("g_idx"), num_columns, group)
    values = weight if columns is None else weight[:, columns.long()]
    return QuantizedParts(values, scale, offset, columns, bits=8, group=group)


def _read_packed(
    name: str, tensors: Mapping[str, torch.Tensor], weights: Mapping[str, Any], settings: QuantizationSettings
) -> QuantizedParts:
    bits = weights.get("num_bits")
    if bits not in (4, 8):
        raise settings.refuse(f"num_bits {bits!r} (expected 4 or 8)")
    require_kinds(name, {"packed": (2, WORDS), "scale": (tensors["scale"].ndim, FLOATS)}, tensors)
    packed, shape = tensors["packed"], tensors.get("shape")
    num_rows = packed.shape[0]
    num_columns = packed.shape[1] * 32 // bits if shape is None else int(shape[1])
    require_shapes(name, {"packed": (num_rows, -(-num_columns * bits // 32))}, dict(tensors))
    if shape is not None and int(shape[0]) != num_rows:
        raise CheckpointError(f"{name}: expected weight_shape {[num_rows, num_columns]}, got {shape.tolist()}")
    _require_rows(name, tensors["scale"], num_rows, weights)
    values = unpack_words(packed, bits, 1)[:, :num_columns]
    scale = _scale_of(name, tensors["scale"], num_rows)
    group = _group_size(name, weights, num_columns, scale.shape[-1])
    zero = tensors.get("zero_point")
    if zero is not None and zero.dtype == torch.int32:
        require_shapes(name, {"zero_point": (-(-num_rows * bits // 32), scale.shape[-1])}, dict(tensors))
        zero = unpack_words(zero, bits, 0)[:num_rows]
    elif zero is not None:  # not packed, signed
        zero = (_scale_of(name, _zero_of(name, zero, tensors["scale"]), num_rows) + 2 ** (bits - 1)).to(torch.uint8)
    columns = column_order(name, tensors.get("g_idx"), num_columns, group)
    if columns is not None:
        values = values[:, columns.long()]
    numbers, offset = centred(values, zero, scale, bits)
    return QuantizedParts(numbers, scale, offset, columns, bits=bits, group=group)


def _read_fp4(name: str, tensors: Mapping[str, torch.Tensor]) -> QuantizedParts:
    """Returns halves as whole numbers, the scales halved.

    4-bit floats are 0, 0.5, 1, 1.5, 2, 3, 4, 6.
    """
    kinds = {"packed": (2, (torch.uint8,)), "scale": (2, (*FLOATS, torch.float8_e4m3fn, *fp8.EXPONENTS))}
    require_kinds(name, kinds, tensors)
    divisor = tensors.get("global_scale")
    if divisor is not None:
        require_kinds(name, {"global_scale": (divisor.ndim, FLOATS)}, tensors)
    codes = unpack_bytes(tensors["packed"], 4)
    numbers = torch.tensor(FP4_DOUBLED, dtype=torch.int8)[codes.long()]
    scale = fp8.exponents_to_float(tensors["scale"])
    needs_divisor = tensors["scale"].dtype not in fp8.EXPONENTS
    if needs_divisor != (divisor is not None) or (divisor is not None and divisor.numel() != 1):
        found = "none" if divisor is None else f"{list(divisor.shape)}"
        wanted = "one weight_global_scale" if needs_divisor else "no weight_global_scale"
        raise CheckpointError(f"{name}: expected {wanted}, got {found}: get the weights again")
    if divisor is not None:
        scale = scale / divisor.float()
    group = codes.shape[-1] // max(1, scale.shape[-1])
    require_shapes(name, {"scale": (codes.shape[0], codes.shape[-1] // group)}, dict(tensors))
    return QuantizedParts(numbers, scale / 2, bits=4, group=group, source=_NAME)
