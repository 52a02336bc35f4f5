"""A quantized weight of a checkpoint as torch tensors, before it is placed on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from model_adapters.errors import CheckpointError, InvalidArgumentError
from model_adapters.ops.quantized_weight import ActDtype


@dataclasses.dataclass(frozen=True)
class QuantizedParts:
    """A matrix [..., out, in] in parts.

    ``weight[o, i] = values[o, i] * scale[o, i // group] + offset[o, i // group]``.

    Attributes:
        values: Stored numbers ``[..., out, in]``, int8, uint8 or float8_e4m3fn.
        scale: float32 ``[..., out, ceil(in / group)]``.
        offset: Like `scale`; None is zero.
        columns: int32[in]: stored column i is column ``columns[i]`` of the matrix; None is the same order.
        bits: Bits of one stored number: 8, or 4 if 4 bits hold all values.
        group: Number of columns that share a scale.
        act_dtype: What the checkpoint rounds activations to.
        act_scale: Scale of the activations if the checkpoint fixes it.
        transposed: Model code has the matrix as [..., in, out].
        source: Name of the format, for reports.
        table: The 16 numbers that `values` are indices of; None: `values` are numbers.
    """

    values: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    bits: int = 8
    group: int = 0
    act_dtype: ActDtype = "none"
    act_scale: float | None = None
    transposed: bool = False
    source: str = ""
    table: tuple[float, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that the weight has for model code."""
        *lead, rows, columns = self.values.shape
        return (*lead, columns, rows) if self.transposed else (*lead, rows, columns)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be equal for two weights to be parts of one."""
        return (
            self.values.dtype,
            self.bits,
            self.group,
            self.act_dtype,
            self.act_scale,
            self.transposed,
            self.source,
            self.table,
        )

    def by_row(self, change: Any) -> QuantizedParts:
        """Returns the weight with ``change(tensor)`` of values, scale and offset.

        `change` works on rows.
        """
        offset = None if self.offset is None else change(self.offset)
        return dataclasses.replace(self, values=change(self.values), scale=change(self.scale), offset=offset)

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the matrix in the shape that model code expects, computed in float32."""
        num_columns = self.values.shape[-1]

        def spread(by_group: torch.Tensor) -> torch.Tensor:
            return by_group.float().repeat_interleave(self.group, -1)[..., :num_columns]

        numbers = self.values.float() if self.table is None else torch.tensor(self.table)[self.values.long()]
        dense = numbers * spread(self.scale)
        if self.offset is not None:
            dense = dense + spread(self.offset)
        if self.columns is not None:
            dense = dense[..., torch.argsort(self.columns)]
        return (dense.mT if self.transposed else dense).to(dtype)


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of scales."""
WORDS = (torch.int32,)
"""Dtype of words that hold several numbers."""


def require_kinds(
    name: str, expected: Mapping[str, tuple[int, tuple[torch.dtype, ...]]], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Raises CheckpointError for a tensor of another dtype or number of axes than expected.

    Args:
        name: Name of the weight.
        expected: Number of axes and dtypes by role; roles that `tensors` lacks are left out.
        tensors: Tensors by role.
    """
    for role, (num_axes, dtypes) in expected.items():
        tensor = tensors.get(role)
        if tensor is not None and (tensor.ndim != num_axes or tensor.dtype not in dtypes):
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise CheckpointError(
                f"{name}: expected {role} in {kinds} with {num_axes} axes, got "
                f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}: get the weights again"
            )


def require_shapes(name: str, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises CheckpointError for a tensor that is missing or has another shape than `expected`.

    It names the first of `tensors`.
    """
    for role, shape in expected.items():
        if role not in tensors:
            raise CheckpointError(f"{name}: expected a tensor {role} with the quantized weight, got none")
        if tuple(tensors[role].shape) != shape:
            raise CheckpointError(
                f"{name}: expected {role} {list(shape)}, got {list(tensors[role].shape)}: bits or group size of "
                "quantization_config do not fit the tensors; get config.json and the weights again"
            )


def by_rows(name: str, scale: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Returns a scale float32[rows or 1, groups] for each row of a matrix."""
    if scale.shape[-2] not in (1, num_rows):
        raise CheckpointError(f"{name}: expected a scale for each of {num_rows} rows, got {list(scale.shape)}")
    return scale.float().expand(*scale.shape[:-2], num_rows, scale.shape[-1])


def check_numbers(name: str, parts: QuantizedParts) -> QuantizedParts:
    """Returns `parts`, once they are checked.

    Raises CheckpointError for scales or offsets that are NaN or infinite, and for bad columns.
    """
    for role in ("scale", "offset"):
        tensor = getattr(parts, role)
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{name}: expected a finite {role}, got NaN or infinity; get the files again")
    if parts.columns is not None:
        order = torch.sort(parts.columns.long()).values
        if not torch.equal(order, torch.arange(parts.values.shape[-1])):
            raise InvalidArgumentError(f"{name}: expected columns that order all columns once, got others")
    return parts


def unpack_words(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Returns uint8 numbers of `bits` bits packed along `dim` of int32 words, lowest first."""
    as_bytes = words.movedim(dim, -1).contiguous().view(torch.uint8)  # little-endian: the lowest byte first
    return unpack_bytes(as_bytes, bits).movedim(-1, dim)


def unpack_bytes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns uint8 numbers of `bits` bits packed in uint8 along the last axis, lowest first.

    `bits` is 2, 4 or 8.
    """
    if bits == 8:
        return packed
    pieces = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(pieces, -1).flatten(-2)


def centred(
    values: torch.Tensor, zero: torch.Tensor | None, scale: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns int8 values and the offset of unsigned numbers ``(values - zero) * scale``.

    A zero point in the middle of the range, that of symmetric checkpoints, is subtracted: there is no offset then.

    Args:
        values: uint8[..., out, in].
        zero: Zero points [..., out, groups]; None: the middle of the range.
        scale: float32[..., out, groups].
        bits: Bits of a number.
    """
    middle = 2 ** (bits - 1)
    if zero is None or bool((zero == middle).all()):
        return (values - middle).view(torch.int8), None  # modulo 256, without a wider copy
    if bits == 8:  # unsigned 8-bit numbers do not fit in int8
        values, zero = (values - middle).view(torch.int8), zero.to(torch.int16) - middle
    return values.to(torch.int8), -(zero.float() * scale)
