"""Brings quantized weights into the C++ kernels' order, where those support them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.ops import quantized_layout, registry
from model_adapters.ops.cpu import ffi
from model_adapters.ops.quantized_weight import FP4_DOUBLED, QuantizedWeight, Scheme

UNIT = 16
"""Columns: groups of scales must be multiples, for the kernel multiplies that many at a time."""


def unsupported_reason(weight: QuantizedWeight) -> str | None:
    """Returns why the C++ kernels cannot multiply with `weight`, or None."""
    scheme, columns = weight.scheme, weight.num_columns
    if registry.platform() != "cpu" or weight.scheme.layout != "plain":
        return "it is not in the plain layout, for a CPU"
    is_fp8 = weight.values.dtype == jnp.float8_e4m3fn
    if not (is_fp8 or jnp.issubdtype(weight.values.dtype, jnp.integer)):
        return f"its values are {weight.values.dtype}; the kernel has integers and float8_e4m3fn"
    if not _meets_kernel(scheme, columns, is_integer=not is_fp8 and scheme.table is None):
        return "its activations are rounded in a way that the kernel has not"
    if scheme.act_dtype == "float8_e4m3fn" and weight.ndim > 2:
        return "it is a matrix of each expert, whose activations the kernel does not round to float8"
    for group in (scheme.group, scheme.act_group or scheme.group):
        if group < columns and group % UNIT:
            return f"its groups have {group} columns, and the kernel takes multiples of {UNIT}"
    if scheme.act_group and scheme.group < columns and scheme.act_group % _unit(scheme.group):
        return f"its groups of {scheme.group} columns and {scheme.act_group} of activations do not meet"
    return ffi.missing()


def _meets_kernel(scheme: Scheme, num_columns: int, *, is_integer: bool) -> bool:
    """Returns whether the kernel multiplies with activations rounded as the scheme says."""
    if scheme.act_dtype == "float8_e4m3fn":  # one scale a row, which the sums are multiplied by
        return not is_integer and (scheme.act_group or scheme.group) >= num_columns
    return scheme.act_dtype == "none" or (is_integer and scheme.act_scale is None)


def _unit(group: int) -> int:
    return 32 if group % 32 == 0 else 16


def lay_out(weight: QuantizedWeight) -> QuantizedWeight:
    """Returns `weight` in the order of the C++ kernels if they can multiply with it.

    A weight that they cannot multiply with is returned as it is.

    Numbers are the same, but that offsets of unsigned 8-bit values are rounded to float32. All is done on the host:
    programs for it would take more time and memory to compile than to run.
    """
    if unsupported_reason(weight) is not None:
        return weight
    values, scale = np.asarray(weight.values), np.asarray(weight.scale)
    offset = None if weight.offset is None else np.asarray(weight.offset)
    scheme, numbers = weight.scheme, ""
    if scheme.bits == 4 and scheme.table is None:
        values, scheme = _in_4_bits(values, scheme)
    elif not np.issubdtype(values.dtype, np.integer):
        numbers, values = str(values.dtype), values.view(np.int8)
    elif values.dtype == np.uint8 and scheme.bits == 8:
        shift = np.float32(128) * scale.astype(np.float32)
        offset = shift if offset is None else offset.astype(np.float32) + shift
        values = values ^ np.uint8(128)  # less 128
    if scheme.table is not None:
        scheme = dataclasses.replace(scheme, zero=0)
    rows, columns = weight.stored_shape[-2:]
    scheme = dataclasses.replace(scheme, layout="cpu", matrix=(rows, columns), numbers=numbers)
    dtype = _scale_dtype(scale, offset)
    made = [quantized_layout.to_steps(values, scheme.bits, scheme.zero)]
    made += [quantized_layout.to_blocks(part, dtype) for part in (scale, offset) if part is not None]
    steps, *blocks = (jax.device_put(each, jax.local_devices(backend="cpu")[0], may_alias=True) for each in made)
    return QuantizedWeight(steps, blocks[0], blocks[1] if offset is not None else None, weight.columns, scheme)


def in_4_bits(weight: QuantizedWeight) -> QuantizedWeight:
    """Returns a weight in the plain layout whose numbers fit into its bits.

    Those that do not fit into 4 have 8.
    """
    scheme = weight.scheme
    if scheme.bits != 4:
        return weight
    if scheme.table is not None:
        return dataclasses.replace(weight, scheme=dataclasses.replace(scheme, zero=0))
    values = np.asarray(weight.values)
    fitting, scheme = _in_4_bits(values, scheme)
    numbers = weight.values if fitting is values else jnp.asarray(fitting)  # without a copy
    return dataclasses.replace(weight, values=numbers, scheme=scheme)


def _in_4_bits(values: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, Scheme]:
    """Returns numbers of 4 bits that fit into 4 bits, with what is added to them.

    Numbers that do not fit have 8 bits.

    Halves of fp4, which are -12 to 12, become places in a table if activations are not rounded.
    """
    values = values.astype(np.int8, copy=False)
    least, most = int(values.min()), int(values.max())
    zero = 8 if least < 0 or most < 8 else 0
    if least >= -zero and most <= 15 - zero:
        return values, dataclasses.replace(scheme, zero=zero)
    codes = _PLACES_IN_FP4[values.view(np.uint8)]
    if scheme.act_dtype == "none" and codes.max() < 16:
        return codes, dataclasses.replace(scheme, table=tuple(map(float, FP4_DOUBLED)))
    return values, dataclasses.replace(scheme, bits=8)


_PLACES_IN_FP4 = np.full(256, 255, np.uint8)
"""Place in `FP4_DOUBLED` of an int8 number by its bits; 255 of one that is not in it."""
_PLACES_IN_FP4[np.asarray(FP4_DOUBLED[::-1], np.int8).view(np.uint8)] = np.arange(15, -1, -1)


def _scale_dtype(scale: np.ndarray, offset: np.ndarray | None) -> type[np.floating]:
    """Returns float16 if it has all scales and offsets exactly, else float32."""
    for part in (scale, offset):
        if part is not None and part.dtype != np.float16:
            exact = part.astype(np.float32)
            with np.errstate(over="ignore"):
                if not np.array_equal(exact.astype(np.float16).astype(np.float32), exact):
                    return np.float32
    return np.float16
