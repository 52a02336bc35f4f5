"""GPTQ: integers of 2, 4 or 8 bits in int32 words along the columns.

Tensors of a weight (github.com/AutoGPTQ/AutoGPTQ ``qlinear_cuda.py``, and GPTQModel ``nn_modules/qlinear``):
``qweight`` int32[in * bits / 32, out], ``qzeros`` int32[groups, out * bits / 32], ``scales`` [groups, out], ``g_idx``
int32[in]. Zero points are stored less one, but for ``checkpoint_format`` "gptq_v2". With ``desc_act`` the columns of a
group are not adjacent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from model_adapters.errors import CheckpointError
from model_adapters.loading.formats.parts import (
    FLOATS,
    WORDS,
    QuantizedParts,
    centred,
    require_kinds,
    require_shapes,
    unpack_words,
)
from model_adapters.loading.formats.settings import QuantizationSettings, compiled
from model_adapters.loading.formats.weight_groups import WeightGroup, groups_by_suffix

_ROLES = {"qweight": ".qweight", "qzeros": ".qzeros", "scales": ".scales"}
_KINDS = {
    "qweight": (2, WORDS),
    "qzeros": (2, WORDS),
    "scales": (2, FLOATS),
    "g_idx": (1, (torch.int32, torch.int64)),
}
_LAYOUTS = ("gptq", "gptq_v2")


def find(entries: Mapping[str, Any], settings: QuantizationSettings) -> list[WeightGroup]:
    """Returns the weights that are packed; refuses layouts of other kernels."""
    layout = settings.values.get("checkpoint_format") or _LAYOUTS[0]
    if layout not in _LAYOUTS:
        raise settings.refuse(f"checkpoint_format {layout!r} (expected gptq or gptq_v2)")
    return groups_by_suffix(entries, ".qweight", ".weight", _ROLES, {"g_idx": ".g_idx"})


def read(group: WeightGroup, tensors: Mapping[str, torch.Tensor], settings: QuantizationSettings) -> QuantizedParts:
    """Returns the parts of one weight, exactly."""
    bits, group_size = settings_of_module(group.module, settings)
    require_kinds(group.weight, _KINDS, tensors)
    qweight = tensors["qweight"]
    num_columns, num_rows = qweight.shape[0] * 32 // bits, qweight.shape[1]
    group_size = num_columns if group_size == -1 else group_size
    groups = -(-num_columns // group_size)
    require_shapes(
        group.weight, {"scales": (groups, num_rows), "qzeros": (groups, num_rows * bits // 32)}, dict(tensors)
    )
    values = unpack_words(qweight.T.contiguous(), bits, 1)
    zeros = unpack_words(tensors["qzeros"], bits, 1).T
    if (settings.values.get("checkpoint_format") or "gptq") != "gptq_v2":
        zeros = (zeros.to(torch.int16) + 1) & (2**bits - 1)  # the sum wraps, as in the kernels of GPTQ
    scale = tensors["scales"].T.float().contiguous()
    columns = column_order(group.weight, tensors.get("g_idx"), num_columns, group_size)
    if columns is not None:
        values = values[:, columns.long()]
    numbers, offset = centred(values, zeros.to(torch.uint8), scale, bits)
    return QuantizedParts(numbers, scale, offset, columns, bits=8 if bits == 8 else 4, group=group_size, source="gptq")


def settings_of_module(module: str, settings: QuantizationSettings) -> tuple[int, int]:
    """Returns bits and group size of a module.

    ``dynamic`` of GPTQModel has others for some of them.
    """
    values = dict(settings.values)
    for pattern, changes in settings.mapping("dynamic").items():
        if not isinstance(changes, Mapping):
            raise CheckpointError(f"{settings.file}: expected dynamic to map patterns to settings, got {changes!r}")
        if not pattern.startswith("-:") and compiled(pattern.removeprefix("+:"), settings.file).match(module):
            values |= changes
            break
    bits = values.get("bits")
    if bits not in (2, 4, 8):
        raise settings.refuse(f"bits {bits!r} (expected 2, 4 or 8)", "use a checkpoint in 4 bits")
    group_size = values.get("group_size", -1)
    if not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
        raise CheckpointError(f"{settings.file}: expected group_size to be -1 or at least 1, got {group_size!r}")
    return bits, group_size


def column_order(name: str, group_of: torch.Tensor | None, num_columns: int, group_size: int) -> torch.Tensor | None:
    """Returns the order that makes the columns of a group adjacent, int32[in].

    None where they are.

    Args:
        name: Name of the weight, for errors.
        group_of: The group of each column, int32[in], or None.
        num_columns: Columns of the weight.
        group_size: Columns of a group.
    """
    regular = torch.arange(num_columns, dtype=torch.int32) // group_size
    if group_of is None or torch.equal(group_of.to(torch.int32), regular):
        return None
    if group_of.shape != (num_columns,):
        raise CheckpointError(f"{name}: expected g_idx [{num_columns}], got {list(group_of.shape)}")
    order = torch.argsort(group_of.long(), stable=True).to(torch.int32)
    if not torch.equal(group_of[order.long()].to(torch.int32), regular):
        raise CheckpointError(
            f"{name}: expected g_idx to give each group {group_size} columns, got others: get the weights again"
        )
    return order
