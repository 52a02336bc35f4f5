"""Brings quantized weights into the order of the C++ kernels, where those can multiply with them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from model_adapters.ops import quantized_layout, registry
from model_adapters.ops.cpu import ffi
from model_adapters.ops.quantized_weight import QuantizedWeight, Scheme

UNIT = 16
"""Columns: groups of scales must be multiples, for the kernel multiplies that many at a time."""


def unsupported_reason(weight: QuantizedWeight) -> str | None:
    """Returns why the C++ kernels cannot multiply with `weight`, or None."""
    scheme, columns = weight.scheme, weight.num_columns
    if registry.platform() != "cpu" or weight.scheme.layout != "plain":
        return "it is not in the plain layout, for a CPU"
    if not jnp.issubdtype(weight.values.dtype, jnp.integer):
        return f"its values are {weight.values.dtype}; the kernel has integers"
    if scheme.table is not None:
        return "its values are indices of a table"
    if scheme.act_dtype not in ("none", "int8") or scheme.act_scale is not None:
        return "its activations are rounded in a way that the kernel has not"
    for group in (scheme.group, scheme.act_group or scheme.group):
        if group < columns and group % UNIT:
            return f"its groups have {group} columns, and the kernel takes multiples of {UNIT}"
    if scheme.act_group and scheme.group < columns and scheme.act_group % _unit(scheme.group):
        return f"its groups of {scheme.group} columns and {scheme.act_group} of activations do not meet"
    return ffi.missing()


def _unit(group: int) -> int:
    return 32 if group % 32 == 0 else 16


def lay_out(weight: QuantizedWeight) -> QuantizedWeight:
    """Returns `weight` in the order of the C++ kernels if they can multiply with it; else as it is.

    Numbers are the same, but that offsets of unsigned 8-bit values are rounded to float32.
    """
    if unsupported_reason(weight) is not None:
        return weight
    scheme = weight.scheme
    zero = 8
    if scheme.bits == 4:
        least, most = int(jnp.min(weight.values.astype(jnp.int8))), int(jnp.max(weight.values.astype(jnp.int8)))
        zero = 8 if least < 0 or most < 8 else 0
        if least < -zero or most > 15 - zero:
            scheme = dataclasses.replace(scheme, bits=8)  # such as the halves of fp4, which are -12 to 12
    dtype = _scale_dtype(weight)
    rows, columns = weight.stored_shape[-2:]
    scheme = dataclasses.replace(scheme, layout="cpu", matrix=(rows, columns), zero=zero)
    values, scale, offset = _in_order(weight.values, weight.scale, weight.offset, scheme, dtype)
    return QuantizedWeight(values, scale, offset, weight.columns, scheme)


def _scale_dtype(weight: QuantizedWeight) -> str:
    """Returns float16 if it holds all scales and offsets exactly, else float32."""
    if weight.values.dtype == jnp.uint8 and weight.scheme.bits == 8:
        return "float32"
    for part in (weight.scale, weight.offset):
        if part is not None and part.dtype != jnp.float16:
            exact = np.asarray(part, np.float32)
            with np.errstate(over="ignore"):
                if not np.array_equal(exact.astype(np.float16).astype(np.float32), exact):
                    return "float32"
    return "float16"


@functools.partial(jax.jit, static_argnums=(3, 4))
def _in_order(
    values: jax.Array, scale: jax.Array, offset: jax.Array | None, scheme: Scheme, dtype: str
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    if values.dtype == jnp.uint8 and scheme.bits == 8:
        shift = 128.0 * scale.astype(jnp.float32)
        offset = shift if offset is None else offset.astype(jnp.float32) + shift
        values = (values ^ 128).astype(jnp.int8)  # less 128
    steps = quantized_layout.to_steps(values, scheme.bits, scheme.zero)
    blocks = (None if part is None else quantized_layout.to_blocks(part.astype(dtype)) for part in (scale, offset))
    return steps, *blocks  # type: ignore[return-value]  # two of them
