"""Quantizes one weight by a rule.

On float32 weights values and scales are Qwix's to the last bit.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from model_adapters.errors import InvalidArgumentError
from model_adapters.ops import registry
from model_adapters.ops.quantized_weight import NF4, QuantizedWeight, Scheme
from model_adapters.quantization.rules import QuantizationRule


def scheme_of(rule: QuantizationRule, num_columns: int, dtype: Any, *, transposed: bool, source: str) -> Scheme:
    """Returns the static part of a weight with rows of `num_columns` that `rule` quantizes.

    Args:
        rule: The rule.
        num_columns: Length of the dimension that a product sums over.
        dtype: Dtype of the dense weight.
        transposed: Model code has the weight as [in, out].
        source: Name of the rules, for reports.
    """
    tile = rule.tile_size
    group = round(num_columns * tile) if isinstance(tile, float) else tile or num_columns
    return Scheme(
        bits=4 if rule.weight_qtype in ("int4", "nf4") else 8,
        group=min(group, num_columns),
        act_dtype=rule.act_qtype or "none",  # type: ignore[arg-type]  # checked by the rules
        dtype=str(jnp.dtype(dtype)),
        transposed=transposed,
        source=source,
        table=NF4 if rule.weight_qtype == "nf4" else None,
    )


def quantize_weight(
    name: str, weight: jax.Array, rule: QuantizationRule, *, transposed: bool = False, source: str = ""
) -> QuantizedWeight:
    """Returns a dense weight as values, scales and offsets in the plain layout.

    Args:
        name: Name of the weight, for errors.
        weight: ``[..., out, in]`` of floats, or ``[..., in, out]`` if `transposed`.
        rule: How; its ``weight_qtype`` is not "none".
        transposed: The order of the last two axes.
        source: Name of the rules, for reports.

    Raises:
        InvalidArgumentError: the weight holds NaN or infinity.
    """
    num_columns = weight.shape[-2 if transposed else -1]
    scheme = scheme_of(rule, num_columns, weight.dtype, transposed=transposed, source=source)
    is_finite, values, scale, offset = _quantized(weight, rule, scheme, registry.platform() == "cpu")
    if not bool(is_finite):
        raise InvalidArgumentError(
            f"{name}: expected finite numbers to quantize, got NaN or infinity; leave this weight dense by a rule with "
            'weight_qtype "none", or get the files again'
        )
    return QuantizedWeight(values, scale, offset, None, scheme)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _quantized(
    weight: jax.Array, rule: QuantizationRule, scheme: Scheme, is_cpu: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns whether all numbers are finite, bool[]; values ``[..., out, in]``.

    Then come scales and offsets by group.
    """
    dense = jnp.swapaxes(weight, -1, -2) if scheme.transposed else weight
    num_columns, group = dense.shape[-1], scheme.group
    num_groups = -(-num_columns // group)
    padding = [(0, 0)] * (dense.ndim - 1) + [(0, num_groups * group - num_columns)]
    tiles = jnp.pad(dense.astype(jnp.float32), padding).reshape(*dense.shape[:-1], num_groups, group)
    scale, zero = _scale_and_zero(tiles, rule)
    scale = scale.astype(rule.scale_dtype)
    quotients = tiles / scale.astype(jnp.float32)[..., None]
    if zero is not None:
        quotients = quotients + zero[..., None]
    values = quotients.reshape(*dense.shape[:-1], num_groups * group)[..., :num_columns]
    dtype = jnp.dtype(jnp.uint8 if scheme.table is not None else rule.weight_qtype)
    if scheme.table is not None:
        values = _nearest(values, scheme.table)
    elif rule.weight_qtype.startswith("int"):
        bounds = jnp.iinfo(dtype)
        values = jnp.clip(jnp.round(values), bounds.min, bounds.max)
        dtype = jnp.dtype(jnp.int8) if is_cpu else dtype  # see QuantizedWeight.values
    else:
        largest = float(jnp.finfo(dtype).max)
        values = jnp.clip(values, -largest, largest)
    offset = None if zero is None else -zero * scale.astype(jnp.float32)
    return jnp.isfinite(tiles).all(), values.astype(dtype), scale, offset


def _nearest(numbers: jax.Array, table: tuple[float, ...]) -> jax.Array:
    """Returns for each number float32[...] the nearest place int32[...] in an ascending table."""
    middles = [(low + high) / 2 for low, high in itertools.pairwise(table)]
    places: Any = sum(jnp.asarray(numbers > middle, jnp.int32) for middle in middles)
    return places


def _scale_and_zero(tiles: jax.Array, rule: QuantizationRule) -> tuple[jax.Array, jax.Array | None]:
    """Returns scales float32[..., groups] and integer zero points as float32, or None.

    The numbers are ``[..., groups, group]``.
    """
    method, *texts = rule.weight_calibration_method.lower().split(",")
    numbers = [float(text) for text in texts]
    if method == "signed_absmax":
        lowest = float(jnp.iinfo(rule.weight_qtype).min)
        first = jnp.argmax(jnp.abs(tiles), axis=-1, keepdims=True)
        return _not_tiny(jnp.take_along_axis(tiles, first, -1)[..., 0] / lowest), None
    if method == "minmax" or (method == "fixed" and len(numbers) == 2 and numbers[0] != -numbers[1]):
        return _asymmetric(tiles, rule, method, numbers)
    if method == "absmax":
        largest = jnp.max(jnp.abs(tiles), axis=-1) * (numbers[0] if numbers else 1.0)
    elif method == "rms":
        largest = jnp.sqrt(jnp.mean(jnp.square(tiles), axis=-1)) * numbers[0]
    else:
        largest = jnp.full(tiles.shape[:-1], abs(numbers[-1]), jnp.float32)
    # The barrier keeps XLA from making one constant of the factor and the divisor, which gives other last bits.
    return _not_tiny(jax.lax.optimization_barrier(largest) / _largest_value(rule.weight_qtype)), None


def _asymmetric(
    tiles: jax.Array, rule: QuantizationRule, method: str, numbers: list[float]
) -> tuple[jax.Array, jax.Array]:
    if method == "minmax":
        factor = numbers[0] if numbers else 1.0
        low, high = jnp.minimum(tiles.min(-1), 0) * factor, jnp.maximum(tiles.max(-1), 0) * factor
    else:
        low, high = (jnp.full(tiles.shape[:-1], number, jnp.float32) for number in numbers)
    bounds = jnp.iinfo(rule.weight_qtype)
    scale = _not_tiny((high - low) / (float(bounds.max) - float(bounds.min)))
    zero = jnp.clip(jnp.round(float(bounds.min) - low / scale), bounds.min, bounds.max)
    return scale, zero


def _largest_value(qtype: str) -> float:
    """Returns the number that the largest of a group becomes before it is rounded.

    It is half a step past the last one.
    """
    if qtype == "nf4":
        return 1.0
    dtype = jnp.dtype(qtype)
    return float(jnp.iinfo(dtype).max) + 0.5 if qtype.startswith("int") else float(jnp.finfo(dtype).max)


def _not_tiny(scale: jax.Array) -> jax.Array:
    """Returns scales with 1 in place of the tiniest.

    Quotients by those, of groups of zeros, could overflow.
    """
    return jnp.where(jnp.abs(scale) < math.sqrt(float(jnp.finfo(jnp.float32).tiny)), 1.0, scale)
