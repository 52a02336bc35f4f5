"""AWQ, version "gemm": integers of 4 bits in int32 words along the rows of the matrix.

Tensors of a weight (github.com/casper-hansen/AutoAWQ ``awq/modules/linear/gemm.py``): ``qweight`` int32[in, out / 8],
``qzeros`` int32[groups, out / 8], ``scales`` [groups, out]. A word holds rows 0 2 4 6 1 3 5 7 of its eight.
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
from model_adapters.loading.formats.settings import QuantizationSettings
from model_adapters.loading.formats.weight_groups import WeightGroup, groups_by_suffix

_BITS = 4
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of its eight rows."""


def find(entries: Mapping[str, Any], settings: QuantizationSettings) -> list[WeightGroup]:
    """Returns the weights that are packed."""
    version = str(settings.values.get("version") or settings.values.get("format") or "gemm").lower()
    if version != "gemm":
        raise settings.refuse(f"version {version!r} (expected gemm)", "use a checkpoint of the version gemm")
    bits = settings.values.get("bits", settings.values.get("w_bit", _BITS))
    if bits != _BITS:
        raise settings.refuse(f"bits {bits!r} (expected 4)")
    roles = {"qweight": ".qweight", "qzeros": ".qzeros", "scales": ".scales"}
    return groups_by_suffix(entries, ".qweight", ".weight", roles, {})


def read(group: WeightGroup, tensors: Mapping[str, torch.Tensor], settings: QuantizationSettings) -> QuantizedParts:
    """Returns the parts of one weight, exactly."""
    require_kinds(group.weight, {"qweight": (2, WORDS), "qzeros": (2, WORDS), "scales": (2, FLOATS)}, tensors)
    qweight = tensors["qweight"]
    num_columns, num_rows = qweight.shape[0], qweight.shape[1] * 8
    group_size = settings.values.get("group_size", settings.values.get("q_group_size", 128))
    if not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
        raise CheckpointError(f"{settings.file}: expected group_size to be -1 or at least 1, got {group_size!r}")
    group_size = num_columns if group_size == -1 else group_size
    groups = -(-num_columns // group_size)
    require_shapes(group.weight, {"scales": (groups, num_rows), "qzeros": (groups, num_rows // 8)}, dict(tensors))
    scale = tensors["scales"].T.float().contiguous()
    numbers, offset = centred(_rows(qweight).T.contiguous(), _rows(tensors["qzeros"]).T, scale, _BITS)
    return QuantizedParts(numbers, scale, offset, bits=_BITS, group=group_size, source="awq")


def _rows(words: torch.Tensor) -> torch.Tensor:
    """Returns uint8[n, out] of int32[n, out / 8], in the order of the matrix."""
    numbers = unpack_words(words, _BITS, 1)
    return numbers.unflatten(1, (-1, 8))[..., _PLACES].flatten(1)
