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
Layout = Literal["plain", "cpu", "pairs", "input-major"]


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
            (`model_adapters.ops.quantized_layout`); "pairs" is ``values[..., out, in / 2]``, two numbers of 4 bits in a
            byte, on meshes of CPU devices; "input-major" is ``values[..., in, out]``, on accelerators: a
            group's scales lie along the lanes there, so that XLA converts numbers on their way to a product.
        source: Format or preset that the weight comes from, for reports: "gptq", "int8".
        act_group: Columns that share a scale of activations; None is `group`.
        matrix: Sizes ``(out, in)``, where the layout pads them ("cpu"); None in the others.
        zero: What the layouts "cpu" and "pairs" have added to numbers of 4 bits.
        act_scale: Scale of the activations if a checkpoint fixes it; None computes one for each row.
        table: The 16 numbers that values of 4 bits are indices of (nf4, fp4); None: values are numbers.
        numbers: Dtype of the numbers where the stored ones are their bits ("cpu": "float8_e4m3fn"); "" for integers.
        axes: On a mesh the axes that columns and rows are divided along; None for a matrix of each expert.
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
    numbers: str = ""
    axes: tuple[str | None, str | None] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [out, in], or one for each expert [E, out, in], in the place of a weight.

    Attributes:
        values: In the plain layout numbers ``[..., out, in]``: int8, uint8, int4, uint4, float8_e4m3fn, float4_e2m1fn.
            On CPUs 4-bit integers are int8: arrays of jnp.int4 fail there in programs compiled ahead of time, and have
            a byte for each number. In the layouts "cpu" and "pairs" uint8 holds two of them.
        scale: ``[..., out, ceil(in / group)]``, float32, bfloat16 or float16; input-major ``[..., groups, out]``.
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
        if self.scheme.matrix is not None:
            return (*self.values.shape[:-4], *self.scheme.matrix)
        *lead, first, second = self.values.shape
        if self.scheme.layout == "pairs":
            second *= 2
        return (*lead, second, first) if self.is_input_major else (*lead, first, second)

    @property
    def is_input_major(self) -> bool:
        """Whether the matrix is stored as [in, out]."""
        return self.scheme.layout == "input-major"

    @property
    def num_columns(self) -> int:
        """Length of the dimension that a product sums over."""
        return self.stored_shape[-1]

    @property
    def has_float_numbers(self) -> bool:
        """Whether the numbers are floats, also where an array of integers holds their bits."""
        return bool(self.scheme.numbers or jnp.issubdtype(self.values.dtype, jnp.floating))

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
        return sum(num_bytes(part) for part in jax.tree.leaves(self))

    def turned(self) -> QuantizedWeight:
        """Returns the same numbers for model code that has exchanged the last two axes."""
        scheme = dataclasses.replace(self.scheme, transposed=not self.scheme.transposed)
        return dataclasses.replace(self, scheme=scheme)

    def plain(self) -> QuantizedWeight:
        """Returns the same numbers in the plain layout."""
        scheme = self.scheme
        if scheme.layout == "plain":
            return self
        if self.is_input_major:
            return self.with_layout("plain")
        if scheme.layout == "pairs":
            numbers = quantized_layout.from_pairs(self.values, scheme.zero)
            return dataclasses.replace(self, values=numbers, scheme=_plain_scheme(scheme))
        assert scheme.matrix is not None
        values = _as_numbers(quantized_layout.from_steps(self.values, scheme.bits, scheme.zero, *scheme.matrix), scheme)
        scale, offset = (
            None if part is None else quantized_layout.from_blocks(part, scheme.matrix[0])
            for part in (self.scale, self.offset)
        )
        assert scale is not None
        return QuantizedWeight(values, scale, offset, self.columns, _plain_scheme(scheme))

    def with_layout(self, layout: Layout) -> QuantizedWeight:
        """Returns the numbers of the plain or input-major layout with their last two axes exchanged."""
        values, scale, offset = (
            None if part is None else jnp.swapaxes(part, -1, -2) for part in (self.values, self.scale, self.offset)
        )
        assert values is not None
        assert scale is not None
        return QuantizedWeight(values, scale, offset, self.columns, dataclasses.replace(self.scheme, layout=layout))

    def unpacked(self) -> jax.Array:
        """Returns the dense weight, in the shape and dtype that model code expects."""
        dense = _dense(self)
        return jnp.swapaxes(dense, -1, -2) if self.scheme.transposed != self.is_input_major else dense


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
    return dataclasses.replace(scheme, layout="plain", matrix=None, numbers="")


def _as_numbers(values: jax.Array, scheme: Scheme) -> jax.Array:
    """Returns stored int8 as the numbers whose bits they are, if they are that."""
    return jax.lax.bitcast_convert_type(values, scheme.numbers) if scheme.numbers else values


def num_bytes(array: Any) -> int:
    """Returns the bytes of an array or of a shape; two numbers of 4 bits take one."""
    kind = jnp.dtype(array.dtype)
    bits = 4 if kind.name in OF_4_BITS else 8 * kind.itemsize
    return math.prod(array.shape) * bits // 8


OF_4_BITS = ("int4", "uint4", "float4_e2m1fn")
"""Dtypes whose numbers take half a byte in an accelerator's memory; `itemsize` is 1."""


FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The 16 numbers of float4_e2m1fn, times two."""
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 numbers of nf4: quantiles of a normal distribution (QLoRA, Dettmers et al. 2023, appendix E)."""


def looked_up(values: jax.Array, scheme: Scheme) -> jax.Array:
    """Returns float32 numbers that stored values mean: themselves, or places in a table."""
    if scheme.table is None:
        return values.astype(jnp.float32)
    codes = values.astype(jnp.int32)
    if scheme.table == FP4_DOUBLED:
        code = codes & 7
        size = jnp.where(code < 4, code, jnp.where(code < 6, 2 * code - 4, 4 * code - 16))
        return jnp.where(codes < 8, size, -size).astype(jnp.float32)
    if scheme.layout == "plain":
        return jnp.asarray(scheme.table, jnp.float32)[codes]
    numbers: list[Any] = list(scheme.table)  # an accelerator selects faster than it looks up
    for bit in range(4):
        is_odd = (codes >> bit) & 1 == 1
        numbers = [jnp.where(is_odd, odd, even) for even, odd in zip(numbers[::2], numbers[1::2], strict=True)]
    return numbers[0].astype(jnp.float32)


def _numbers(values: jax.Array, scale: jax.Array, offset: jax.Array | None, scheme: Scheme, axis: int) -> jax.Array:
    """Returns float32 values times scale plus offset.

    Columns are along `axis` (-1 or -2) in the stored order.
    """
    num_columns, groups = values.shape[axis], scale.shape[axis]
    group = num_columns if groups == 1 else scheme.group
    dense = looked_up(values, scheme)
    missing = groups * group - num_columns
    if missing:  # the last group is shorter
        dense = jnp.pad(dense, [(0, missing if each == dense.ndim + axis else 0) for each in range(dense.ndim)])
    at = dense.ndim + axis
    # By groups, and not with scales repeated for all columns, which XLA would write to memory.
    tiles = dense.reshape(*dense.shape[:at], groups, group, *dense.shape[at + 1 :])
    tiles = tiles * jnp.expand_dims(scale.astype(jnp.float32), at + 1)
    if offset is not None:
        tiles = tiles + jnp.expand_dims(offset.astype(jnp.float32), at + 1)
    return jax.lax.slice_in_dim(tiles.reshape(dense.shape), 0, num_columns, axis=at)


def _in_model_order(dense: jax.Array, columns: jax.Array | None, axis: int) -> jax.Array:
    return dense if columns is None else jnp.take(dense, jnp.argsort(columns), axis=axis)


def dequantize(weight: QuantizedWeight, dtype: Any = None) -> jax.Array:
    """Returns the dense matrix ``[..., out, in]``, computed in float32.

    The result is in `dtype`, by default that of the weight.
    """
    return dequantized(weight.plain(), weight.dtype if dtype is None else dtype)


def dequantized(weight: QuantizedWeight, dtype: Any) -> jax.Array:
    """Returns the dense matrix ``[..., out, in]`` in `dtype`, computed in float32.

    Input-major it is ``[..., in, out]``.
    """
    if not weight.is_input_major:
        weight = weight.plain()
    axis = -2 if weight.is_input_major else -1
    dense = _numbers(weight.values, weight.scale, weight.offset, weight.scheme, axis)
    return _in_model_order(dense, weight.columns, axis).astype(dtype)


@jax.jit
def _dense(weight: QuantizedWeight) -> jax.Array:
    """Returns `dequantized` in the weight's dtype, traced once for all weights of one form."""
    return dequantized(weight, weight.dtype)


def take_rows(weight: QuantizedWeight, indices: jax.Array, dtype: Any = None) -> jax.Array:
    """Returns rows ``[..., in]`` at int `indices` [...] of a matrix [out, in].

    A lookup in an embedding table reads them so.
    """
    rows = _numbers(*_parts_of_rows(weight, indices), weight.scheme, -1)
    return _in_model_order(rows, weight.columns, -1).astype(weight.dtype if dtype is None else dtype)


def _parts_of_rows(weight: QuantizedWeight, indices: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns values, scales and offsets of rows of a matrix in any layout."""
    scheme, parts = weight.scheme, (weight.scale, weight.offset)
    if weight.is_input_major:
        values, scale, offset = (
            None if part is None else jnp.moveaxis(part[:, indices], 0, -1) for part in (weight.values, *parts)
        )
        assert values is not None
    elif scheme.matrix is None:
        values = weight.values[indices]
        if scheme.layout == "pairs":
            values = quantized_layout.from_pairs(values, scheme.zero)
        scale, offset = (None if part is None else part[indices] for part in parts)
    else:
        values = quantized_layout.rows_of_steps(weight.values, scheme.bits, scheme.zero, indices, scheme.matrix[1])
        values = _as_numbers(values, scheme)
        block, lane = indices // BLOCK_ROWS, indices % BLOCK_ROWS
        scale, offset = (None if part is None else part[block, :, lane] for part in parts)
    assert scale is not None
    return values, scale, offset
