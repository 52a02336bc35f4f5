"""Brings quantized weights into the layout of the platform that multiplies with them.

On a CPU that is the order of the C++ kernels, and on a mesh of CPU devices the plain one, where numbers of 4 bits are
ready to lie two in a byte (`model_adapters.sharding.quantized_sharding`). On accelerators it is input-major, with two
numbers of 4 bits in a byte: there XLA turns numbers into bfloat16 on their way to a product, where the scales of a
group lie along the lanes. With scales along the columns of ``[out, in]`` it would write them to memory for every number
first.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.ops import registry
from model_adapters.ops.quantized_weight import FP4_DOUBLED, QuantizedWeight, Scheme, dequantize
from model_adapters.quantization import cpu_layout
from model_adapters.quantization.quantize import quantize_weight
from model_adapters.quantization.rules import QuantizationRule

FP8_GROUP = 128
"""Columns of a group of int8 that takes the place of float8; that of the usual blocks."""
AS_INT8 = "as int8"
"""Behind the source of a weight in float8 that a chip without float8 has as int8."""


def lay_out(weight: QuantizedWeight, *, on_mesh: bool = False) -> QuantizedWeight:
    """Returns a weight in the plain layout in that of the platform, on one device or for a mesh."""
    if registry.platform() != "cpu":
        return _for_accelerator(weight)
    return cpu_layout.in_4_bits(weight) if on_mesh else cpu_layout.lay_out(weight)


def accelerator_scheme(scheme: Scheme, num_columns: int, *, multiplies_fp8: bool, is_fp8: bool) -> Scheme:
    """Returns the static part of a weight on an accelerator.

    Args:
        scheme: That of the plain layout.
        num_columns: Columns of the weight.
        multiplies_fp8: Whether the chip multiplies float8; on others converting it takes longer than reading bfloat16.
        is_fp8: Whether the numbers are float8.
    """
    if is_fp8 and not multiplies_fp8:
        source = f"{scheme.source} {AS_INT8}"
        scheme = dataclasses.replace(
            scheme, group=min(FP8_GROUP, num_columns), act_dtype="none", act_group=None, act_scale=None, source=source
        )
    return dataclasses.replace(scheme, layout="input-major")


def multiplies_fp8() -> bool:
    """Returns whether the accelerator multiplies float8.

    It is that of this process, or the one that is compiled for.
    """
    if registry.platform() != "tpu":
        return True  # each GPU since sm_89; older ones convert
    from jax.experimental.pallas import tpu as pltpu

    return bool(pltpu.is_tpu_device()) and pltpu.get_tpu_info().fp8_ops_per_second > 0


def _for_accelerator(weight: QuantizedWeight) -> QuantizedWeight:
    is_fp8 = weight.values.dtype == jnp.float8_e4m3fn
    scheme = accelerator_scheme(
        weight.scheme, weight.num_columns, multiplies_fp8=not is_fp8 or multiplies_fp8(), is_fp8=is_fp8
    )
    if scheme.source != weight.scheme.source:
        rule = QuantizationRule(weight_qtype="int8", tile_size=scheme.group)
        weight = quantize_weight("float8", dequantize(weight, jnp.float32), rule)
    dtype, is_fp4 = _dtype_of(weight)
    if is_fp4:
        scheme = dataclasses.replace(scheme, table=tuple(map(float, FP4_DOUBLED)))
    values, scale, offset = _input_major(weight.values, weight.scale, weight.offset, dtype, is_fp4)
    return QuantizedWeight(values, scale, offset, weight.columns, scheme)


def _dtype_of(weight: QuantizedWeight) -> tuple[str, bool]:
    """Returns the dtype that holds the numbers, and whether that is codes of 4-bit floats."""
    dtype = str(weight.values.dtype)
    if weight.scheme.bits != 4 or dtype not in ("int8", "uint8"):
        return dtype, False
    least, most = int(jnp.min(weight.values)), int(jnp.max(weight.values))
    if least >= -8 and most < 8:
        return "int4", False
    if least >= 0 and most < 16:
        return "uint4", False
    return "uint4", True  # halves of 4-bit floats, which are -12 to 12


@functools.partial(jax.jit, static_argnums=(3, 4))
def _input_major(
    values: jax.Array, scale: jax.Array, offset: jax.Array | None, dtype: str, is_fp4: bool
) -> tuple[jax.Array, jax.Array, Any]:
    if is_fp4:
        size = jnp.abs(values)
        # 0 1 2 3 4 6 8 12: the first four are their own codes.
        code = jnp.where(size < 4, size, jnp.where(size < 8, (size >> 1) + 2, (size >> 2) + 4))
        values = code + 8 * (values < 0)
    turned = (None if part is None else jnp.swapaxes(part, -1, -2) for part in (scale, offset))
    return jnp.swapaxes(values.astype(dtype), -1, -2), *turned  # type: ignore[return-value]  # two of them
