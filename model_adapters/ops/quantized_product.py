"""Products with quantized weights: implementations of the ops `linear` and `grouped_matmul`.

Without `act_dtype` the weight is dequantized and multiplied as any other. With it each row of activations is rounded,
in groups of columns as the weight's, with a scale for each group; products of the small numbers are summed exactly in
a group (int8), and scaled sums of groups are added in float32.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp

from model_adapters.ops import registry, spmd
from model_adapters.ops.compressed_weight import quantized_of
from model_adapters.ops.cpu import ffi
from model_adapters.ops.cpu.batching import with_rows_folded
from model_adapters.ops.cpu.quantized_numbers import QuantizedNumbers
from model_adapters.ops.grouped_matmul import OP as GROUPED_OP
from model_adapters.ops.grouped_matmul import ids_of, over_tiles
from model_adapters.ops.linear import OP as LINEAR_OP
from model_adapters.ops.linear import accumulator, finish, pad_one_row, precision, product_sums
from model_adapters.ops.quantized_weight import QuantizedWeight, Scheme, dequantized
from model_adapters.ops.routed_matmul import OP as ROUTED_OP
from model_adapters.ops.routed_matmul import Layout
from model_adapters.ops.routed_matmul import reference as by_sorted_rows

LARGEST_INT8 = 127.0
"""The rounded value of a group's largest number.

-128 is not used: the CPU kernel takes a sign off.
"""


def round_rows(x: jax.Array, group: int, act_dtype: str) -> tuple[jax.Array, jax.Array]:
    """Returns rows rounded in groups of columns, and the scales of the groups.

    Args:
        x: float[rows, in].
        group: Number of columns that share a scale; the last group may be shorter.
        act_dtype: "int8" or "float8_e4m3fn".

    Returns:
        Numbers ``act_dtype[rows, groups, group]``, padded with zeros, and scales float32[rows, groups].
    """
    num_rows, num_columns = x.shape
    groups = -(-num_columns // group)
    padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, groups * group - num_columns)))
    tiles = padded.reshape(num_rows, groups, group)
    largest = jnp.max(jnp.abs(tiles), axis=-1)
    top = LARGEST_INT8 if act_dtype == "int8" else float(jnp.finfo(act_dtype).max)
    quotients = tiles * jnp.where(largest > 0, top / largest, 0)[..., None]
    rounded = jnp.round(quotients) if act_dtype == "int8" else jnp.clip(quotients, -top, top)
    return rounded.astype(act_dtype), largest / top


def quantized_sums(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """Returns ``x[rows, in]`` times the transpose of a quantized matrix [out, in].

    The sums are in float32 or more.
    """
    scheme, weight = weight.scheme, weight if weight.is_input_major else weight.plain()
    if scheme.act_dtype == "none":
        return _float_sums(x, weight)
    if weight.columns is not None:
        x = x[:, weight.columns]
    num_columns, group = weight.num_columns, weight.scheme.group
    act_group = min(scheme.act_group or group, num_columns)
    if scheme.act_scale is not None:
        numbers, scale = _rounded_by(x, scheme.act_scale, scheme.act_dtype)
        act_group = num_columns
    else:
        numbers, scale = round_rows(x, act_group, scheme.act_dtype)
    step = math.gcd(min(group, num_columns), act_group)
    return _sums_of_groups(numbers.reshape(len(x), -1)[:, :num_columns], scale, act_group, weight, step)


def _float_sums(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """Returns the product with activations as they are, in float32 or more.

    A scale for each row, without an offset, is applied to the sums: numbers of 8 bits are exact in 16. Otherwise the
    weight is dequantized. Both are one fusion for XLA on a TPU where a scale's row lies along the lanes.
    """
    if weight.columns is not None:
        x, weight = x[:, weight.columns], dataclasses.replace(weight, columns=None)
    is_by_row = weight.scale.shape[-2 if weight.is_input_major else -1] == 1
    if not is_by_row or weight.offset is not None or weight.scheme.table is not None:
        return _product_sums(x, dequantized(weight, x.dtype), weight)
    sums = _product_sums(x, weight.values.astype(x.dtype), weight)
    return sums * weight.scale.astype(sums.dtype).reshape(1, -1)


def _product_sums(x: jax.Array, matrix: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """Returns XLA's product of ``x[rows, in]`` and a matrix, in the accumulator.

    The axes are in the order of `weight`.
    """
    if not weight.is_input_major:
        return product_sums(x, matrix)
    return jnp.matmul(x, matrix, precision=precision(x.dtype), preferred_element_type=accumulator(x.dtype))


def _rounded_by(x: jax.Array, scale: float, act_dtype: str) -> tuple[jax.Array, jax.Array]:
    """Returns `x` as rounded rows [rows, 1, in], and scales float32[rows, 1].

    The scale is one that a checkpoint fixes.
    """
    quotients = x.astype(jnp.float32)[:, None] / scale
    bounds = jnp.iinfo(act_dtype) if act_dtype == "int8" else jnp.finfo(act_dtype)
    rounded = jnp.round(quotients) if act_dtype == "int8" else quotients
    rounded = jnp.clip(rounded, float(bounds.min), float(bounds.max))  # to -128, as compressed-tensors does
    return rounded.astype(act_dtype), jnp.full((len(x), 1), scale, jnp.float32)


def _sums_of_groups(
    numbers: jax.Array, scale: jax.Array, act_group: int, weight: QuantizedWeight, step: int
) -> jax.Array:
    """Returns float32[rows, out]: exact sums in steps of columns, each times both scales.

    Args:
        numbers: Rounded activations [rows, in].
        scale: Their scales float32[rows, groups].
        act_group: Columns that share one of these scales.
        weight: In the plain or input-major layout, columns in the stored order.
        step: Columns of a sum, a divisor of both groups.
    """
    num_columns, (num_rows, _) = numbers.shape[1], weight.stored_shape
    steps = -(-num_columns // step)
    pad = ((0, 0), (0, steps * step - num_columns))
    left = jnp.pad(numbers, pad).reshape(-1, steps, step)
    if weight.is_input_major:
        right, axes = jnp.pad(weight.values, pad[::-1]).reshape(steps, step, num_rows), (((2,), (1,)), ((1,), (0,)))
    else:
        right, axes = jnp.pad(weight.values, pad).reshape(num_rows, steps, step), (((2,), (2,)), ((1,), (1,)))
    is_integer = jnp.issubdtype(numbers.dtype, jnp.integer)
    if is_integer and right.dtype != jnp.int8:
        right = right.astype(jnp.int8 if right.dtype in (jnp.int4, jnp.uint4) else jnp.int32)
        left = left.astype(right.dtype)
    exact = jnp.int32 if is_integer else jnp.float32
    sums = jax.lax.dot_general(left, right, axes, preferred_element_type=exact)
    firsts = jnp.arange(steps) * step
    left_scale = scale[:, firsts // act_group].T  # [steps, rows]
    of_weight = firsts // weight.scheme.group
    right_scale = _of_groups(weight.scale, weight, of_weight)
    total = jnp.sum(sums.astype(jnp.float32) * left_scale[:, :, None] * right_scale[:, None, :], axis=0)
    if weight.offset is None:
        return total
    row_sums = jnp.sum(left.astype(exact), axis=2).astype(jnp.float32) * left_scale.T  # [rows, steps]
    offsets = _of_groups(weight.offset, weight, of_weight)
    return total + jnp.einsum("rs,so->ro", row_sums, offsets, precision=jax.lax.Precision.HIGHEST)


def _of_groups(by_group: jax.Array, weight: QuantizedWeight, groups: jax.Array) -> jax.Array:
    """Returns scales or offsets of `weight` for `groups` int32[steps]: float32[steps, out]."""
    found = by_group.astype(jnp.float32)
    return found[groups] if weight.is_input_major else found[:, groups].T


def _unsupported_reason(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> str | None:
    found = quantized_of(weight)
    return "the weight is not quantized" if found is None or found.scheme.transposed else None


@registry.register(
    LINEAR_OP, "quantized", registry.PLATFORMS, unsupported_reason=_unsupported_reason, takes_precedence=True
)
def quantized(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Computes with a quantized weight, on any platform and mesh."""
    found = quantized_of(weight)
    assert found is not None
    return finish(quantized_sums(pad_one_row(x), found)[: len(x)], bias, x.dtype)


def _kernel_unsupported_reason(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> str | None:
    if (reason := _unsupported_reason(x, weight, bias)) is not None:
        return reason
    found = quantized_of(weight)
    assert found is not None
    if found.scheme.layout != "cpu":
        return "the weight is not in the kernel's order"
    if spmd.mesh_in_use() is not None:
        return "a mesh of devices"
    return ffi.unsupported_reason(x) if x.shape[0] else "no rows"


def _numbers_of(scheme: Scheme, num_columns: int) -> QuantizedNumbers:
    """Returns what the kernels have to know of a weight in their order."""
    kind = "table" if scheme.table is not None else scheme.numbers or f"int{scheme.bits}"
    act_group = min(scheme.act_group or scheme.group, num_columns) if scheme.act_dtype == "int8" else 0
    return QuantizedNumbers(kind, scheme.zero, scheme.group, act_group, scheme.table)


def _kernel_product(x: jax.Array, weight: QuantizedWeight, bias: jax.Array | None) -> jax.Array:
    """Returns ``x[rows, in]`` times the transpose of a matrix in the kernel's order.

    Adds ``bias[out]``; the result is in x's dtype.
    """
    scheme, (num_rows, num_columns) = weight.scheme, weight.stored_shape[-2:]
    if weight.columns is not None:
        x = x[:, weight.columns]
    parts, numbers = (weight.values, weight.scale, weight.offset), _numbers_of(scheme, num_columns)
    if scheme.act_dtype != "float8_e4m3fn":
        return ffi.quantized_linear(x, *parts, bias, num_rows=num_rows, numbers=numbers)
    rows, scale = _rounded_rows(x, scheme)
    sums = ffi.quantized_linear(rows, *parts, None, num_rows=num_rows, numbers=numbers) * scale
    return finish(sums, bias, x.dtype)


def _rounded_rows(x: jax.Array, scheme: Scheme) -> tuple[jax.Array, jax.Array]:
    """Returns rounded numbers float32[rows, in], and their scales float32[rows, 1]."""
    if scheme.act_scale is None:
        numbers, scale = round_rows(x, x.shape[1], scheme.act_dtype)
    else:
        numbers, scale = _rounded_by(x, scheme.act_scale, scheme.act_dtype)
    return numbers[:, 0].astype(jnp.float32), scale


@registry.register(
    LINEAR_OP, "cpu-quantized", ("cpu",), unsupported_reason=_kernel_unsupported_reason, takes_precedence=True
)
def streamed(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Computes with the C++ kernel, which reads a quantized weight as it is stored."""
    found = quantized_of(weight)
    assert found is not None
    return _kernel_product(x, found, bias)


def _grouped_unsupported_reason(
    x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, layout: Layout
) -> str | None:
    return "the weight is not quantized" if _experts_of(weight, layout) is None else None


def _experts_of(weight: jax.Array, layout: Layout) -> QuantizedWeight | None:
    """Returns quantized experts that are stored as [E, out, in]; None for any other weight.

    Model code may have transposed them or not.
    """
    found = quantized_of(weight)
    return found if found is not None and found.scheme.transposed == (layout == "ekn") else None


@registry.register(
    GROUPED_OP, "quantized", registry.PLATFORMS, unsupported_reason=_grouped_unsupported_reason, takes_precedence=True
)
def quantized_experts(x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, layout: Layout) -> jax.Array:
    """Computes one product for each expert that has rows.

    Each expert is dequantized right before its product.
    """
    found = _experts_of(weight, layout)
    assert found is not None
    matrices = dataclasses.replace(found, columns=None, scheme=dataclasses.replace(found.scheme, transposed=False))

    def product(rows: jax.Array, expert: jax.Array) -> jax.Array:
        one = jax.tree.map(lambda part: jax.lax.dynamic_index_in_dim(part, expert, keepdims=False), matrices)
        return quantized_sums(rows, dataclasses.replace(one, columns=found.columns))

    return over_tiles(x, group_sizes, found.stored_shape[-2], product)


def _kernel_reason_of_experts(x: jax.Array, found: QuantizedWeight | None) -> str | None:
    """Returns why the C++ kernel cannot multiply rows `x` with quantized experts, or None."""
    if found is None:
        return "the weight is not quantized"
    if found.scheme.layout != "cpu" or found.scheme.act_dtype == "float8_e4m3fn":
        return "the weight is not in the kernel's order, or float8 activations"
    if spmd.mesh_in_use() is not None:
        return "a mesh of devices"
    return ffi.unsupported_reason(x) if x.shape[0] else "no rows"


def _routed_kernel_product(x: jax.Array, ids: jax.Array, experts: QuantizedWeight, bias: jax.Array | None) -> jax.Array:
    """Returns ``[T, choices, out]``: rows of x times the experts that ids[T, choices] name."""
    num_rows, num_columns = experts.stored_shape[-2:]
    if experts.columns is not None:
        x = x[..., experts.columns]
    numbers = _numbers_of(experts.scheme, num_columns)
    kernel = with_rows_folded(partial(ffi.quantized_routed_linear, num_rows=num_rows, numbers=numbers), 2)
    return kernel(x, ids, experts.values, experts.scale, experts.offset, bias)


def _grouped_kernel_unsupported_reason(
    x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, layout: Layout
) -> str | None:
    return _kernel_reason_of_experts(x, _experts_of(weight, layout))


@registry.register(
    GROUPED_OP,
    "cpu-quantized",
    ("cpu",),
    unsupported_reason=_grouped_kernel_unsupported_reason,
    takes_precedence=True,
)
def streamed_experts(x: jax.Array, weight: jax.Array, group_sizes: jax.Array, *, layout: Layout) -> jax.Array:
    """Computes with the C++ kernel, which reads the experts that have rows as they are stored."""
    found = _experts_of(weight, layout)
    assert found is not None
    return _routed_kernel_product(x, ids_of(group_sizes, x.shape[0]), found, None)[:, 0]


def _routed_unsupported_reason(
    x: jax.Array, weight: jax.Array, ids: jax.Array, bias: jax.Array | None, *, layout: Layout
) -> str | None:
    return "the weight is not quantized" if _experts_of(weight, layout) is None else None


@registry.register(
    ROUTED_OP, "quantized", registry.PLATFORMS, unsupported_reason=_routed_unsupported_reason, takes_precedence=True
)
def sorted_choices(
    x: jax.Array, weight: jax.Array, ids: jax.Array, bias: jax.Array | None, *, layout: Layout
) -> jax.Array:
    """Computes the product of sorted rows, one for each expert that has rows."""
    return by_sorted_rows(x, weight, ids, bias, layout=layout)


def _routed_kernel_unsupported_reason(
    x: jax.Array, weight: jax.Array, ids: jax.Array, bias: jax.Array | None, *, layout: Layout
) -> str | None:
    return _kernel_reason_of_experts(x, _experts_of(weight, layout))


@registry.register(
    ROUTED_OP,
    "cpu-quantized",
    ("cpu",),
    unsupported_reason=_routed_kernel_unsupported_reason,
    takes_precedence=True,
)
def streamed_choices(
    x: jax.Array, weight: jax.Array, ids: jax.Array, bias: jax.Array | None, *, layout: Layout
) -> jax.Array:
    """Computes with the C++ kernel, which reads experts that rows name as they are stored."""
    found = _experts_of(weight, layout)
    assert found is not None
    return _routed_kernel_product(x, ids, found, bias)
