"""Quantized weights: small integers or floats, with a scale and offset per column group.

``weight[o, i] = values[o, i] * scale[o, i // group] + offset[o, i // group]``

This form holds int8, int4, fp8 and fp4 weights of all common formats exactly. The offset is a float and not an integer
zero point, because some formats (GGUF Q4_1 and Q4_K, HQQ) have minima that are no multiple of the scale.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import quantized_layout
from model_adapters.ops.quantized_layout import BLOCK_ROWS

ActDtype = Literal["none", "int8", "float8_e4m3fn"]
Layout = Literal["plain", "cpu"]


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The static part of a quantized weight: a program is compiled for it.

    Attributes:
        bits: Bits of one stored number: 8 or 4.
        group: Number of columns that share a scale; the last group of a row may be shorter.
        act_dtype: What activations are rounded to for a product, with one scale for each `act_group`
            columns of a row; "none" leaves them.
        dtype: Name of the dtype that the weight has for model code, such as "bfloat16".
        transposed: Model code has the matrix as [in, out] (`Conv1D`, some experts); it is stored as [out, in].
        layout: "plain" is ``values[..., out, in]``, one element a number; "cpu" is the order of the C++ kernels
            (`model_adapters.ops.quantized_layout`).
        source: Format or preset that the weight comes from, for reports: "gptq", "int8".
        act_group: Columns that share a scale of activations; None is `group`.
        matrix: Sizes ``(out, in)``, where the layout pads them; None in the plain layout.
        zero: What the "cpu" layout has added to numbers of 4 bits.
        act_scale: Scale of the activations if a checkpoint fixes it; None computes one for each row.
        table: The 16 numbers that values of 4 bits are indices of (nf4, fp4); None: values are numbers.
    """

    bits: int
    group: int
    act_dtype: ActDtype = "none"
    dtype: str = "bfloat16"
    transposed: bool = False
    layout: Layout = "plain"
    source: str = ""
    act_group: int | None = None
    matrix: tuple[int, int] | None = None
    zero: int = 8
    act_scale: float | None = None
    table: tuple[float, ...] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [out, in], or one for each expert [E, out, in], in the place of a weight.

    Attributes:
        values: In the plain layout numbers ``[..., out, in]``: int8, uint8, int4, uint4, float8_e4m3fn, float4_e2m1fn.
            On CPUs 4-bit integers are int8: arrays of jnp.int4 fail there in programs compiled ahead of time.
        scale: ``[..., out, ceil(in / group)]``, float32, bfloat16 or float16.
        offset: Like `scale`; None is zero.
        columns: int32[in], the order in which columns of the matrix are stored: ``x[:, columns]`` meets `values`.
            None is the order of model code.
        scheme: The static part.
    """

    values: jax.Array
    scale: jax.Array
    offset: jax.Array | None
    columns: jax.Array | None
    scheme: Scheme = dataclasses.field(metadata={"static": True})

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape ``(..., out, in)``."""
        if self.scheme.matrix is None:
            return tuple(self.values.shape)
        return (*self.values.shape[:-4], *self.scheme.matrix)

    @property
    def num_columns(self) -> int:
        """Length of the dimension that a product sums over."""
        return self.stored_shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that the weight has for model code."""
        *lead, rows, columns = self.stored_shape
        return (*lead, columns, rows) if self.scheme.transposed else (*lead, rows, columns)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """Dtype that the weight has for model code."""
        return jnp.dtype(self.scheme.dtype)

    @property
    def nbytes(self) -> int:
        """Number of bytes that a product reads."""
        return sum(int(part.nbytes) for part in jax.tree.leaves(self))

    def turned(self) -> QuantizedWeight:
        """Returns the same numbers for model code that has exchanged the last two axes."""
        scheme = dataclasses.replace(self.scheme, transposed=not self.scheme.transposed)
        return dataclasses.replace(self, scheme=scheme)

    def plain(self) -> QuantizedWeight:
        """Returns the same numbers in the plain layout."""
        scheme = self.scheme
        if scheme.matrix is None:
            return self
        values = quantized_layout.from_steps(self.values, scheme.bits, scheme.zero, *scheme.matrix)
        scale, offset = (
            None if part is None else quantized_layout.from_blocks(part, scheme.matrix[0])
            for part in (self.scale, self.offset)
        )
        assert scale is not None
        return QuantizedWeight(values, scale, offset, self.columns, _plain_scheme(scheme))

    def unpacked(self) -> jax.Array:
        """Returns the dense weight, in the shape and dtype that model code expects."""
        dense = dequantize(self)
        return jnp.swapaxes(dense, -1, -2) if self.scheme.transposed else dense


def make_quantized(
    name: str,
    values: Any,
    scale: Any,
    offset: Any | None = None,
    columns: Any | None = None,
    *,
    scheme: Scheme,
) -> QuantizedWeight:
    """Returns a quantized weight of host or device arrays in the plain layout.

    Its parts are checked to fit together.

    Args:
        name: Name of the weight, for errors.
        values: ``[..., out, in]``.
        scale: ``[..., out, ceil(in / group)]``; negative ones are valid (GGUF Q4_0 has them).
        offset: Like `scale`, or None.
        columns: int32[in], a permutation, or None.
        scheme: The static part, with layout "plain".

    Raises:
        InvalidArgumentError: shapes that do not fit; NaN or infinite scales; columns that are no permutation.
    """
    num_columns = values.shape[-1]
    expected = (*values.shape[:-1], -(-num_columns // scheme.group))
    for part, array in (("scale", scale), ("offset", offset)):
        if array is not None and tuple(array.shape) != expected:
            raise InvalidArgumentError(
                f"{name}: expected {part} {list(expected)} for values {list(values.shape)} in groups of "
                f"{scheme.group}, got {list(array.shape)}"
            )
        if array is not None and not np.isfinite(np.asarray(array, np.float32)).all():
            raise InvalidArgumentError(f"{name}: expected a finite {part}, got NaN or infinity; get the files again")
    if columns is not None and sorted(np.asarray(columns).tolist()) != list(range(num_columns)):
        raise InvalidArgumentError(f"{name}: expected columns that order all {num_columns} columns, got others")
    shift, order = (None if part is None else jnp.asarray(part) for part in (offset, columns))
    return QuantizedWeight(jnp.asarray(values), jnp.asarray(scale), shift, order, scheme)


def _plain_scheme(scheme: Scheme) -> Scheme:
    return dataclasses.replace(scheme, layout="plain", matrix=None)


def _over_columns(by_group: jax.Array, group: int, num_columns: int) -> jax.Array:
    """Returns ``[..., out, groups]`` repeated to ``[..., out, in]``.

    Each column has the number of its group.
    """
    if by_group.shape[-1] == 1:
        return by_group
    return jnp.repeat(by_group, group, axis=-1, total_repeat_length=by_group.shape[-1] * group)[..., :num_columns]


def _looked_up(values: jax.Array, scheme: Scheme) -> jax.Array:
    return values if scheme.table is None else jnp.asarray(scheme.table, jnp.float32)[values.astype(jnp.int32)]


def _rows_of(values: jax.Array, scale: jax.Array, offset: jax.Array | None, group: int) -> jax.Array:
    """Returns float32[..., in] of stored rows, their columns in the stored order."""
    num_columns = values.shape[-1]
    rows = values.astype(jnp.float32) * _over_columns(scale.astype(jnp.float32), group, num_columns)
    return rows if offset is None else rows + _over_columns(offset.astype(jnp.float32), group, num_columns)


def _in_model_order(rows: jax.Array, columns: jax.Array | None) -> jax.Array:
    return rows if columns is None else jnp.take(rows, jnp.argsort(columns), axis=-1)


def dequantize(weight: QuantizedWeight, dtype: Any = None) -> jax.Array:
    """Returns the dense matrix ``[..., out, in]``, computed in float32.

    The result is in `dtype`, by default that of the weight.
    """
    weight = weight.plain()
    dense = _rows_of(_looked_up(weight.values, weight.scheme), weight.scale, weight.offset, weight.scheme.group)
    return _in_model_order(dense, weight.columns).astype(weight.dtype if dtype is None else dtype)


def take_rows(weight: QuantizedWeight, indices: jax.Array, dtype: Any = None) -> jax.Array:
    """Returns rows ``[..., in]`` at int `indices` [...] of a matrix [out, in].

    A lookup in an embedding table reads them so.
    """
    values, scale, offset = _parts_of_rows(weight, indices)
    rows = _rows_of(_looked_up(values, weight.scheme), scale, offset, weight.scheme.group)
    return _in_model_order(rows, weight.columns).astype(weight.dtype if dtype is None else dtype)


def _parts_of_rows(weight: QuantizedWeight, indices: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns values, scales and offsets of rows of a matrix in any layout."""
    scheme, parts = weight.scheme, (weight.scale, weight.offset)
    if scheme.matrix is None:
        values = weight.values[indices]
        scale, offset = (None if part is None else part[indices] for part in parts)
    else:
        values = quantized_layout.rows_of_steps(weight.values, scheme.bits, scheme.zero, indices, scheme.matrix[1])
        block, lane = indices // BLOCK_ROWS, indices % BLOCK_ROWS
        scale, offset = (None if part is None else part[block, :, lane] for part in parts)
    assert scale is not None
    return values, scale, offset
