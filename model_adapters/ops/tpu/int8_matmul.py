"""Products of real rows with int8 matrices as they are, for chips that multiply int8 by int8 alone.

A row is taken as fixed point, 32 bits of which four signed bytes are rows of one int8 product. Its sums are exact, so
that only the rows are rounded: to 2^-23 of a query's largest element or better, and to 2^-31 of the largest weight.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

ONE = 127 << 24
SIGNS = 0x00808080  # of the three lower bytes
TINY = 1e-30


def multiplies_int8() -> bool:
    """Whether the chip that is compiled for has products of int8."""
    return pltpu.is_tpu_device() and pltpu.get_tpu_info().is_matmul_supported(jnp.int8, jnp.int8)


def times_keys(q: jax.Array, keys: jax.Array) -> jax.Array:
    """``q[R, lanes]`` times each row of ``int8[n, lanes]``, in float32; the lowest byte of a query is left out."""
    q = q.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(q), axis=1, keepdims=True), TINY)
    words = _words(q / largest)
    rows = jnp.concatenate([(words << shift) >> 24 for shift in (16, 8, 0)], axis=0)
    products = jnp.split(_product(rows.astype(jnp.int8), keys, 1), 3, axis=0)
    return _joined(products) * (largest / 127)


def times_values(weights: jax.Array, values: jax.Array) -> jax.Array:
    """``weights[R, n]``, between 0 and 1, times ``int8[n, lanes]``, in float32.

    The bytes of a word are four rows in a row of a tile of int8, where they need not be moved to.
    """
    sums = _product(pltpu.bitcast(_words(weights), jnp.int8), values, 0)
    sums = sums.reshape(weights.shape[0], 4, values.shape[1])
    return _joined([sums[:, i] for i in range(4)]) * (1 / 127)


def _words(rows: jax.Array) -> jax.Array:
    """Elements in ``[-1, 1]`` times `ONE`, as int32 whose bytes are signed digits to base 256."""
    return ((rows * ONE).astype(jnp.int32) + SIGNS) ^ SIGNS


def _product(rows: jax.Array, matrix: jax.Array, contract: int) -> jax.Array:
    """``int8[R, n]`` times an int8 matrix, over axis `contract` of it: summed in int32, then float32."""
    dimensions = (((1,), (contract,)), ((), ()))
    return lax.dot_general(rows, matrix, dimensions, preferred_element_type=jnp.int32).astype(jnp.float32)


def _joined(products: list[jax.Array]) -> jax.Array:
    """What products with the digits of a word come to, from the lowest on, in units of the highest."""
    return functools.reduce(lambda low, high: high + low * 2**-8, products)
